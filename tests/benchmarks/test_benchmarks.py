"""The benchmarks run; what they must show is checked at night, since it measures the machine as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hash_speed
from benchmarks.core_speed import OPEN, of_a_run, with_open_transfers
from benchmarks.ends_speed import costs
from benchmarks.sim_speed import CASES, measured
from benchmarks.watch_speed import MODES, took, written


def test_the_protocol_alone() -> None:
    events, event_s, sync_s = with_open_transfers(5, 20, 1)
    assert events > 5
    assert min(event_s, sync_s) > 0
    per_request, event_s, request_s = of_a_run(20, 1)
    assert request_s == pytest.approx(per_request * event_s)


def test_both_ends_of_a_simulation(tmp_path: Path) -> None:
    assert min(costs(20, tmp_path).values()) > 0
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 20


@pytest.mark.parametrize("title", CASES)
def test_a_simulated_case(title: str) -> None:
    figures = measured([*CASES[title], "workload.requests=20"])
    assert figures["requests"] == 20
    assert figures["turns"] > 20


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_watched(mode: str) -> None:
    spent, world = took(20, mode)
    assert spent > 0
    assert world.ended == 20
    assert (world.recorder is not None) == (mode == "recorded")


def test_a_timeline_that_is_written(tmp_path: Path) -> None:
    stats = written(20, tmp_path)
    assert stats["events"] > 20 * 10
    assert (tmp_path / "timeline.json.gz").stat().st_size > 0


def test_the_hash_of_weights(tmp_path: Path) -> None:
    hash_speed.write(tmp_path / "model.safetensors", 1)
    assert min(hash_speed.speeds(tmp_path, tmp_path / "cache", 2, 1)) > 0


@pytest.mark.nightly
def test_an_event_costs_the_same_however_many_transfers_are_open() -> None:
    each = [with_open_transfers(count, 2_000, 5)[1] for count in OPEN]
    assert max(each) / min(each) < 1.5


def test_every_file_belongs_to_a_package() -> None:
    from benchmarks.profile_sim import ROOT, package_of

    assert package_of(str(ROOT / "pdflow/protocol/producer/lease.py")) == "protocol"
    assert package_of(str(ROOT / "sim/pdflow_sim/nodes/node.py")) == "sim"
    assert package_of("<string>") == package_of("/usr/lib/python3/heapq.py") == "libraries"
