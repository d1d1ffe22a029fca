"""Events files of several processes become one, in the order of time, whatever clock an endpoint has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdflow.protocol.events import PeerLost
from pdflow.results.files.events import EventsHeader, EventsWriter, read_events
from pdflow.results.files.merge_events import merge_events


def write(folder: Path, name: str, lines: list[tuple[int, int | None]], engine: str, incarnation: int = 1) -> None:
    """Lines of one endpoint: (the endpoint's time, the wall clock's)."""
    path = folder / f"{name}.events.jsonl"
    header = EventsHeader(
        world="vllm",
        scenario="",
        seed=0,
        incarnations={engine: incarnation},
        engines={engine: {"role": "prefill"}},
    )
    with path.open("wb") as file:
        writer = EventsWriter(file, header, path)
        for number, (t, at) in enumerate(lines):
            writer.event(t, name, PeerLost(str(number)), at)
            writer.effects(t, name, [PeerLost("effect")], at)


def order(path: Path) -> list[tuple[str, int, str]]:
    _, lines = read_events(path)
    return [(line.node, line.t, line.direction) for line in lines]


def test_lines_are_in_the_order_of_the_wall_clock(tmp_path: Path) -> None:
    write(tmp_path, "e", [(5, 100), (6, 300)], "e")
    write(tmp_path, "e.r0", [(1000, 50), (2000, 200)], "e")
    path = merge_events(tmp_path, remove=False)
    assert [each for each in order(path) if each[2] == "in"] == [
        ("e.r0", 1000, "in"),
        ("e", 5, "in"),
        ("e.r0", 2000, "in"),
        ("e", 6, "in"),
    ]
    assert b'"at"' not in path.read_bytes()
    assert len(list(tmp_path.glob("*.events.jsonl"))) == 2, "a process may be writing yet"


def test_without_a_wall_clock_s_time_the_endpoints_own_order_them(tmp_path: Path) -> None:
    write(tmp_path, "a", [(10, None), (30, None)], "a")
    write(tmp_path, "b", [(20, None)], "b")
    path = merge_events(tmp_path)
    assert [t for _, t, direction in order(path) if direction == "in"] == [10, 20, 30]
    assert list(tmp_path.iterdir()) == [path]


def test_the_header_has_all_engines_and_no_incarnation_of_one_that_has_had_several(tmp_path: Path) -> None:
    write(tmp_path, "a", [(1, None)], "a", 1)
    write(tmp_path, "b", [(1, None)], "b", 2)
    header, _ = read_events(merge_events(tmp_path))
    assert header.incarnations == {"a": 1, "b": 2}
    assert set(header.engines or {}) == {"a", "b"}
    write(tmp_path, "a-1", [(1, None)], "a", 1)
    write(tmp_path, "a-2", [(2, None)], "a", 3)
    header, _ = read_events(merge_events(tmp_path))
    assert header.incarnations == {}


@pytest.mark.parametrize("end", [b'{"at":9,"t":9,"nod', b'{"at":9,"t":9,"node":"a","in":{}}'])
def test_a_line_that_a_killed_process_had_not_finished_is_left_out(tmp_path: Path, end: bytes) -> None:
    write(tmp_path, "a", [(1, 1)], "a")
    with (tmp_path / "a.events.jsonl").open("ab") as file:
        file.write(end)
    (tmp_path / "b.events.jsonl").write_bytes(b'{"format"')
    assert [t for _, t, _ in order(merge_events(tmp_path))] == [1, 1]


def test_a_folder_without_files_makes_none(tmp_path: Path) -> None:
    assert not merge_events(tmp_path).exists()
    assert msgspec.json.encode(EventsHeader(world="live", scenario="", seed=0)).count(b"engines") == 0
