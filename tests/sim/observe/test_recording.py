"""What a run writes down over time: as much as was carried and held, to the block, and at no cost to the results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdflow.results.recording import Recording, TimeSeries
from pdflow.results.records import IntColumn
from pdflow.scenario.reading.load import load
from pdflow_sim.run import RunOptions, conclude, prepare, run, simulate

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
S = 1_000_000_000
BUSY = ("network.preset=rdma-400g", "network.bandwidth_bytes_per_s=1e9", "pool.d.cost={ model = 'roofline' }")


def recorded(file: Path, *overrides: str, exact: bool = False) -> tuple[Recording, dict[str, int]]:
    """What was written down, and the bytes by link."""
    scenario = load(file, overrides=overrides)
    world, _ = prepare(scenario, RunOptions(timeline=True, exact=exact), [])
    assert not run(world, None, drain=True)
    assert world.recorder is not None
    totals = conclude(scenario, world, (), False).totals
    carried = {link.name: link.bytes for link in totals.links}
    return world.recorder.recording(world.fabric.paths.names), carried


def value_at(course: TimeSeries, instants: IntColumn) -> IntColumn:
    changes, values = course.curve()
    return np.concatenate(([0], values))[np.searchsorted(changes, instants, side="right")]


def test_rates_add_up_to_the_bytes_that_each_link_carried() -> None:
    recording, carried = recorded(HERE / "small.toml", *BUSY)
    assert {link.name for link in recording.links} == carried.keys()
    for link in recording.links:
        instants, rates = link.rate.curve()
        assert rates.min() == 0 == rates[-1]
        assert rates.max() == link.capacity_bytes_per_s == 10**9
        # What changes between two ns is told with the later one: a byte of this link.
        total_bytes = float((rates[:-1] / S * np.diff(instants)).sum())
        assert total_bytes == pytest.approx(carried[link.name], abs=len(instants))


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("small.toml", (*BUSY, "workload.output_tokens=200")),
        ("small.toml", (*BUSY, "workload.output_tokens=60", "pool.d.kv_tokens=256", "pool.d.replicas=1")),
        ("mixed.toml", ()),
        ("alone.toml", ("workload.output_tokens=100",)),
    ],
)
def test_blocks_are_those_of_a_run_token_by_token(file: str, overrides: tuple[str, ...]) -> None:
    recording, _ = recorded(HERE / file, *overrides)
    exact, _ = recorded(HERE / file, *overrides, exact=True)
    assert recording.kv_blocks.keys() == exact.kv_blocks.keys()
    for engine, course in recording.kv_blocks.items():
        instants, values = course.curve()
        assert values.tolist() == value_at(exact.kv_blocks[engine], instants).tolist()
        assert values.max() > values[-1] == 0


def test_between_two_samples_no_sequence_takes_more_than_a_block() -> None:
    """A lone request of 200 tokens, of whose decoding nobody asks before it ends."""
    alone = ("workload.requests=1", "workload.input_tokens=10", "workload.output_tokens=200")
    recording, _ = recorded(HERE / "small.toml", *alone)
    exact, _ = recorded(HERE / "small.toml", *alone, exact=True)
    [engine] = [name for name, course in exact.kv_blocks.items() if name.startswith("d") and course.values]
    instants, values = exact.kv_blocks[engine].curve()
    behind = values[:-1] - value_at(recording.kv_blocks[engine], instants[:-1])
    assert values.max() == 13, "of 209 tokens' 14 blocks the last step takes the last, and is over"
    assert set(behind.tolist()) <= {0, 1}


def test_what_dies_holds_nothing() -> None:
    recording, _ = recorded(ROOT / "examples/faults/prefill-crash.toml")
    instants, values = recording.kv_blocks["prefill-0"].curve()
    down = (instants >= 8 * S) & (instants < 11 * S)
    assert values[instants < 8 * S][-1] > 0
    assert (instants[down].tolist(), values[down].tolist()) == ([8 * S], [0])
    assert values[instants >= 11 * S].max() > 0


def test_the_results_are_those_of_a_run_of_which_nothing_was_written_down(tmp_path: Path) -> None:
    scenario = load(HERE / "small.toml", overrides=(*BUSY, "workload.output_tokens=60", "pool.d.kv_tokens=256"))
    for name, asked in (("plain", False), ("recorded", True)):
        command = ("simulate", "small.toml", *(("--timeline", "--html") if asked else ()), "--out", name)
        simulate(scenario, command=command, out=str(tmp_path / name), quiet=True, timeline=asked, html=asked)
    for file in ("results.json", "requests.jsonl"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "recorded" / file).read_bytes()


def test_a_course_keeps_the_last_value_of_each_instant_and_only_changes() -> None:
    course = TimeSeries()
    for instant, value in ((0, 0), (5, 7), (5, 3), (6, 3), (8, 2**70), (9, 1), (9, 2**70)):
        course.record(instant, value)
    assert (course.instants.tolist(), course.values.tolist()) == ([5, 8], [3, 2**63 - 1])
