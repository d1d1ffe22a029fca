"""The examples of the router do what they say, under the oracle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pdflow.scenario import load
from sim.run import Options, prepare, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BLIND = ("router.policy=round-robin", "router.decode_policy=round-robin", "router.disaggregate_above_tokens=0")


def played(name: str, *overrides: str, checked: bool = True) -> Any:
    world, oracle = prepare(load(EXAMPLES / f"{name}.toml", overrides=overrides), Options(check_invariants=checked), [])
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
