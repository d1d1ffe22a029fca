"""No file of pdflow, sim and runtime is in a circle of imports.

Every import counts, wherever it stands: at the top, in a function, under TYPE_CHECKING, or as text given to
`import_module`. An import of a name counts for the file that is named, not for the packages above it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
ROOTS: Final = (".", "sim", "runtime")
"""The folders that hold pdflow, pdflow_sim and pdflow_runtime."""

Graph: TypeAlias = Mapping[str, frozenset[str]]
"""Modules by name, each with those that it imports."""


def imports(tree: ast.AST, modules: frozenset[str]) -> Iterator[str]:
    """Those of `modules` that a file imports. The rules of ruff allow no relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from ([inner] if inner in modules else [node.module] if node.module in modules else [])
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            yield from (it.value for it in node.args if isinstance(it, ast.Constant) and it.value in modules)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def graph_of(sources: Mapping[str, str]) -> Graph:
    """Sources are given by module."""
    modules = frozenset(sources)
    return {name: frozenset(imports(ast.parse(text), modules)) - {name} for name, text in sources.items()}


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module, each sorted."""
    reached = {module: _reached_from(module, graph) for module in graph}
    found = {tuple(sorted({b for b in reached[a] if a in reached[b]})) for a in graph if a in reached[a]}
    return sorted(list(circle) for circle in found)


def _reached_from(module: str, graph: Graph) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        further = graph[waiting.pop()] - reached
        reached |= further
        waiting += further
    return reached


def described(circle: list[str], graph: Graph) -> str:
    """A circle with its edges, as text."""
    edges = [f"    {module} imports {', '.join(sorted(graph[module] & set(circle)))}" for module in circle]
    return "\n".join([f"{len(circle)} files are in a circle:", *edges])


def _sources() -> dict[str, str]:
    found = {}
    for folder, path in sorted((ROOT / root, path) for root in ROOTS for path in (ROOT / root).glob("pdflow*/**/*.py")):
        segments = path.relative_to(folder).with_suffix("").parts
        found[".".join(segments[:-1] if segments[-1] == "__init__" else segments)] = path.read_text(encoding="utf-8")
    return found


def test_no_file_is_in_a_circle_of_imports() -> None:
    graph = graph_of(_sources())
    assert not circles(graph), "\n".join(described(circle, graph) for circle in circles(graph))


@pytest.mark.parametrize(
    "source",
    [
        "import a.one",
        "from a import one",
        "from a.one import x",
        "from a.one import (\n    x,\n    y,\n)",
        "def f():\n    from a.one import x",
        "if TYPE_CHECKING:\n    from a.one import x",
        "importlib.import_module('a.one')",
    ],
)
def test_a_planted_circle_is_found(source: str) -> None:
    graph = graph_of({"a": "", "a.one": "from a.two import x", "a.two": "import a.three", "a.three": source})
    assert circles(graph) == [["a.one", "a.three", "a.two"]]
    assert "a.three imports a.one" in described(circles(graph)[0], graph)


def test_what_is_in_no_circle_is_not_found() -> None:
    sources = {"a": "", "a.one": "import a.two\nimport a.three", "a.two": "from a import three", "a.three": "import a"}
    assert circles(graph_of(sources)) == []
