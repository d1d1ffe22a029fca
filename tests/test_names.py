"""Names: no definition is called by a word of our own making that the field has a term for (docs/glossary.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("pdflow", "sim", "runtime", "tests", "benchmarks", "docs", "notebooks")

WORDS: Final = """
about askers beside bury calm came conduct crew cut departures diary doomed door doors flying ghost grant hear heard
hindrances house is_still judge knock learn let_go life lives meet narrate narration notices orders parcel part parts
patience place places reborn rooms said say says sketch speaker speech spoilt stories story strand strangers takers tell
told unborn vacate want wants way word worlds
"""
DENIED: Final = frozenset(WORDS.split())
"""`serve` is not among them: it is a command, a table of a scenario and what servers do."""


def definitions(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module gives a name: classes, functions, arguments, variables, attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def denied(source: str) -> list[tuple[int, str]]:
    return [(line, name) for line, name in definitions(source) if name.lower().strip("_") in DENIED]


def test_no_definition_is_called_by_a_denied_word() -> None:
    files = [ROOT / "setup.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}" for path in files for line, name in denied(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "class Told: ...",
        "def says(): ...",
        "def f(about): ...",
        "place = 1",
        "for part in (): ...",
        "self.heard = 1",
        "import pdflow as story",
        "try: ...\nexcept OSError as said: ...",
        "with open('') as word: ...",
        "_lives = 0",
    ],
)
def test_each_kind_of_definition_is_seen(source: str) -> None:
    assert denied(source)


@pytest.mark.parametrize("source", ["lease_word = 1", "path.parts", "def serve(): ...", "'told'", "world = 1"])
def test_other_uses_are_free(source: str) -> None:
    assert not denied(source)
