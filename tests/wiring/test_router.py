"""What a router is made from, where only a world knows it: engines that compute alone, and where prompts stay."""

from __future__ import annotations

from pathlib import Path

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.scenario.reading.load import load
from pdflow.wiring.router import RoutedEngines, Target, dispatch_of, router_of


def cluster(*overrides: str, block_tokens: int = 64) -> RoutedEngines:
    scenario = load(Path(__file__).parent / "wired.toml", overrides=overrides)
    legs: dict[str, list[Target]] = {"prefill": [], "decode": []}
    for pool in scenario.pools:
        shards = Shards(pool.tp, pool.pp, pool.block_size)
        legs[pool.leg] += [Target(EngineInfo(f"{pool.name}-{i}", shards), pool) for i in range(pool.replicas)]
    return RoutedEngines(
        scenario=scenario,
        method=METHODS[scenario.transfer.method],
        prefill=tuple(legs["prefill"]),
        decode=tuple(legs["decode"]),
        prefix_block_tokens=block_tokens,
    )


def test_the_crossover_is_computed_once_for_each_pool() -> None:
    asked: list[int] = []

    def crossover(position: int) -> tuple[int, ...]:
        asked.append(position)
        return (100 + position,)

    made = router_of(attrs.evolve(cluster("router.disaggregate_above_tokens=auto"), crossover=crossover))
    assert isinstance(made, GovernedRouter)
    assert made.rules.disaggregation is not None
    assert made.rules.disaggregation.above == ((100,), (100,), (102,))
    assert asked == [0, 2]


def test_a_router_counts_cache_capacity_in_blocks_of_the_scenario() -> None:
    for block_tokens in (64, 512):
        choice = router_of(cluster("router.policy=prefix-aware", block_tokens=block_tokens)).prefill_choice
        assert isinstance(choice, PrefixAware)
        assert choice.capacities == (4096 // block_tokens,) * 3


def test_who_decodes_too_is_known() -> None:
    assert router_of(cluster()).aggregated == frozenset()
    assert router_of(cluster("pool.big.role=aggregated")).aggregated == {3}


def test_a_pull_is_always_dispatched_sequentially() -> None:
    for method, dispatch in (("nixl-push", "concurrent"), ("nixl-pull", "sequential")):
        made = cluster(f"transfer.method={method}", "router.dispatch=concurrent")
        assert dispatch_of(made.scenario, made.method) == dispatch
