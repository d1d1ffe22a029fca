"""The examples of the router do what they say, under the oracle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdflow.scenario import load
from pdflow_sim.run import RunOptions, prepare, run, simulate

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BLIND = ("router.policy=round-robin", "router.decode_policy=round-robin", "router.disaggregate_above_tokens=0")


def played(name: str, *overrides: str, checked: bool = True) -> Any:
    world, oracle = prepare(
        load(EXAMPLES / f"{name}.toml", overrides=overrides), RunOptions(check_invariants=checked), []
    )
    assert not run(world, oracle, drain=checked)
    return world


def found(nodes: Any) -> float:
    queries, hits = zip(*(node.prefix_cache() for node in nodes), strict=True)
    return float(sum(hits) / sum(queries))


def test_a_router_that_knows_where_conversations_are_moves_less() -> None:
    few = "workload.requests=700"
    knows, blind = played("routing-chat", few), played("routing-chat", few, *BLIND, checked=False)
    assert set(knows.records.outcome) == set(blind.records.outcome) == {"completed"}
    assert found(knows.decodes) > found(blind.decodes) + 0.1
    assert knows.totals.bytes_moved < 0.7 * blind.totals.bytes_moved
    stays = Counter(engine.partition("-")[0] for engine in knows.records.prefill_engine)
    assert stays["decode"] > 50
    assert stays["prefill"] > 50


@pytest.mark.parametrize("above", [60, 1_000_000])
def test_a_page_shows_decode_engines_that_compute_prompts(tmp_path: Path, above: int) -> None:
    """Some of them, or all."""
    overrides = ["workload.requests=100", f"router.disaggregate_above_tokens={above}"]
    scenario = load(EXAMPLES / "routing-chat.toml", overrides=overrides)
    simulate(scenario, out=str(tmp_path), html=True, timeline=True, quiet=True)
    page = (tmp_path / "report.html").read_text()
    assert "decode KV blocks in use" in page
    assert "aggregated KV blocks" not in page


def test_a_cluster_follows_its_load() -> None:
    world = played("routing-elastic")
    records, notes = world.records, world.totals.notes
    assert set(records.outcome) == {"completed"}
    assert notes["fault: crash"] == 1
    assert notes["engine started"] >= 5
    assert notes["engine stopped"] >= 1
    recomputed = [i for i, made in enumerate(records.attempts) if made > 1]
    assert recomputed
    assert len(set(records.prefill_engine)) > 4
