"""Liveness: once the faults are over, nothing stands still for longer than a bounded time; if something does, which
request waits for what.

The time of a request is counted from the healing, or from the last thing that happened to it: its arrival, its
dispatch, the end of its prefill, the arrival of its decode leg, whose deadline runs from there. While an engine
computes it, or while it is in a queue that moves, it does not wait for the protocol. The bound is computed in
`pdflow.scenario.validation.resolution`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdflow.protocol.errors import InvariantViolated
from pdflow.protocol.ids import rank_address
from pdflow.protocol.phases import ConsumerPhase
from pdflow.protocol.values import Instant, S
from pdflow.results.records import HANDOFF, P_QUEUE, PREFILL, ROUTE
from pdflow.scenario.validation.resolution import Resolution
from pdflow.serving.batch import awaits_kv, is_queued
from pdflow_sim.environment import ProcessSteps

if TYPE_CHECKING:
    from pdflow.routing.attempt import Attempt
    from pdflow_sim.nodes.aggregated_node import AggregatedNode
    from pdflow_sim.nodes.decode_node import SimDecodeNode
    from pdflow_sim.nodes.engine_node import SimEngineNode
    from pdflow_sim.nodes.prefill_node import SimPrefillNode
    from pdflow_sim.world import World

SHOWN = 20
"""The most requests that an error names."""


class Watch:
    """Checks every open request when its time is over."""

    def __init__(self, world: World, heal_ns: Instant, resolution: Resolution) -> None:
        self.world = world
        self.heal_ns = heal_ns
        self.resolution = resolution
        self.ended = 0
        """Requests that had ended when last looked at."""
        self.moved_at = heal_ns
        world.env.process(self.looks())

    def looks(self) -> ProcessSteps:
        """Check when the first request's time is over, again and again."""
        env = self.world.env
        yield env.timeout(self.heal_ns + self.resolution.bound_ns)
        while not self.world.done:
            yield env.timeout(self.look() - env.now)

    def look(self) -> Instant:
        """Check the open requests, and return when to check again. Raises InvariantViolated if one is late."""
        world, now, bound = self.world, self.world.clock.now, self.resolution.bound_ns
        if world.ended > self.ended:
            self.ended = world.ended
            self.moved_at = now
        late = []
        again = now + bound
        for request in list(world.router.by_request):
            due = self.since(request) + bound
            if due > now:
                again = min(again, due)
            elif not at_work(world, request) and not (in_line(world, request) and self.moved_at + bound > now):
                late.append(request)
        if late:
            self.fail(late)
        return again

    def since(self, request: int) -> Instant:
        """Return when the last thing happened to a request; the healing at the earliest."""
        records = self.world.records
        stamps = (records.ends[stage][request] for stage in (ROUTE, P_QUEUE, PREFILL, HANDOFF))
        return max(self.heal_ns, records.arrival_ns[request], *stamps)

    def fail(self, late: list[int]) -> None:
        lines = [missing(self.world, request) for request in late[:SHOWN]]
        if len(late) > SHOWN:
            lines.append(f"and {len(late) - SHOWN} more")
        what = f"faults ended at {seconds(self.heal_ns)}, and these requests made no progress for {self.resolution}"
        raise InvariantViolated("liveness", "\n".join([what, *lines]), "")


def assert_all_ended(world: World) -> None:
    """Assert that no request is open when nothing is left to happen. Raises InvariantViolated if one is."""
    if world.done:
        return
    still = [request for request, outcome in enumerate(world.records.outcome) if outcome is None]
    lines = [missing(world, request) for request in still[:SHOWN]]
    raise InvariantViolated(
        "liveness", "\n".join([f"no event is left to simulate, but {len(still)} requests are open", *lines]), ""
    )


def at_work(world: World, request: int) -> bool:
    """True if an engine computes the request, or would as soon as it has computed what is before it."""
    attempt = world.router.by_request[request]
    if attempt.p_open:
        prefill = world.prefills[attempt.p]
        return attempt.request_id in prefill.by_request and prefill.engine.running > 0
    decode = world.decodes[attempt.d]
    seq = decode.legs.get(attempt.request_id)
    computes = decode.alive and decode.engine.running > 0
    return seq is not None and computes and not awaits_kv(seq)


def in_line(world: World, request: int) -> bool:
    """True if the request is in the queue of a prefill engine, for blocks that others must give back first."""
    attempt = world.router.by_request[request]
    leg = world.prefills[attempt.p].by_request.get(attempt.request_id) if attempt.p_open else None
    return leg is not None and is_queued(leg.seq)


def missing(world: World, request: int) -> str:
    """Describe what a request waits for, in one line."""
    attempt = world.router.by_request.get(request)
    if attempt is None:
        return f"request {request}: the router has no open attempt for it"
    label = f"request {request}" if attempt.number == 1 else f"request {request}, attempt {attempt.number}"
    if attempt.d_open:
        return f"{label}: {_missing_at_decode(world, world.decodes[attempt.d], attempt)}"
    return f"{label}: {_missing_at_prefill(world.prefills[attempt.p], attempt)}"


def _missing_at_prefill(node: SimPrefillNode | AggregatedNode, attempt: Attempt) -> str:
    leg = node.by_request.get(attempt.request_id)
    if not node.alive:
        return f"the router waits for {node.name}, which is down"
    if leg is None:
        return f"the router waits for {node.name}, which does not know it"
    return f"it is {leg.seq.phase.name} at {node.name}, which {_doing(node)}"


def _missing_at_decode(world: World, node: SimDecodeNode, attempt: Attempt) -> str:
    if not node.alive:
        return f"the router waits for {node.name}, which is down"
    seq = node.legs.get(attempt.request_id)
    if seq is None:
        return f"the router waits for {node.name}, which does not know it"
    scheduler: Any = node.scheduler.endpoint
    cell = scheduler.cells.get(attempt.request_id)
    if cell is None:
        return f"its KV has arrived; it is {seq.phase.name} at {node.name}, which {_doing(node)}"
    prefill = cell.params.prefill.engine
    if cell.phase is ConsumerPhase.HELD:
        return f"{node.name} does not admit it: {prefill} holds too many of its blocks, or is suspect"
    if cell.phase is ConsumerPhase.QUEUED:
        pool = node.engine.pool
        quarantined = f"{pool.quarantined:,} of {pool.num_blocks:,} KV blocks are in quarantine"
        return f"it waits in {node.name}'s queue for blocks for {seq.prompt_tokens} tokens; {quarantined}"
    if not cell.pairs:
        return f"it is {cell.phase.name} at {node.name}"
    awaited = "data" if world.fabric.pulls else "DONE"
    waits = [
        f"{rank_address(node.name, d)} waits for {rank_address(prefill, p)}'s {awaited}"
        for bit, (p, d) in enumerate(cell.pairs)
        if not cell.landed >> bit & 1
    ]
    asked = "READ" if world.fabric.pulls else "registration"
    last_answer = f"last answer of {prefill}: {cell.best.name}" if cell.best else "no answer"
    return f"{', '.join(waits)}; {asked} sent at {seconds(seq.admitted_ns)}, {last_answer}"


def _doing(node: SimEngineNode) -> str:
    engine = node.engine
    if node.paused_until > node.clock.now:
        return f"is paused until {seconds(node.paused_until)}"
    return f"computes {engine.running} sequences and has {engine.waiting} in its queue"


def seconds(at: Instant) -> str:
    return f"{at / S:.3f} s"
