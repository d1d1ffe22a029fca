"""Describes a run's engines to its router, whose endpoint is made as in every other driver."""

from __future__ import annotations

from collections.abc import Mapping

from pdflow.cost.step import StepCost
from pdflow.faults.plan import PauseEngine
from pdflow.scenario.costs.transfer_time import Crossover
from pdflow.scenario.plan import plan_of
from pdflow.wiring.engines import EngineWiring
from pdflow.wiring.router import RoutedEngines, Target, dispatch_of
from pdflow_sim.engine_slot import EngineSlots


def cluster_of(
    wiring: EngineWiring, slots: EngineSlots, costs: Mapping[str, StepCost], prefix_block_tokens: int
) -> RoutedEngines:
    """Return the router's description of the engines in these slots. `costs`: the cost of a step, by pool."""
    decodes = slots.of_leg("decode")
    crossover = Crossover(
        scenario=wiring.scenario,
        costs=costs,
        initiator=wiring.initiator,
        rule=wiring.rule,
        sequential=dispatch_of(wiring.scenario, wiring.method) == "sequential",
    )
    return RoutedEngines(
        scenario=wiring.scenario,
        method=wiring.method,
        prefill=targets(slots, "prefill"),
        decode=targets(slots, "decode"),
        prefix_block_tokens=prefix_block_tokens,
        crossover=lambda position: crossover.thresholds(decodes[position].pool),
        may_stall=any(isinstance(fault, PauseEngine) for fault in plan_of(wiring.scenario).faults),
    )


def targets(slots: EngineSlots, leg: str) -> tuple[Target, ...]:
    """Return the engines that get such legs, as the router's targets."""
    return tuple(Target(slot.info, slot.pool) for slot in slots.of_leg(leg))
