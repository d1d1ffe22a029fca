"""The fault plan of a scenario: its patterns become names, its seconds ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdflow.faults import plan
from pdflow.faults.names import matching
from pdflow.faults.plan import ROUTER, FaultPlan, FaultTimes, Links
from pdflow.protocol.values import EngineId
from pdflow.scenario.schema.faults import (
    FAULT_KINDS,
    CrashFault,
    DelayFault,
    DropFault,
    DuplicateFault,
    Fault,
    HandshakeErrorFault,
    HangUpFault,
    NicDownFault,
    OnLinks,
    OnMessages,
    PartitionFault,
    PauseFault,
    ReorderFault,
    SkewFault,
    SlowFault,
    TransferErrorFault,
)
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario


def plan_of(scenario: ResolvedScenario) -> FaultPlan:
    """Return the plan of the scenario's faults; random times and probabilities are still to be drawn."""
    kinds = {kind: name for name, kind in FAULT_KINDS.items()}
    counts: dict[str, int] = {}
    faults = []
    for fault in scenario.faults:
        kind = kinds[type(fault)]
        number = counts.get(kind, 0)
        counts[kind] = number + 1
        faults.append(_resolved(f"{kind}/{number}", fault, scenario))
    table = scenario.fault_table
    return FaultPlan(
        faults=tuple(faults),
        heal_ns=_ns(table.heal_s),
        transport_timeout_ns=seconds_to_ns(table.transport_timeout_s),
    )


def engines_of(pools: Sequence[Pool], role: str | None = None) -> tuple[EngineId, ...]:
    """Return the names of all engines, or of those of one role, pool by pool."""
    return tuple(f"{p.name}-{i}" for p in pools if role in (None, p.role) for i in range(p.replicas))


def links_of(fault: OnLinks, pools: Sequence[Pool]) -> Links:
    """Return the directions that a fault means, of those between a prefill and a decode engine, or from engines to the
    router if it names that."""
    if fault.to_engine == ROUTER:
        senders = frozenset(matching(fault.from_engine or "*", engines_of(pools)))
        return Links(((senders, frozenset((ROUTER,))),))
    if fault.between is not None:
        one, other = fault.between
        directions = [(one, other), (other, one)]
    else:
        directions = [(fault.from_engine or "*", fault.to_engine or "*")]
    prefill, decode = engines_of(pools, "prefill"), engines_of(pools, "decode")
    every = [
        (frozenset(matching(sender, senders)), frozenset(matching(receiver, receivers)))
        for sender, receiver in directions
        for senders, receivers in ((prefill, decode), (decode, prefill))
    ]
    return Links(tuple((senders, receivers) for senders, receivers in every if senders and receivers))


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else seconds_to_ns(seconds)


def _when(fault: Fault) -> FaultTimes:
    return FaultTimes(
        at_ns=seconds_to_ns(fault.at_s or 0.0),
        for_ns=_ns(fault.for_s),
        every_ns=_ns(fault.every_s),
        rate_per_s=fault.rate_per_s,
    )


def _resolved(name: str, fault: Fault, scenario: ResolvedScenario) -> plan.Fault:
    pools = scenario.pools
    common: dict[str, Any] = {"name": name, "when": _when(fault)}
    if isinstance(fault, OnLinks):
        common["links"] = links_of(fault, pools)
    if isinstance(fault, (OnMessages, TransferErrorFault, HandshakeErrorFault, HangUpFault)):
        common["probability"] = 1.0 if fault.probability is None else fault.probability
    if isinstance(fault, OnMessages):
        common["frames"] = frozenset(fault.messages or ())
    if isinstance(fault, (CrashFault, NicDownFault, PauseFault, SkewFault)):
        common["engines"] = matching(fault.engine, engines_of(pools))
    return _of_kind(fault, scenario, common)


def _of_kind(fault: Fault, scenario: ResolvedScenario, common: dict[str, Any]) -> plan.Fault:
    match fault:
        case DropFault():
            return plan.DropMessages(**common)
        case DelayFault():
            return plan.Delay(**common, delay_ns=seconds_to_ns(fault.delay_s), jitter_ns=seconds_to_ns(fault.jitter_s))
        case DuplicateFault():
            return plan.Duplicate(**common, delay_ns=seconds_to_ns(fault.delay_s))
        case ReorderFault():
            return plan.Reorder(**common, delay_ns=seconds_to_ns(fault.delay_s))
        case PartitionFault():
            return plan.Partition(**common)
        case SlowFault():
            links = () if fault.link is None else matching(fault.link, [link.name for link in scenario.network.links])
            engines = () if fault.engine is None else matching(fault.engine, engines_of(scenario.pools))
            return plan.Slow(**common, engines=engines, links=links, factor=fault.factor)
        case NicDownFault():
            return plan.NicDown(**common, nic=fault.nic)
        case CrashFault():
            return plan.Crash(
                **common,
                restart_after_ns=_ns(fault.restart_after_s),
                new_engine_id=fault.engine_id == "new",
                same_incarnation=fault.incarnation == "same",
                lands=fault.in_flight == "lands",
            )
        case PauseFault():
            return plan.PauseEngine(**common, only_engine=fault.scope == "step")
        case SkewFault():
            return plan.Skew(**common, speed=fault.speed, offset_ns=seconds_to_ns(fault.offset_s))
        case TransferErrorFault():
            return plan.TransferError(**common, stage=fault.stage)
        case HandshakeErrorFault():
            return plan.HandshakeError(**common, delay_ns=_ns(fault.delay_s))
        case HangUpFault():
            return plan.HangUp(**common, within_ns=_ns(fault.within_s))
