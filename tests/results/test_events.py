from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path

import msgspec
import pytest

from pdflow.protocol import effects, events, ids, messages, timers, values
from pdflow.results.files.events import (
    EventsError,
    EventsHeader,
    classes_of,
    plain,
    read_events,
    rebuild,
    writing_events,
)


class Why(IntEnum):
    NONE = 0
    IO = 9


class Inner(msgspec.Struct, frozen=True, tag="IN"):
    numbers: tuple[int, ...]
    why: Why | None


class Happened(msgspec.Struct, frozen=True):
    name: str
    inner: Inner
    all: tuple[Inner, ...] = ()
    raw: bytes = b""
    ok: bool = True


class Send(msgspec.Struct, frozen=True):
    to: str


CLASSES = {kind.__name__: kind for kind in (Inner, Happened, Send)}
HEADER = EventsHeader(world="simulated", scenario="md1", seed=1)
EVENT = Happened("IO", Inner((1, 2), Why.IO), (Inner((), None),), b"\x00\xff")


def written(path: Path) -> Path:
    with writing_events(path, HEADER) as writer:
        writer.event(5, "prefill-0", EVENT)
        writer.effects(5, "prefill-0", (Send("router"), Send("decode-0")))
        writer.event(3, "decode-0", Send("x"))
    return path


def test_a_file_comes_back_typed_and_in_order(tmp_path: Path) -> None:
    header, lines = read_events(written(tmp_path / "events.jsonl"))
    assert header == HEADER
    found = [(line.t, line.node, line.direction, rebuild(line.body, CLASSES)) for line in lines]
    assert found == [
        (5, "prefill-0", "in", EVENT),
        (5, "prefill-0", "out", Send("router")),
        (5, "prefill-0", "out", Send("decode-0")),
        (3, "decode-0", "in", Send("x")),
    ]
    assert isinstance(found[0][3].inner.why, Why)
    assert found[0][3].name == "IO"  # a string that happens to spell a member stays a string


def test_a_line_reads_as_documented(tmp_path: Path) -> None:
    lines = written(tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "format": "pdflow.events",
        "version": 1,
        "world": "simulated",
        "scenario": "md1",
        "seed": 1,
    }
    assert json.loads(lines[1]) == {
        "t": 5,
        "node": "prefill-0",
        "in": {
            "type": "Happened",
            "name": "IO",
            "inner": {"type": "Inner", "numbers": [1, 2], "why": "IO"},
            "all": [{"type": "Inner", "numbers": [], "why": None}],
            "raw": {"hex": "00ff"},
            "ok": True,
        },
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "malformed"),
        ("[]", "expected an object"),
        ('{"t": 9, "node": "prefill-0"}', 'expected the keys "t", "node"'),
        ('{"t": 9, "node": "prefill-0", "in": {"type": "A"}, "out": {"type": "A"}}', "expected the keys"),
        ('{"t": -1, "node": "prefill-0", "in": {"type": "A"}}', "not a time"),
        ('{"t": true, "node": "prefill-0", "in": {"type": "A"}}', "not a time"),
        ('{"t": 9, "node": 4, "in": {"type": "A"}}', "not a name"),
        ('{"t": 9, "node": "prefill-0", "in": {}}', 'not a value with a "type"'),
        ('{"t": 4, "node": "prefill-0", "in": {"type": "A"}}', "time goes back at prefill-0"),
    ],
)
def test_a_reader_refuses_a_bad_line_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path / "events.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(EventsError, match=rf"events\.jsonl:6: .*{complaint}"):
        list(read_events(path)[1])


def test_a_reader_refuses_a_truncated_file(tmp_path: Path) -> None:
    path = written(tmp_path / "events.jsonl")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(EventsError, match=r":5: the file ends in the middle of a line"):
        list(read_events(path)[1])


@pytest.mark.parametrize(
    "header", ["", "{}", '{"format":"other","version":1,"world":"x","scenario":"y","seed":1}', "[1]"]
)
def test_a_reader_refuses_another_format(tmp_path: Path, header: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(header + "\n")
    with pytest.raises(EventsError, match=r"events\.jsonl:1: "):
        read_events(path)


def test_a_reader_refuses_another_version(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"format":"pdflow.events","version":2,"world":"x","scenario":"y","seed":1}\n')
    with pytest.raises(EventsError, match=r"version 2: expected pdflow\.events version 1"):
        read_events(path)


def test_a_run_that_breaks_leaves_no_file(tmp_path: Path) -> None:
    def run() -> None:
        with writing_events(tmp_path / "events.jsonl", HEADER) as writer:
            writer.event(5, "prefill-0", EVENT)
            raise AssertionError

    with pytest.raises(AssertionError):
        run()
    assert list(tmp_path.iterdir()) == []


def test_rebuilding_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="unknown class Gone"):
        rebuild({"type": "Gone"}, CLASSES)
    with pytest.raises(ValueError, match="Send has the fields to"):
        rebuild({"type": "Send", "too": "x"}, CLASSES)
    with pytest.raises(TypeError, match="object is not part of"):
        plain(object())


def test_every_value_of_the_protocol_has_a_form() -> None:
    """No class is named like another, and no field is named "type", which would hide the class."""
    modules = (effects, events, ids, messages, timers, values)
    classes = classes_of(*modules)
    assert len(classes) == sum(len(classes_of(module)) for module in modules)
    assert {"WriteEnded", "Register", "Allocation"} <= classes.keys()
    assert not [name for name, kind in classes.items() if "type" in kind.__struct_fields__]
    event = events.PrefillFinished("x", values.Allocation(3, (1, 2)), 32, 7, 9)
    assert rebuild(plain(event), classes) == event
    aborted = events.PrefillAborted("x", messages.Code.IO)
    assert rebuild(plain(aborted), classes) == aborted


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (values.Allocation(1, (2,)), ["type", "generation", "blocks"]),
        (values.allocation_of(1, ((2,), (values.NO_BLOCK,))), ["type", "generation", "blocks", "groups"]),
    ],
    ids=["one group", "two groups"],
)
def test_what_was_added_later_is_written_where_there_is_some(value: values.Allocation, fields: list[str]) -> None:
    body = plain(value)
    assert list(body) == fields
    assert rebuild(json.loads(json.dumps(body)), {"Allocation": values.Allocation}) == value


def test_other_fields_may_not_be_missing() -> None:
    with pytest.raises(ValueError, match="Allocation has the fields generation, blocks, groups, not type, blocks"):
        rebuild({"type": "Allocation", "blocks": []}, {"Allocation": values.Allocation})
