"""The house rules, held against the source: layers, light imports, one table per extension."""

import ast
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import autockpt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "autockpt"

# Imports point to a lower layer only; packages of one layer do not import one another.
LAYERS = (
    ("errors", "schema", "interpreter", "process"),
    ("solvers", "devices", "shipped"),
    ("checkpointing", "terminal", "progress"),
    ("policies", "workload"),
    ("verification",),
    ("runtime",),
    ("tracing", "measuring"),
    ("cost",),
    ("tuning",),
    ("integrations", "analysis"),
    ("cli", "auto", "public"),
    ("__main__",),
)
SIBLINGS = {("schema", "errors"), ("process", "interpreter"), ("public", "cli")}
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

# third-party packages that whole packages must do without
WITHOUT = {
    "errors": ("torch", "numpy", "scipy", "optuna", "transformers", "pydantic", "rich"),
    "schema": ("torch", "numpy", "scipy", "optuna", "transformers", "rich"),
    "solvers": ("torch", "optuna", "transformers"),
    "shipped": ("torch", "numpy", "transformers"),
    "terminal": ("torch", "optuna", "transformers"),
    "progress": ("torch", "optuna", "transformers"),
}
ONLY = {"optuna": ("tuning",), "typer": ("cli",), "rich": ("cli", "terminal", "progress")}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    """The package or top-level module that a source file belongs to."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports anywhere, in functions too, with its line; ``from a import b`` as ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = ("autockpt", *path.relative_to(SOURCE).with_suffix("").parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            start = ".".join(p for p in (base, node.module or "") if p)
            for alias in node.names:
                yield f"{start}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


def _is_dynamic_import(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("import_module", "__import__")


def violations(path: Path) -> Iterator[str]:
    package = package_of(path)
    for name, line in imported(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        top, *rest = name.split(".")
        if top in WITHOUT.get(package, ()):
            yield f"{where}: {package} does without {top}"
        if top in ONLY and package not in ONLY[top]:
            yield f"{where}: only {', '.join(ONLY[top])} may"
        if top != "autockpt" or package == "__init__" or not rest:
            continue
        other = rest[0]
        if other not in LAYER or other == package:
            continue
        if LAYER[other] > LAYER[package]:
            yield f"{where}: {other} is in a higher layer"
        elif LAYER[other] == LAYER[package] and (package, other) not in SIBLINGS:
            yield f"{where}: {other} is a sibling"


def test_every_package_has_a_layer() -> None:
    assert {package_of(p) for p in modules()} - {"__init__"} <= set(LAYER)


def test_imports_point_downwards() -> None:
    found = [violation for path in modules() for violation in violations(path)]
    assert not found, "\n".join(found)


def module_of(path: Path) -> str:
    """``autockpt.tuning.loop``; a package for its ``__init__.py``."""
    return ".".join(("autockpt", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def arrows() -> dict[str, set[str]]:
    """What each module imports of ours, at its top or in a function; not what only type checkers read."""
    paths = {module_of(path): path for path in modules()}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        typing = {
            node.lineno
            for block in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in block.body
        }
        names = [name for name, line in imported(path) if line not in typing]
        parts = {name if name in paths else name.rpartition(".")[0] for name in names}
        found[module] = (parts & set(paths)) - {module}
    return found


def test_no_circle_of_imports() -> None:
    """In functions, too."""
    TopologicalSorter(arrows()).prepare()


def test_facades_only_re_export() -> None:
    for path in SOURCE.glob("*/__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            allowed = isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            # the explicit table of policies is a façade's business, too
            fine = allowed or (names <= {"POLICIES"} and names)
            assert fine, f"{path.relative_to(ROOT)}:{node.lineno} does more than re-export"


def test_all_packages_ship() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    present = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCE.rglob("__init__.py")}
    shipped = {f"autockpt.search_spaces.{folder.name}" for folder in (ROOT / "search_spaces").iterdir()}
    assert present | shipped == set(listed)  # no top-level module but autockpt


def test_importing_autockpt_loads_nothing_heavy() -> None:
    heavy = ("torch", "optuna", "transformers", "matplotlib", "jinja2", "numpy", "scipy", "pydantic")
    code = f"import sys, autockpt; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_every_public_name_can_be_had_twice() -> None:
    # twice, because importing a subpackage binds its name over a lazy attribute of the same name
    for name in autockpt.__all__:
        first, second = getattr(autockpt, name), getattr(autockpt, name)
        assert first is second and not isinstance(first, types.ModuleType), name
    assert set(autockpt.__all__) <= set(dir(autockpt))


def test_no_public_name_is_a_package() -> None:
    assert not set(autockpt.__all__) & {p.name.removesuffix(".py") for p in SOURCE.iterdir()}
