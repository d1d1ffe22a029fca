"""A running cluster is probed, and what comes of it is a scenario that can be simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'pdflow[live]'")

import trio

import pdflow
from pdflow.scenario.reading.editable import Scenario
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.calibrate import command
from pdflow_runtime.calibrate.files import write
from pdflow_runtime.calibrate.probe import continued, rounds
from pdflow_runtime.observe.event_log import FirstPiecePassed, Page
from tests.runtime.support.served import served

QUICKSTART = Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml"
SYNTHETIC = (
    *(f"pool.{pool}.{key}" for pool in ("prefill", "decode") for key in ("engine=synthetic", "replicas=1")),
    "pool.prefill.cost={ model = 'constant', prefill_s = 0.004 }",
    "pool.decode.cost={ model = 'constant', decode_step_s = 0.002 }",
    "pool.prefill.max_num_seqs=4",
    "pool.decode.max_num_seqs=4",
)


@pytest.mark.slow
@pytest.mark.trio
async def test_a_running_cluster_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PLAYED_S", 1.0)
    edited = command.edited_of(str(QUICKSTART), SYNTHETIC)
    with served(tmp_path, QUICKSTART, *SYNTHETIC) as cluster:
        with trio.fail_after(60):
            found = await command.probed(edited.resolved, BenchOptions(host=cluster.host, port=cluster.port))
    assert found.transfers == found.requests >= 30
    assert found.links.handshake_s is not None
    assert found.links.http_latency_s > 0
    write(tmp_path / "out", edited, found, "pdflow calibrate")
    again = Scenario.load(tmp_path / "out/scenario.toml").with_({"workload.requests": 20})
    result = pdflow.simulate(again)
    assert result.metrics.completed == 20


@pytest.mark.trio
async def test_a_server_that_does_not_answer_is_reported() -> None:
    scenario = Scenario.load(QUICKSTART).resolved
    with pytest.raises(pdflow.PdflowError, match="does not answer"):
        await command.probed(scenario, BenchOptions(port=1))


def test_every_engine_of_a_role_comes_to_see_each_length() -> None:
    scenario = Scenario.load(QUICKSTART).resolved
    alone = [each.requests[0][0] for each in rounds(scenario, 2048) if len(each.requests) == 1]
    assert {alone.count(length) for length in set(alone)} == {2 * 5}
    assert max(alone) == 1024
    most = max(len(each.requests) for each in rounds(scenario, 2048))
    assert most == 2 * 32


def test_pages_continue_where_the_last_ended_and_start_over_after_a_restart() -> None:
    first = Page("prefill-0", 0, [FirstPiecePassed(1, 1), FirstPiecePassed(2, 2)], 2)
    assert continued(first, Page("prefill-0", 0, [FirstPiecePassed(2, 2), FirstPiecePassed(3, 3)], 3)).notes == [
        *first.notes,
        FirstPiecePassed(3, 3),
    ]
    assert continued(first, first).notes == first.notes
    assert continued(first, Page("prefill-0", 0, [FirstPiecePassed(9, 9)], 1)).notes == [
        *first.notes,
        FirstPiecePassed(9, 9),
    ]
