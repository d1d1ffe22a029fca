"""The timeline, read back: slices nest in their lanes, arrows have both ends, counters never go below nothing."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.cli import cli
from pdflow.results.files.timeline import timeline
from pdflow.results.files.write import write_timeline
from pdflow.results.recording import LinkCourse, Recording, TimeSeries
from pdflow.results.records import STAGES, Records

Events = list[dict[str, Any]]


def nest(events: Events) -> None:
    """Of two slices of one lane that share time, one holds the other."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            lanes[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for slices in lanes.values():
        open_until: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            assert end >= start
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "two slices of one lane cross"
            open_until.append(end)


def arrows_have_both_ends(events: Events) -> int:
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in events), "two arrows have one id"
    slices = {(e["pid"], e["tid"], e["name"], e["ts"]) for e in events if e["ph"] == "X"}
    for event in (*starts.values(), *ends.values()):
        assert (event["pid"], event["tid"], f"r{event['id']}", event["ts"]) in slices, "an arrow hangs in the air"
    return len(starts)


def counters_are_never_negative(events: Events) -> None:
    last: dict[tuple[int, str], tuple[float, int]] = {}
    for event in events:
        if event["ph"] == "C":
            key, (value,) = (event["pid"], event["name"]), event["args"].values()
            assert value >= 0
            assert key not in last or last[key][0] < event["ts"]
            last[key] = (event["ts"], value)
    assert all(value == 0 for _, value in last.values()), "what began has not ended"


def processes_have_one_name(events: Events) -> None:
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert len({pid for pid, _ in names}) == len({name for _, name in names}) == len(names)
    assert {e["pid"] for e in events} <= {pid for pid, _ in names}


def holds(events: Events) -> None:
    nest(events)
    arrows_have_both_ends(events)
    counters_are_never_negative(events)
    processes_have_one_name(events)


stamp = st.one_of(st.just(-1), st.integers(0, 12))


@settings(max_examples=300)
@given(st.data())
def test_any_records_give_a_sound_trace(data: st.DataObject) -> None:
    """Requests that failed, were tried again or were never seen included."""
    records = Records()
    for _ in range(data.draw(st.integers(0, 6))):
        request = records.add(data.draw(st.integers(0, 5)), 100, 10)
        for column in records.ends:
            column[request] = data.draw(stamp)
        records.last_token_ns[request] = data.draw(stamp)
        records.prefill_engine[request] = data.draw(st.sampled_from([None, "p-0", "a-0"]))
        alone = records.prefill_engine[request] == "a-0"
        records.decode_engine[request] = "a-0" if alone else data.draw(st.sampled_from([None, "d-0", "d-1"]))
    holds(list(timeline(records)))


def test_one_request_by_hand() -> None:
    records = Records()
    records.add(0, 512, 10)
    for stage, column in enumerate(records.ends):
        column[0] = 1000 * (stage + 1)
    records.last_token_ns[0] = 20_000
    records.prefill_engine[0], records.decode_engine[0] = "p-0", "d-0"
    events = list(timeline(records))
    holds(events)
    slices = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    end = {stage: i + 1.0 for i, stage in enumerate(STAGES)}
    assert slices == [
        (1, "r0", end["p_queue"], 1.0),
        (2, "r0", end["handshake"], 2.0),
        (2, "post", end["handshake"], 1.0),
        (2, "wire", end["xfer_post"], 1.0),
        (3, "r0", end["d_admit"], 20 - end["d_admit"]),
        (3, "load", end["d_admit"], end["notify"] - end["d_admit"]),
        (3, "decode", end["notify"], 20 - end["notify"]),
    ]
    assert arrows_have_both_ends(events) == 1
    held = [(e["ts"], e["args"][""]) for e in events if e["ph"] == "C" and e["pid"] == 1 and "KV" in e["name"]]
    assert held == [(end["p_queue"], 512), (end["notify"], 0)]


def test_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    events = [{"ph": "C", "pid": 1, "name": "waiting", "ts": 0.001, "args": {"": 1}}] * 3
    for name in ("a.gz", "b.gz"):
        write_timeline(tmp_path / name, events)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.gz").read_bytes()))["traceEvents"] == events


@pytest.mark.parametrize("file", ["small.toml", "mixed.toml", "alone.toml"])
def test_a_run_writes_one(tmp_path: Path, file: str) -> None:
    scenario = Path(__file__).parents[1] / "sim" / file
    asked = ["--set", "network.preset=rdma-400g", "--quiet", "--timeline", "--out", str(tmp_path)]
    ran = CliRunner().invoke(cli, ["simulate", str(scenario), *asked])
    assert ran.exit_code == 0, ran.output
    events = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]
    holds(events)
    expected = {"small.toml": 40, "mixed.toml": 20, "alone.toml": 0}[file]
    assert arrows_have_both_ends(events) == expected
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    links = json.loads((tmp_path / "results.json").read_text())["pdflow"]["links"]
    counters = {(processes[e["pid"]], e["name"]) for e in events if e["ph"] == "C"}
    used = {f"{link['name']}, bytes/s" for link in links if link["bytes"]}
    assert {name for process, name in counters if process == "links"} == used
    assert bool(used) == bool(expected)
    busy = {processes[e["pid"]] for e in events if e["ph"] == "X" and e["cat"] != "transfer"}
    assert {process for process, name in counters if name == "KV blocks in use"} == busy
    slices = [e["name"] for e in events if e["ph"] == "X" and e["cat"] in ("prefill", "aggregated")]
    assert len({name for name in slices if name.startswith("r")}) == 40


def test_a_large_run_is_written_as_a_stream(tmp_path: Path) -> None:
    """Of 50,000 events, 30 MB and more as dicts, no more is held than columns."""
    records, requests = Records(), 2_000
    for request in range(requests):
        records.add(request * 1000, 512, 10)
        for stage, column in enumerate(records.ends):
            column[request] = 1000 * (request + stage)
        records.last_token_ns[request] = 1000 * (request + 20)
        records.prefill_engine[request], records.decode_engine[request] = "p-0", "d-0"
    series = TimeSeries()
    for instant in range(30_000):
        series.record(instant, 1 + instant % 2)
    recording = Recording((LinkCourse("l", 2, series),))
    written = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal written
        for written, event in enumerate(timeline(records, recording), start=1):  # noqa: B007
            yield event

    tracemalloc.start()
    write_timeline(tmp_path / "t.gz", counted())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written > 45_000
    assert most < 6_000_000
