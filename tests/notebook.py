"""Execute ``docs/notebook.ipynb`` without a kernel, and write it again: ``python -m tests.notebook``."""

import ast
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def executed(cells: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Each code cell's outputs, as a kernel has them: one namespace for all, the last expression of each shown."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        *before, last = ast.parse("".join(cell["source"])).body
        value, printed = None, io.StringIO()
        with redirect_stdout(printed):
            exec(compile(ast.Module(before, []), "notebook", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
            else:
                exec(compile(ast.Module([last], []), "notebook", "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        shown = {"data": {"text/plain": [repr(value)]}, "execution_count": number, "metadata": {}}
        yield [
            *([{"name": "stdout", "output_type": "stream", "text": text}] if text else []),
            *([{**shown, "output_type": "execute_result"}] if value is not None else []),
        ]


def main() -> None:
    os.environ["COLUMNS"] = "120"
    book = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for number, (cell, outputs) in enumerate(zip(cells, executed(cells), strict=True), 1):
            cell |= {"outputs": outputs, "execution_count": number}
    NOTEBOOK.write_text(json.dumps(book, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
