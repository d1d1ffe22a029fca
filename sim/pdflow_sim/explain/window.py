"""The simulation of a run until one of its requests has ended.

All is simulated from the start, as in the whole run, and nothing after the request's end: later events cannot change
what happened before, so the request is the same to the nanosecond, however its run went on.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from pdflow.results.explanation.inter_token import WorstItl, worst_itl
from pdflow.results.explanation.others import BlockSupply
from pdflow.results.explanation.path import durations_of
from pdflow.results.explanation.simulated import SimulatedRequest
from pdflow.results.figures.itls import itls_ns
from pdflow.results.records import D_ADMIT, HANDOFF, NEVER, NOTIFY, Outcome, Records, stage_marks_ns
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.rows import SweepTask
from pdflow_sim.explain.observed import ObservedBuilder
from pdflow_sim.run import open_workload
from pdflow_sim.uncollected import uncollected
from pdflow_sim.world import World


@attrs.frozen
class TargetRequest:
    """The request that a simulation is for: by its index in the workload, or by its session and turn, since the order
    in which the turns of sessions arrive is a result of the run."""

    request: int
    turn: tuple[int, int] | None = None

    @staticmethod
    def of(records: Records, request: int) -> TargetRequest:
        """Return the target of a recorded request."""
        return TargetRequest(request, records.sessions[request] if records.sessions else None)

    def found(self, records: Records) -> int | None:
        """Return its index in a run's records; None if it has not come."""
        if self.turn is None:
            return self.request if self.request < len(records) else None
        return records.sessions.index(self.turn) if self.turn in records.sessions else None

    def is_one(self, records: Records, request: int) -> bool:
        """Return whether it is this request of a run."""
        return request == self.request if self.turn is None else records.sessions[request] == self.turn


@attrs.frozen
class WindowTask(SweepTask):
    """A simulation until the target has ended, as one of a sweep's tasks; its one figure is the request."""

    target: TargetRequest = attrs.field(kw_only=True)

    def run(self, scenario: ResolvedScenario) -> dict[str, Any]:
        """Simulate, and return the request."""
        return {"simulated": simulate_window(scenario, self.target)}


def simulate_window(scenario: ResolvedScenario, target: TargetRequest) -> SimulatedRequest:
    """Simulate the scenario until the target has ended."""
    builder = ObservedBuilder(scenario)
    world = _until(scenario, builder, target)
    records = world.records
    request = target.found(records)
    if request is None:
        return SimulatedRequest(record=None, arrived=len(records), until_ns=world.clock.now)
    return SimulatedRequest(
        record=records.record(request),
        durations_ns=durations_of(records, request),
        arrived=len(records),
        until_ns=world.clock.now,
        itl=worst_itl(records, request, world.steps, builder.step_prompts()),
        memory=_memory(records, request, builder),
    )


def _until(scenario: ResolvedScenario, builder: ObservedBuilder, target: TargetRequest | None) -> World:
    """Run a world until the target has ended, or to its end."""
    world = builder.build()

    def on_end(request: int, _: Outcome) -> None:
        if target is not None and target.is_one(world.records, request):
            world.clock.stop()

    world.clients.on_end.append(on_end)
    open_workload(scenario, world)
    with uncollected():
        world.clock.run()
    return world


def _memory(records: Records, request: int, builder: ObservedBuilder) -> BlockSupply | None:
    """Return the blocks of the request's D when it began to wait for them; None if it has none, or D has restarted."""
    name = records.decode_engine[request]
    slot = None if name is None else builder.slots.by_name.get(name)
    if slot is None or slot.pool.role != "decode" or name is None:
        return None
    instants, values = builder.kv.kv_blocks[name].curve()
    begin_ns = int(stage_marks_ns(records)[D_ADMIT, request])
    at = int(np.searchsorted(instants, begin_ns, side="right")) - 1
    used = int(values[at]) if at >= 0 else 0
    limited = builder.dialect.limits_peers and len(builder.slots.of_leg("prefill")) > 1
    return BlockSupply(
        free=slot.blocks - used,
        total=slot.blocks,
        needed=-(-records.input_tokens[request] // slot.pool.block_size),
        to_come=_to_come(records, request, begin_ns, slot.pool.block_size),
        most_to_come=int(slot.blocks * builder.scenario.transfer.quarantine_fraction) if limited else None,
    )


def _to_come(records: Records, request: int, at_ns: int, block_size: int) -> int:
    """Return the blocks of the request's D that other requests have there for KV that is still to come from its P."""
    p, d = records.prefill_engine[request], records.decode_engine[request]
    blocks = 0
    engines = (records.prefill_engine, records.decode_engine)
    columns = zip(*engines, records.ends[HANDOFF], records.ends[NOTIFY], strict=True)
    for other, (of_p, of_d, queued_ns, arrived_ns) in enumerate(columns):
        # Of a request that has ended without its KV, nothing is to come.
        open_still = arrived_ns > at_ns or (arrived_ns == NEVER and records.outcome[other] is None)
        if other != request and (of_p, of_d) == (p, d) and NEVER < queued_ns <= at_ns and open_still:
            blocks += -(-records.input_tokens[other] // block_size)
    return blocks


@attrs.frozen
class WholeRunTask(SweepTask):
    """A simulation of the whole run, as one of a sweep's tasks; its one figure is the worst ITL after the warm-up."""

    warmup_ns: int = attrs.field(kw_only=True)

    def run(self, scenario: ResolvedScenario) -> dict[str, Any]:
        """Simulate, and return the worst ITL."""
        return {"worst": worst_of_run(scenario, self.warmup_ns)}


def worst_of_run(scenario: ResolvedScenario, warmup_ns: int) -> WorstItl | None:
    """Simulate the whole run, and return its worst ITL; None if no request has a second token."""
    builder = ObservedBuilder(scenario)
    world = _until(scenario, builder, None)
    records = world.records
    worst, longest_ns = None, -1
    for request, waits in enumerate(itls_ns(records, world.steps)):
        if len(waits) and records.arrival_ns[request] >= warmup_ns and int(waits.max()) > longest_ns:
            worst, longest_ns = request, int(waits.max())
    return None if worst is None else worst_itl(records, worst, world.steps, builder.step_prompts())
