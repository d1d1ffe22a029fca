"""Whatever becomes of a good file, loading it gives a Scenario or a ScenarioError, and nothing else."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario import ResolvedScenario, load
from pdflow.scenario.reading.locate import key_lines
from pdflow.scenario.schema.jsonschema import schema_json

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXTS = [
    (EXAMPLES / f"{name}.toml").read_text() for name in ("md1", "reference", "shared-link", "mooncake-conversation")
]
TERMS = sorted({term for text in TEXTS for term in text.split()})
NUMBERS = ["0", "-1", "1", "3", "1e4", "nan", "inf", "-inf", "9" * 30, "1" + "0" * 400]
TABLES = ["{}", "{ preset = 1 }", '{ preset = "h100-sxm" }', '{ dist = "uniform", low = 9, high = 3 }']
TABLES += ['{ model = "constant" }', '{ process = "closed", concurrency = 2 }']
OTHERS = ["true", '""', '"x"', "''", '"\\u0000"', "[]", "[1]", '[[{ name = "a" }]]', "1979-05-27", "07:32:00"]
VALUES = [*NUMBERS, *TABLES, *OTHERS]


JSON_SCHEMA = Draft202012Validator(schema_json())


def loads_or_explains(text: str | bytes, overrides: tuple[str, ...] = ()) -> bool:
    """Whether it loads. If not, that what is said has a place and words."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "s.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        problems = _problems(file, overrides)
    for problem in problems:
        assert problem.location.startswith((str(file), "--set", "--seed"))
        assert problem.message
    return not problems


def _problems(file: Path, overrides: tuple[str, ...]) -> tuple[Problem, ...]:
    try:
        assert isinstance(load(file, overrides=overrides), ResolvedScenario)
    except ScenarioError as error:
        return error.problems or (Problem("nowhere", "", "an error without a problem"),)
    return ()


@given(st.sampled_from(TEXTS), st.data())
def test_a_value_replaced(text: str, data: st.DataObject) -> None:
    lines = text.split("\n")
    numbers = [i for i, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.sampled_from(numbers))
        key = lines[number].partition("=")[0]
        lines[number] = f"{key}= {data.draw(st.sampled_from(VALUES))}"
    text = "\n".join(lines)
    if loads_or_explains(text):
        assert list(JSON_SCHEMA.iter_errors(tomllib.loads(text))) == []


@given(st.sampled_from(TEXTS), st.data())
def test_lines_lost_repeated_or_moved(text: str, data: st.DataObject) -> None:
    lines = text.split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at, to = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        kind = data.draw(st.sampled_from(["lose", "repeat", "swap"]))
        if kind == "lose" and len(lines) > 1:
            del lines[at]
        elif kind == "repeat":
            lines.insert(to, lines[at])
        else:
            lines[at], lines[to] = lines[to], lines[at]
    loads_or_explains("\n".join(lines))


@given(st.sampled_from(TEXTS), st.data())
def test_bytes_changed(text: str, data: st.DataObject) -> None:
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    loads_or_explains(bytes(raw))


@given(
    st.sampled_from(TEXTS), st.lists(st.tuples(st.sampled_from(TERMS), st.sampled_from(TERMS)), min_size=1, max_size=3)
)
def test_words_exchanged(text: str, exchanges: list[tuple[str, str]]) -> None:
    for old, new in exchanges:
        text = text.replace(old, new, 1)
    loads_or_explains(text)


paths = st.lists(st.sampled_from(["pool", "decode", "gpu", "workload", "arrival", "network", "links", "x"]), max_size=4)


@given(st.lists(st.tuples(paths, st.one_of(st.sampled_from(VALUES), st.text(max_size=8))), max_size=3))
@example([(["workload"], "[]")])
@example([(["pool"], "[1]"), (["pool", "decode"], "2")])
def test_any_override(sets: list[tuple[list[str], str]]) -> None:
    loads_or_explains(TEXTS[1], tuple(f"{'.'.join(path)}={value}" for path, value in sets))


@given(st.text(max_size=40))
def test_any_override_text(override: str) -> None:
    loads_or_explains(TEXTS[0], (override,))


@given(st.sampled_from(TEXTS), st.data())
def test_the_locator_follows_whatever_tomllib_accepts(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        document: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = key_lines(text.replace("\r\n", "\n"))
    assert {(key,) for key in document} <= set(lines)
