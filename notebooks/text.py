"""Notebooks as text, to edit and to review, and back: without outputs, and with ids that stay.

    python notebooks/text.py 01_real_traffic.ipynb   # writes 01_real_traffic.py: cells under "# %%" lines
    python notebooks/text.py 01_real_traffic.py      # writes 01_real_traffic.ipynb
    python notebooks/text.py --clean *.ipynb         # drops what running them has left

Only the notebooks are kept; the texts are for the time of editing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

CODE: Final = "# %%"
MARKDOWN: Final = "# %% [markdown]"

Notebook = dict[str, Any]


def text_of(notebook: Notebook) -> str:
    """Its cells as a Python file; words are comments."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines = [f"# {line}".rstrip() for line in source.split("\n")]
            blocks.append("\n".join([MARKDOWN, *lines]))
        else:
            blocks.append(f"{CODE}\n{source}")
    return "\n\n".join(blocks) + "\n"


def notebook_of(text: str) -> Notebook:
    """The notebook that has these cells and nothing else. Raises ValueError where a cell is not marked."""
    cells: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if line in (CODE, MARKDOWN):
            kind = "code" if line == CODE else "markdown"
            cells.append({"cell_type": kind, "id": f"cell-{len(cells) + 1}", "metadata": {}, "lines": []})
        elif cells:
            cells[-1]["lines"].append(line)
        elif line:
            raise ValueError(f"{line!r} stands before the first {CODE!r}")
    for cell in cells:
        source = "\n".join(cell.pop("lines")).strip("\n")
        if cell["cell_type"] == "markdown":
            source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.split("\n"))
        else:
            cell |= {"execution_count": None, "outputs": []}
        cell["source"] = source.splitlines(keepends=True)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def stored(notebook: Notebook) -> str:
    """The content of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(arguments: Sequence[str]) -> None:
    """The command."""
    clean = "--clean" in arguments
    for path in map(Path, [argument for argument in arguments if argument != "--clean"]):
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            path.with_suffix(".ipynb").write_text(stored(notebook_of(content)), encoding="utf-8")
        elif clean:
            path.write_text(stored(notebook_of(text_of(json.loads(content)))), encoding="utf-8")
        else:
            path.with_suffix(".py").write_text(text_of(json.loads(content)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
