"""Both simulators are given the same: one trace, one cost. Without the peer's environment, ours is shown alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_runs import COST, Case, mooncake, offered, profile, replay, scenario, traffic, written_to
from benchmarks.peers import main, overloaded, tenths, under_way
from pdflow.scenario import load
from pdflow.workload.build import requests
from pdflow.workload.request import PREFIX_BLOCK_TOKENS

SMALL = Case(title="small", requests=40)


def test_pdflow_reads_back_the_traffic_that_it_drew(tmp_path: Path) -> None:
    written_to(tmp_path, SMALL)
    resolved = load(str(tmp_path / "scenario.toml"))
    read = list(requests(resolved.workload, resolved.seed, resolved.base_dir))
    drawn = traffic(SMALL)
    start = drawn[0].arrival_ns
    assert [(r.arrival_ns, r.input_tokens, r.output_tokens) for r in read] == [
        (r.arrival_ns - start, r.input_tokens, r.output_tokens) for r in drawn
    ]
    names = [name for r in read for name in r.prefix]
    assert len(set(names)) == len(names), "a prompt begins like another"
    assert all(len(r.prefix) == -(-r.input_tokens // PREFIX_BLOCK_TOKENS) for r in read)


def test_the_trace_is_mooncake() -> None:
    lines = [json.loads(line) for line in mooncake(traffic(SMALL)).splitlines()]
    assert [set(line) for line in lines] == [{"timestamp", "input_length", "output_length", "hash_ids"}] * 40
    assert lines[0]["timestamp"] == 0
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)


def test_the_profile_has_the_times_of_the_cost() -> None:
    points = profile()

    def prefill_ms(new: int) -> float:
        (x0, x1), (y0, y1) = points["prefill_isl"], points["prefill_ttft_ms"]
        return float(y0 + (y1 - y0) * (new - x0) / (x1 - x0))

    def decode_ms(context: int) -> float:
        (x0, x1), (y0, y1) = points["decode_active_kv_tokens"], points["decode_itl"][:, 0]
        return float(y0 + (y1 - y0) * (context - x0) / (x1 - x0))

    assert (points["decode_itl"][:, 0] == points["decode_itl"][:, 1]).all(), "the mean context must not matter"
    for prompts in ([512], [1536, 700], [1000] * 8):
        step = [(new, 0) for new in prompts]
        assert prefill_ms(sum(prompts)) == pytest.approx(COST.step_ps(step, []) / 1e9, rel=1e-12)
    for contexts in ([600], [1000, 1400], [900] * 100):
        assert decode_ms(sum(contexts)) == pytest.approx(COST.step_ps([], contexts) / 1e9, rel=1e-12)


@pytest.mark.parametrize("bare", [True, False])
def test_both_are_given_the_same_engines_and_bandwidth(tmp_path: Path, bare: bool) -> None:
    case = Case(title="", requests=20, prefills=2, decodes=3, bandwidth=123_456_789, bare=bare)
    written_to(tmp_path, case)
    (tmp_path / "scenario.toml").write_text(scenario(case))
    ours, theirs = load(str(tmp_path / "scenario.toml")), replay(case, tmp_path)
    for pool in ours.pools:
        engine = theirs[f"{pool.name}_engine_args"]["engine"]
        assert pool.replicas == theirs[f"num_{pool.name}_workers"]
        assert pool.kv_tokens == engine["num_gpu_blocks"] * engine["block_size"]
        for key in ("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"):
            assert getattr(pool, key) == engine[key]
        assert ours.model.kv_bytes_per_token == engine["kv_transfer_bytes_per_token"]
        assert ours.network.bandwidth_bytes_per_s == round(engine["kv_transfer_bandwidth"] * 1e9)


def test_overload_is_the_load_that_was_asked_for() -> None:
    case = overloaded(Case(title="", requests=200, prefills=1), 1.3)
    nbytes, seconds = offered(traffic(case))
    assert nbytes / seconds / case.bandwidth == pytest.approx(1.3, rel=1e-6)


def test_a_queue_that_grows_is_seen_to_grow() -> None:
    at = np.arange(100.0)
    rows = np.stack([at, at, at, at, 2 * at + 0.5, 2 * at + 1, 2 * at + 2], axis=1)
    assert under_way(rows) == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    assert tenths(at) == [10 * i + 4.5 for i in range(10)]


@pytest.mark.slow
def test_without_the_peer_ours_is_shown_and_how_to_have_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dynamo", "/nowhere/bin/python", "--requests", "12", "--speed"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("skipped Dynamo: /nowhere/bin/python does not run: No such file or directory\n")
    assert "pip install --no-deps ai-dynamo==" in shown
    assert "TTFT ms   pdflow" in shown
    assert "TTFT ms   Dynamo" not in shown
