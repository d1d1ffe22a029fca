"""Story files: what is written is what is read, and what cannot be used is refused in one line that says where."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.dialect import DIALECTS, VLLM_COMPAT
from pdflow_sim.check.counterexamples.counterexample import (
    CounterexampleError,
    CounterexampleFile,
    Information,
    ReplayStep,
    Verdict,
    decode,
    encode,
    read,
    write,
)
from pdflow_sim.check.scopes.scope import Scope

COUNTEREXAMPLE = CounterexampleFile(
    scope=Scope(dialect=VLLM_COMPAT, p_tp=2, dup=1),
    start="00",
    steps=(ReplayStep(move="finish x0", after="01"), ReplayStep(move="restart P")),
    verdict=Verdict(invariant="S2", what="x0 is released under a WRITE"),
    mutant="no tombstone",
    information=Information(note="an example", seed=7, scheduler="PCT 3", pdflow="0.1.0"),
)


def test_a_counterexample_reads_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "a.json", COUNTEREXAMPLE)
    assert read(tmp_path / "a.json") == COUNTEREXAMPLE


def test_a_file_names_every_field_of_its_scope_and_has_a_line_for_each_step() -> None:
    text = encode(COUNTEREXAMPLE)
    document = json.loads(text)
    assert list(document["scope"]) == [field.name for field in attrs.fields(Scope)]
    assert document["scope"]["dialect"] == "vllm-compat"
    assert '\n    {"move": "finish x0", "after": "01"},\n' in text
    assert document["pdflow_counterexample"] == 1


def test_a_field_that_an_older_file_does_not_know_has_its_default() -> None:
    document = json.loads(encode(COUNTEREXAMPLE))
    del document["scope"]["stall"]
    assert decode(json.dumps(document)) == COUNTEREXAMPLE


@given(
    dialect=st.sampled_from(sorted(DIALECTS)),
    moves=st.lists(st.tuples(st.text(), st.none() | st.text())),
    verdict=st.none() | st.builds(Verdict, invariant=st.text(), what=st.text()),
    mutant=st.none() | st.text(),
    information=st.builds(Information, note=st.text(), seed=st.none() | st.integers(-(2**63), 2**63), pdflow=st.text()),
)
def test_any_counterexample_reads_as_it_was_written(
    dialect: str, moves: list[Any], verdict: Verdict | None, mutant: str | None, information: Information
) -> None:
    counterexample = CounterexampleFile(
        scope=Scope(dialect=DIALECTS[dialect]),
        steps=tuple(ReplayStep(move=move, after=after) for move, after in moves),
        verdict=verdict,
        mutant=mutant,
        information=information,
    )
    assert decode(encode(counterexample)) == counterexample


def changed(path: str, value: Any) -> str:
    """STORY's text with one value set or added."""
    document = json.loads(encode(COUNTEREXAMPLE))
    *parents, last = path.split(".")
    at = document
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: line 1, column 1: is not JSON: Expecting value"),
        ('{"pdflow_counterexample": 1,\n "steps": [}', "f: line 2, column 12: is not JSON: Expecting value"),
        (b"\xff\xfe\x00\x01", "f: is not UTF-8: invalid start byte at byte 0"),
        ("[" * 100_000, "f: is nested too deep"),
        ("9" * 5000, "f: is not JSON: Exceeds the limit"),
        ("[]", 'f: is not a counterexample file of pdflow: it has no "pdflow_counterexample"'),
        ("{}", 'f: is not a counterexample file of pdflow: it has no "pdflow_counterexample"'),
        (changed("pdflow_counterexample", 2), "f: pdflow_counterexample: is version 2; this pdflow reads"),
        (
            changed("pdflow_counterexample", True),
            "f: pdflow_counterexample: is version true; this pdflow reads",
        ),
        (
            changed("pdflow_counterexample", "1"),
            'f: pdflow_counterexample: is version "1"; this pdflow reads',
        ),
        (changed("step", []), "f: Object contains unknown field `step` (did you mean steps?)"),
        (changed("steps.1.mov", 1), "f: steps[1]: Object contains unknown field `mov` (did you mean move?)"),
        (changed("steps.0.move", 7), "f: steps[0].move: Expected `str`, got `int`"),
        (changed("steps", None), "f: steps: Expected `array`, got `null`"),
        (changed("steps", [{}]), "f: steps[0]: Object missing required field `move`"),
        (changed("verdict", "S2"), "f: verdict: Expected `object | null`, got `str`"),
        (changed("information.seed", 0.5), "f: information.seed: Expected `int | null`, got `float`"),
        (changed("mutant", ["a"]), "f: mutant: Expected `str | null`, got `array`"),
        (changed("scope", []), "f: scope: Expected `object`, got `array`"),
        (changed("scope.dorp", 1), "f: scope.dorp: unknown field (did you mean drop?)"),
        (changed("scope.drop", "1"), 'f: scope.drop: is "1", expected a whole number'),
        (changed("scope.drop", True), "f: scope.drop: is true, expected a whole number"),
        (changed("scope.drop", -1), "f: scope.drop: is -1, expected 0 to 1000"),
        (changed("scope.requests", 10**9), "f: scope.requests: is 1000000000, more than 1000"),
        (changed("scope.requests", 900), "f: scope.requests: is 900, expected 1 to 8"),
        (changed("scope.p_tp", 3), "f: scope: prefill TP 3 and 2 KV heads: one of the two must divide the other"),
        (changed("scope.pulls", 0), "f: scope.pulls: is 0, expected true or false"),
        (changed("scope.dialect", "strickt"), 'f: scope.dialect: is "strickt", expected one of strict, vllm-compat'),
        (changed("scope.dialect", "strickt"), "(did you mean strict?)"),
        (changed("scope.dialect", None), "f: scope.dialect: is None, expected one of strict"),
        (changed("scope.a\x1b[31m\n", 1), "f: scope.a\\x1b[31m\\n: unknown field"),
        (changed("scope.\ud800", 1), "f: scope.\\ud800: unknown field"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_the_position(text: str | bytes, message: str) -> None:
    with pytest.raises(CounterexampleError) as caught:
        decode(text, "f")
    error = str(caught.value)
    assert error.startswith(message) or (message.startswith("(") and message in error)
    assert "\n" not in error
    error.encode()


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CounterexampleError, match=r"nothing\.json: cannot be read: No such file or directory$"):
        read(tmp_path / "nothing.json")
    with pytest.raises(CounterexampleError, match=r"cannot be read: Is a directory$"):
        read(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
LOCATIONS = [
    "pdflow_counterexample",
    "information",
    "information.seed",
    "mutant",
    "verdict",
    "start",
    "steps",
    "steps.0",
    "steps.0.move",
    *(f"scope.{field.name}" for field in attrs.fields(Scope)),
]


@given(location=st.sampled_from(LOCATIONS), value=JSON | st.integers(-5, 70))
def test_nothing_in_a_file_does_worse_than_being_refused(location: str, value: Any) -> None:
    with suppress(CounterexampleError):
        counterexample = decode(changed(location, value))
        assert decode(encode(counterexample)) == counterexample


@given(st.binary())
def test_no_bytes_do_worse_than_being_refused(raw: bytes) -> None:
    with pytest.raises(CounterexampleError):
        decode(raw)
