"""How many small changes of the code do the tests notice? A sample of lines, one mutant each.

    OMP_NUM_THREADS=1 python -m tests.evidence.mutants --out mutants.md [--sample 20] [--seed 0] [--drawn-from CHECKOUT]
        [PACKAGE ...]

Mutants change one thing of one line: a comparison, a sign, a number, a condition, a call that is left out. Each is
written into a copy of the checkout, where the tests run that mirror the module and, for ``policies``, the contract
suite; a module without a mirror has the tests of the modules that import it. The first test that fails ends it. Some
mutants mean the same as the original, so that not all can be noticed.
"""

import argparse
import ast
import copy
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "solvers", "schema")
CPU_SECONDS, SECONDS = 600, 3600  # of one mutant: one that never ends is noticed
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.And, ast.Or), (ast.Break, ast.Continue)),
)
OTHER: dict[type, type] = {ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
OTHER |= {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """One changed line: ``place`` counts the nodes of the module's tree, ``way`` the changes of that node."""

    module: Path
    line: int
    place: int
    way: int
    what: str


def ways(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What can be changed about a node, in words, and the node instead of it."""
    new: Any = copy.copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        new.ops = [OTHER[type(node.ops[0])](), *node.ops[1:]]
        yield f"{type(node.ops[0]).__name__} → {type(new.ops[0]).__name__}", new
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OTHER:
        new.op = OTHER[type(node.op)]()
        yield f"{type(node.op).__name__} → {type(new.op).__name__}", new
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} → {node.value + 1}", ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield "the condition is turned round", new
    elif isinstance(node, ast.comprehension) and node.ifs:
        new.ifs = []
        yield "the condition is left out", new
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "the call is left out", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        new.value = ast.Constant(None)
        yield "None is returned", new
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield f"{type(node).__name__} → {OTHER[type(node)].__name__}", OTHER[type(node)]()


def mutants_of(module: Path) -> list[Mutant]:
    """All of one module, but for annotations and what only is checked for types."""
    tree = ast.parse(module.read_text())
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            parts = [node]
        left_out |= {inner for part in parts if part is not None for inner in ast.walk(part)}
    return [
        Mutant(module, getattr(node, "lineno", 0) or node.target.lineno, place, way, what)  # type: ignore[attr-defined]
        for place, node in enumerate(ast.walk(tree))
        if node not in left_out
        for way, (what, _) in enumerate(ways(node))
    ]


def mutated(mutant: Mutant) -> ast.Module:
    """The module's tree with the change in it."""
    tree = ast.parse(mutant.module.read_text())
    old = list(ast.walk(tree))[mutant.place]
    new = ast.fix_missing_locations(ast.copy_location(list(ways(old))[mutant.way][1], old))

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    return ast.fix_missing_locations(Put().visit(tree))


def sample(package: str, number: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Of each sampled line of a checkout one mutant."""
    by_line: dict[tuple[Path, int], list[Mutant]] = {}
    for module in sorted((root / "autockpt" / package).rglob("*.py")):
        for mutant in mutants_of(module):
            by_line.setdefault((module, mutant.line), []).append(mutant)
    drawn = random.Random(f"{package} {seed}")
    lines = drawn.sample(sorted(by_line), min(number, len(by_line)))
    return [drawn.choice(by_line[line]) for line in sorted(lines)]


def found_again(mutant: Mutant, package: str) -> Mutant | None:
    """The same change of the same line, drawn from another checkout, in the code here: where the line reads the same,
    in the module of that name first; of several such lines of a module the one that is as far down among them."""

    def alike(module: Path) -> list[Mutant]:
        lines = module.read_text().splitlines()
        return [m for m in mutants_of(module) if m.what == mutant.what and lines[m.line - 1].strip() == text]

    text = mutant.module.read_text().splitlines()[mutant.line - 1].strip()
    rank = alike(mutant.module).index(mutant)
    modules = sorted((ROOT / "autockpt" / package).rglob("*.py"), key=lambda path: path.name != mutant.module.name)
    found = next(filter(None, map(alike, modules)), [])
    return found[min(rank, len(found) - 1)] if found else None


def tests_of(module: Path) -> list[str]:
    """The files that mirror a module, else those of its nearest importers in the package, else the whole folder."""
    package = module.relative_to(ROOT / "autockpt").parts[0]
    folder = ROOT / "tests" / package
    level, seen = {module}, {module}
    found: list[Path] = []
    while level and not found:
        for path in sorted(level):
            inner = path.relative_to(ROOT / "autockpt" / package).with_suffix("").parts
            found += sorted(folder.glob(f"test_{inner[-1]}.py"))
            found += sorted(folder.glob(f"test_{inner[0]}*.py")) if len(inner) > 1 else []
        level = {path for path in _importers(level, package) if path.stem != "__init__"} - seen
        seen |= level
    if package == "policies":
        found.append(folder / "test_contract.py")
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(found)] or [str(folder.relative_to(ROOT))]


def _importers(modules: set[Path], package: str) -> set[Path]:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules}
    found = set()
    for path in (ROOT / "autockpt" / package).rglob("*.py"):
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        imported = {node.module for node in froms} | {f"{node.module}.{n.name}" for node in froms for n in node.names}
        if imported & names:
            found.add(path)
    return found


def noticed(mutant: Mutant) -> tuple[str, float]:
    """The first test that fails, or nothing; and the CPU seconds spent."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("autockpt", "tests", "search_spaces"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        Path(folder, mutant.module.relative_to(ROOT)).write_text(ast.unparse(mutated(mutant)))
        pytest = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-rfE", "-p", "no:cacheprovider"]
        ran = subprocess.run(
            ["timeout", "-s", "KILL", str(SECONDS), *pytest, *tests_of(mutant.module)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS)),
            capture_output=True,
            text=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", ran.stdout, re.M)
    found = failed[1] if failed else f"pytest ended with {ran.returncode}" if ran.returncode else ""
    return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser("python -m tests.evidence.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", default=PACKAGES, help="of autockpt")
    parser.add_argument("--sample", type=int, default=20, help="lines of each package")
    parser.add_argument("--seed", type=int, default=0)
    help_ = "sample this checkout's lines, for a comparison of two commits"
    parser.add_argument("--drawn-from", type=Path, metavar="CHECKOUT", help=help_)
    parser.add_argument("--out", type=Path, required=True, help="the table, as Markdown")
    given = parser.parse_args()

    rows = ["| package | line | change | noticed by |", "|---|---|---|---|"]
    counts: dict[str, list[int]] = {}
    for package in given.packages:
        counts[package] = [0, 0]
        drawn = sample(package, given.sample, given.seed, (given.drawn_from or ROOT).resolve())
        for mutant in [found_again(m, package) for m in drawn] if given.drawn_from else drawn:
            if mutant is None:
                continue  # that line is gone
            found, spent = noticed(mutant)
            counts[package] = [counts[package][0] + bool(found), counts[package][1] + 1]
            where = f"{mutant.module.relative_to(ROOT / 'autockpt' / package)}:{mutant.line}"
            name = found.replace("|", "\\|") or "**nothing**"
            rows.append(f"| {package} | {where} | {mutant.what} | {name} |")
            print(rows[-1], f"{spent:.1f} s", flush=True)
            summary = [f"{name}: {part} of {whole} noticed" for name, (part, whole) in counts.items()]
            summary += [f"all: {sum(p for p, _ in counts.values())} of {sum(w for _, w in counts.values())}"]
            given.out.write_text("; ".join(summary) + ".\n\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
