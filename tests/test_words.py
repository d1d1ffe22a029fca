"""Words: docs/words.toml says which words of our own making are denied, and where; the field has terms for them."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
DEFINITIONS: Final = ("pdflow", "sim", "runtime", "tests", "benchmarks", "docs", "notebooks")
PROGRAMS: Final = ("pdflow/", "sim/", "runtime/")
PROSE: Final = re.compile(
    r"(README|CONTRIBUTING|CHANGELOG|SECURITY)\.md|docs/(tutorials/)?[\w.-]+\.md|examples/.*\.(toml|md)"
)
WORDS: Final[dict[str, Any]] = tomllib.loads((ROOT / "docs/words.toml").read_text("utf-8"))
UNREVIEWED: Final = frozenset(WORDS["unreviewed"]["files"])
SURFACES: Final = ("identifiers", "texts", "prose")


def forms_of(entry: dict[str, Any]) -> list[str]:
    return [entry["word"], *entry.get("forms", ())]


def denied_in(surface: str) -> dict[str, dict[str, Any]]:
    """By form, the entry of every word that is denied there."""
    return {form: entry for entry in WORDS["word"] if surface in entry["in"] for form in forms_of(entry)}


DENIED: Final = {surface: denied_in(surface) for surface in SURFACES}
DENIED_NAMES: Final = DENIED["identifiers"]
"""`serve` is not among them: it is a command, a table of a scenario and what servers do."""


def pattern(surface: str) -> re.Pattern[str]:
    forms = sorted(DENIED[surface], key=len, reverse=True)
    either = "|".join(r"\s+".join(map(re.escape, form.split())) for form in forms)
    return re.compile(rf"(?<![\w-])({either})(?![\w-])", re.I)


DENIED_TEXT: Final = {surface: pattern(surface) for surface in ("texts", "prose")}


def tracked(*patterns: str) -> list[str]:
    """The repository's files that match; those of the checkout where there is no git, as in a copy."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if found.returncode == 0 and found.stdout:
        return sorted(set(found.stdout.splitlines()))
    return sorted(str(path.relative_to(ROOT)) for glob in patterns for path in ROOT.rglob(glob.removeprefix("**/")))


# Identifiers.


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
    return [(line, name) for line, name in definitions(source) if name.lower().strip("_") in DENIED_NAMES]


def test_no_definition_is_called_by_a_denied_word() -> None:
    files = [ROOT / "setup.py", *(path for folder in DEFINITIONS for path in (ROOT / folder).rglob("*.py"))]
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


# What programs print.


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of two words or more, but for docstrings that no command prints."""
    tree = ast.parse(source)
    quiet: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        decorated = any(
            re.search(r"\b(command|group)\b", ast.unparse(each)) for each in getattr(node, "decorator_list", ())
        )
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and not decorated:
                quiet.add(id(statement.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield from [(node.lineno, node.value)] * bool(re.search(r"\w\W+\w", node.value))


def prose(document: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a document outside of code: fenced blocks, and what stands between backticks."""
    fenced = False
    for number, line in enumerate(document.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", line)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of an example."""
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line.split("#", 1)[1]


def findings(surface: str, path: str, lines: Iterator[tuple[int, str]]) -> list[str]:
    found = []
    for number, text in lines:
        for match in DENIED_TEXT[surface].finditer(text):
            form = re.sub(r"\s+", " ", match.group(1).lower())
            entry = DENIED[surface][form]
            excepted = (where in ("*", path) and words in text for where, words in entry.get("except", ()))
            if not any(excepted):
                found.append(f"{path}:{number}: {match.group(1)!r} (write: {entry['write']}): {text.strip()[:100]}")
    return found


def found_in(path: str) -> list[str]:
    source = (ROOT / path).read_text("utf-8")
    if path.endswith(".py"):
        return findings("texts", path, texts(source))
    return findings("prose", path, prose(source) if path.endswith(".md") else comments(source))


def readable() -> list[str]:
    """Every file of which people read something."""
    return [path for path in tracked("*.py") if path.startswith(PROGRAMS)] + [
        path for path in tracked("*.md", "*.toml") if PROSE.fullmatch(path)
    ]


def test_no_text_has_a_denied_word() -> None:
    found = [line for path in readable() if path not in UNREVIEWED for line in found_in(path)]
    assert not found, "\n".join(found)


def test_a_file_is_unreviewed_only_as_long_as_it_has_denied_words() -> None:
    clean = [path for path in sorted(UNREVIEWED) if not (ROOT / path).exists() or not found_in(path)]
    assert not clean, f"take these from docs/words.toml: {clean}"


def test_exceptions_are_needed() -> None:
    """An exception whose words nothing has any more would excuse what comes later."""
    sources = {path: (ROOT / path).read_text("utf-8") for path in readable()}
    unused = [
        (where, words)
        for entry in WORDS["word"]
        for where, words in entry.get("except", ())
        if not any(words in source for path, source in sources.items() if where in ("*", path))
    ]
    assert not unused


def test_the_list_is_well_formed() -> None:
    for entry in WORDS["word"]:
        assert set(entry) <= {"word", "forms", "write", "in", "except"}, entry["word"]
        assert entry["write"]
        assert set(entry["in"]) <= set(SURFACES)


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("nobody answers")',
        'log.info(f"{x} is gone")',
        '@click.command()\ndef f():\n    "Tell a story."',
    ],
)
def test_printed_texts_are_seen(source: str) -> None:
    assert findings("texts", "x.py", texts(source))


@pytest.mark.parametrize("source", ['def f():\n    "Tell a story."', 'x = "told"', "# nobody"])
def test_docstrings_and_words_alone_are_free(source: str) -> None:
    assert not findings("texts", "x.py", texts(source))


def test_code_in_documents_is_free() -> None:
    assert not findings("prose", "x.md", prose("`told`\n```\ntold\n```\n[x](told.md)"))
    assert findings("prose", "x.md", prose("It is\ntold so."))
