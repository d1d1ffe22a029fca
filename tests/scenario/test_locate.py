"""Lines of TOML keys: by hand for each construct, and that no key of any document is ever without one."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.scenario.reading.locate import KeyPath, key_lines

DOCUMENT = '''\
# a comment with a "quote and [brackets]
top = 1
"quoted key" = """
three
lines"""
dotted.inner.key = 'x'

[table]
after_blank = [
    1,  # ] not the end
    { a = 1, "b.c" = [2,
      3] },
]
when = 1979-05-27 07:32:00
text = "escaped \\" quote # no comment"   # a comment

[table.sub]
inline = { x.y = 1, z = "}" }

[[array]]
name = "first"

[[array.nested]]
deep = \'\'\'
]]\'\'\'

[[array]]
name = "second"
[array.table]
k = true

[implied.by.header]
[[implied.elements]]
'''


def test_every_construct() -> None:
    lines = key_lines(DOCUMENT)
    expected: dict[KeyPath, int] = {
        ("top",): 2,
        ("quoted key",): 3,
        ("dotted",): 6,
        ("dotted", "inner", "key"): 6,
        ("table",): 8,
        ("table", "after_blank"): 9,
        ("table", "after_blank", 0): 10,
        ("table", "after_blank", 1): 11,
        ("table", "after_blank", 1, "b.c"): 11,
        ("table", "after_blank", 1, "b.c", 0): 11,
        ("table", "after_blank", 1, "b.c", 1): 12,
        ("table", "when"): 14,
        ("table", "text"): 15,
        ("table", "sub"): 17,
        ("table", "sub", "inline", "x", "y"): 18,
        ("table", "sub", "inline", "z"): 18,
        ("array",): 20,
        ("array", 0): 20,
        ("array", 0, "name"): 21,
        ("array", 0, "nested", 0, "deep"): 24,
        ("array", 1): 27,
        ("array", 1, "name"): 28,
        ("array", 1, "table", "k"): 30,
        ("implied",): 32,
        ("implied", "by"): 32,
        ("implied", "by", "header"): 32,
        ("implied", "elements"): 33,
    }
    assert {path: lines[path] for path in expected} == expected
    assert paths_of(tomllib.loads(DOCUMENT)) <= set(lines)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only a comment", "a=1#c", "a = [\n]\n", "a = {}", 'a = """"q"""', "a=[1,]"]
)
def test_small_documents(text: str) -> None:
    assert paths_of(tomllib.loads(text)) <= set(key_lines(text))


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """Every place in a parsed document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {path} - {()}
    for key, inner in items:
        found |= paths_of(inner, (*path, key))
    return found


keys = st.text(alphabet="abc-_0", min_size=1, max_size=3)
scalars = st.one_of(
    st.integers(-9, 9).map(str),
    st.sampled_from(["true", "1.5", "inf", "1979-05-27", "07:32:00", '"a#b"', "'c]d'", '"""\n}"""', "'''\n,'''"]),
)


def _array(inner: list[str]) -> str:
    return "[\n" + ",\n".join(inner) + " # ]\n]"


def _inline(inner: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key} = {value}" for key, value in inner.items()) + "}"


values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(_array), st.dictionaries(keys, inner, max_size=3).map(_inline)
    ),
    max_leaves=6,
)


@given(st.lists(st.tuples(keys, values), max_size=6), st.lists(st.tuples(keys, keys, values), max_size=4))
def test_no_key_is_without_a_line(top: list[tuple[str, str]], arrays: list[tuple[str, str, str]]) -> None:
    text = "".join(f"{key} = {value}\n" for key, value in top)
    text += "".join(f"\n[[{table}]] # here\n{key} = {value}\n" for table, key, value in arrays)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = key_lines(text)
    assert paths_of(document) <= set(lines)
    rows = text.split("\n")
    for path, line in lines.items():
        if isinstance(path[-1], str):
            assert path[-1] in rows[line - 1]
