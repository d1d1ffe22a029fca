"""Laws of single cells: what has no rule changes nothing, phases follow the tables, only differences of time count.

The cells are those that exploration meets, so every phase is seen with everything that it can hold; the events are
every kind that a cell of that side understands, for its own registration and for another.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from pdflow.protocol.consumer import cell as consumer
from pdflow.protocol.consumer import rules as consumer_rules
from pdflow.protocol.consumer.cell import ConsumerCell, ConsumerContext
from pdflow.protocol.dialect import STRICT, VLLM_COMPAT, Dialect
from pdflow.protocol.effects import NOTHING
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    PairFailed,
    PairLanded,
    PairMissing,
    PairReported,
    PeerFenced,
    PrefillEnded,
    PrefillLegEnded,
    ReconnectRefused,
    Source,
    SourceCompleted,
    SourceReady,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.ids import Op, Reg
from pdflow.protocol.messages import Code, Done, Progress, Register
from pdflow.protocol.phases import CONSUMER_PHASES, PRODUCER_PHASES, ConsumerPhase, ProducerPhase
from pdflow.protocol.producer import cell as producer
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import ProducerCell, ProducerContext
from pdflow.protocol.values import Allocation
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore

FAR = 1 << 60
OTHER = Reg("D", 9, 9, "another")
PRODUCER_TIMES = ("lease_until", "registration_until", "join_until", "expect_until")
CONSUMER_TIMES = ("deadline_until", "stall_until", "cancel_at", "reclaim_until")


@cache
def space(dialect: Dialect, pulls: bool, p_tp: int, d_tp: int, method: str = "") -> Transitions:
    early = {"method": method, "prefill_abort": 1} if method else {}
    explored = relation(Scope(dialect=dialect, pulls=pulls, p_tp=p_tp, d_tp=d_tp, err=1, dup=1, **early))
    explore(explored, limit=4000, lively=False)
    return explored


SPACES = [(STRICT, False, 1, 1), (STRICT, False, 1, 2), (STRICT, False, 2, 1), (STRICT, True, 1, 1)]
SPACES += [(VLLM_COMPAT, False, 1, 2), (VLLM_COMPAT, False, 1, 1), (VLLM_COMPAT, True, 1, 1)]
SPACES += [(STRICT, False, 1, 1, "cpu-staged"), (STRICT, False, 1, 2, "cpu-staged")]


def called(which: Any) -> str:
    dialect, pulls, p_tp, d_tp, *method = which
    return " ".join([dialect.name, "pull" if pulls else "push", f"{p_tp}:{d_tp}", *method])


def cells_of(explored: Transitions, kind: type) -> dict[Any, None]:
    """In the order in which they were met, without repetitions."""
    found: dict[Any, None] = {}
    for endpoint in explored.space.bodies:
        for cell in getattr(endpoint, "cells", {}).values():
            if type(cell) is kind:
                found[cell] = None
    return found


def producer_context(explored: Transitions, connected: bool = True) -> ProducerContext:
    scope = explored.space.scope
    return ProducerContext(
        0,
        explored.space.cluster.p.shards,
        scope.dialect,
        explored.space.cluster.timers,
        explored.space.cluster.geometry,
        True,
        explored.space.cluster.method is not None and explored.space.cluster.method.in_pieces,
        connected=connected,
    )


def producer_events(cell: ProducerCell, explored: Transitions) -> list[Any]:
    source = Source(Allocation(10, (100, 101)), 32, 70, 1, None)
    events: list[Any] = [
        SourceReady(cell.xid, "u0-e0000000", source),
        SourceReady(cell.xid, "u0-e0000000", msgspec.structs.replace(source, digest=99)),
        SourceReady(cell.xid, "u0-e0000000", msgspec.structs.replace(source, complete=False)),
        SourceCompleted(cell.xid),
        PrefillEnded(cell.xid, Code.PREFILL_ABORTED),
        producer.Connected(),
        producer.RegistrationRefused(Code.UNREACHABLE),
        producer.RegistrationRetired(),
        producer.CancelReceived("D.r0"),
        producer.LeaseEnded(),
        producer.JoinEnded(),
        producer.ShardTaken(0, 1),
        producer.ShardTaken(0, 2),
    ]
    for reg in (cell.reg or Reg("D", 201, 1, "u0-d0000000"), OTHER):
        for rank in range(explored.space.scope.d_tp):
            target = Allocation(20, (200, 201))
            registration = Register(reg, cell.xid, rank, explored.space.cluster.d.shards, target, 0, 32, 70, 1, 1)
            events += [registration, msgspec.structs.replace(registration, digest=71)]
            events += [WriteEnded(Op(reg, 0, rank), ok) for ok in (True, False)]
            events += [WriteStopped(Op(reg, 0, rank))]
            events += [
                producer.PeerQuiet(rank, ok, fenced) for ok, fenced in ((True, False), (True, True), (False, False))
            ]
    return events


def consumer_context(explored: Transitions) -> ConsumerContext:
    scope = explored.space.scope
    ranks = tuple(explored.space.cluster.d_ranks)
    return ConsumerContext(
        explored.space.cluster.d,
        ranks,
        scope.dialect,
        explored.space.cluster.timers,
        explored.space.cluster.geometry,
        scope.pulls,
    )


def consumer_events(cell: ConsumerCell, explored: Transitions) -> list[Any]:
    admitted = DecodeAdmitted(cell.request_id, Allocation(20, (200, 201)), 0, 32, 70, 1)
    events: list[Any] = [
        consumer.Admission(Reg("D", 201, 1, cell.request_id), admitted),
        consumer.RoomMade(),
        consumer.RequestFailed(Code.DEADLINE),
        consumer.PrefillRestarted(),
        consumer.CancelDue(),
        consumer.ReclaimDue(),
        DecodeHit(cell.request_id),
        DecodeAborted(cell.request_id, Code.CANCELLED),
        PrefillLegEnded(cell.request_id, True),
        PrefillLegEnded(cell.request_id, False),
    ]
    reg = OTHER if cell.registration is None else cell.registration.reg
    for named in (reg, OTHER):
        for p_rank, d_rank in explored.space.cluster.pairs:
            op = Op(named, p_rank, d_rank)
            for sender in (f"P.r{p_rank}", f"Q.r{p_rank}", f"P.r{p_rank + 1}"):
                nbytes = explored.space.cluster.geometry.nbytes(
                    p_rank, d_rank, explored.space.cluster.p.shards, explored.space.cluster.d.shards, 32
                )
                done = Done(named, p_rank, 20, nbytes, 1)
                events += [PairLanded(op, sender), PairLanded(op, sender, done)]
                events += [PairLanded(op, sender, msgspec.structs.replace(done, generation=19))]
                events += [PairFailed(op, sender, Code.IO, settled) for settled in (True, False)]
                events += [PairReported(op, sender, progress) for progress in Progress]
                events += [PeerFenced(sender, d_rank, 9)]
                events += [ReconnectRefused(sender, d_rank, newest) for newest in (0, 9)]
            events += [PairMissing(op)]
    return events


def producer_steps(explored: Transitions):  # type: ignore[no-untyped-def]
    for connected in (True, False):
        ctx = producer_context(explored, connected)
        for cell in cells_of(explored, ProducerCell):
            for event in producer_events(cell, explored):
                if type(event) is Register and cell.reg is not None and event.reg != cell.reg:
                    continue  # the endpoint finds a cell by its registration
                yield cell, event, ctx


def consumer_steps(explored: Transitions):  # type: ignore[no-untyped-def]
    ctx = consumer_context(explored)
    for cell in cells_of(explored, ConsumerCell):
        for event in consumer_events(cell, explored):
            yield cell, event, ctx


@pytest.mark.parametrize(
    "which", SPACES, ids=lambda w: f"{w[0].name} {'pull' if w[1] else 'push'} {w[2]}:{w[3]}{w[4:]}"
)
def test_an_event_without_a_rule_returns_the_very_same_cell(which) -> None:  # type: ignore[no-untyped-def]
    explored = space(*which)
    for cell, event, ctx in producer_steps(explored):
        if (cell.phase, type(event)) not in producer_rules.RULES:
            assert producer_rules.step(cell, event, 0, ctx) == (cell, NOTHING)
            assert producer_rules.step(cell, event, 0, ctx)[0] is cell
    for cell, event, ctx in consumer_steps(explored):
        if (cell.phase, type(event)) not in consumer_rules.RULES:
            assert consumer_rules.step(cell, event, 0, ctx) == (cell, NOTHING)
            assert consumer_rules.step(cell, event, 0, ctx)[0] is cell


@pytest.mark.parametrize(
    "which", SPACES, ids=lambda w: f"{w[0].name} {'pull' if w[1] else 'push'} {w[2]}:{w[3]}{w[4:]}"
)
def test_phases_change_as_in_the_tables_and_cells_never(which) -> None:  # type: ignore[no-untyped-def]
    explored = space(*which)
    for cell, event, ctx in producer_steps(explored):
        before = msgspec.json.encode(cell)
        after, _ = producer_rules.step(cell, event, 0, ctx)
        assert after.phase in PRODUCER_PHASES[cell.phase], (cell, event, after)
        assert msgspec.json.encode(cell) == before
    for cell, event, ctx in consumer_steps(explored):
        before = msgspec.json.encode(cell)
        after, _ = consumer_rules.step(cell, event, 0, ctx)
        assert after.phase in CONSUMER_PHASES[cell.phase], (cell, event, after)
        assert msgspec.json.encode(cell) == before


def test_every_change_of_the_tables_is_really_made() -> None:
    """An arrow that no step ever makes would be a line in the documentation, not in the machine."""
    made_p: set[tuple[ProducerPhase, ProducerPhase]] = set()
    made_d: set[tuple[ConsumerPhase, ConsumerPhase]] = set()
    for which in SPACES:
        explored = space(*which)
        for cell, event, ctx in producer_steps(explored):
            made_p.add((cell.phase, producer_rules.step(cell, event, 0, ctx)[0].phase))
            late = msgspec.structs.replace(cell, lease_until=0) if cell.source is not None else cell
            if cell.phase is ProducerPhase.SETTLING:
                made_p.add((cell.phase, producer_rules.step(late, event, 1, ctx)[0].phase))
        for cell, event, ctx in consumer_steps(explored):
            made_d.add((cell.phase, consumer_rules.step(cell, event, 0, ctx)[0].phase))
            if cell.phase is ConsumerPhase.QUEUED:
                held = msgspec.structs.replace(cell, phase=ConsumerPhase.HELD)
                made_d.add((held.phase, consumer_rules.step(held, event, 0, ctx)[0].phase))
    unmade_p = {(a, b) for a, to in PRODUCER_PHASES.items() for b in to if a is not b} - made_p
    unmade_d = {(a, b) for a, to in CONSUMER_PHASES.items() for b in to if a is not b} - made_d
    assert {f"{a.name}->{b.name}" for a, b in unmade_p} == set()
    assert {f"{a.name}->{b.name}" for a, b in unmade_d} == set()


def shifted(cell: Any, names: tuple[str, ...], by: int) -> Any:
    """The same cell in a life that began `by` earlier. Zero and the sentinels for `never` are no times."""
    moved = {name: at + by for name in names if 0 < (at := getattr(cell, name)) < FAR}
    return msgspec.structs.replace(cell, **moved)


@pytest.mark.parametrize("by", [1, 7_000_000_000, 123_456_789_012_345])
@pytest.mark.parametrize(
    "which", SPACES, ids=lambda w: f"{w[0].name} {'pull' if w[1] else 'push'} {w[2]}:{w[3]}{w[4:]}"
)
def test_only_differences_of_time_count(which, by) -> None:  # type: ignore[no-untyped-def]
    explored = space(*which)
    now = 1_000
    for cell, event, ctx in producer_steps(explored):
        cell = shifted(cell, PRODUCER_TIMES, now)
        after, effects = producer_rules.step(cell, event, now, ctx)
        later = producer_rules.step(shifted(cell, PRODUCER_TIMES, by), event, now + by, ctx)
        assert later == (shifted(after, PRODUCER_TIMES, by), effects)
    for cell, event, ctx in consumer_steps(explored):
        cell = shifted(cell, CONSUMER_TIMES, now)
        after, effects = consumer_rules.step(cell, event, now, ctx)
        later = consumer_rules.step(shifted(cell, CONSUMER_TIMES, by), event, now + by, ctx)
        assert later == (shifted(after, CONSUMER_TIMES, by), effects)


def test_exploration_reaches_every_phase() -> None:
    phases = {cell.phase for which in SPACES for cell in cells_of(space(*which), ProducerCell)}
    assert phases == set(ProducerPhase) - {ProducerPhase.GONE}
    seen = {cell.phase for which in SPACES for cell in cells_of(space(*which), ConsumerCell)}
    assert seen == set(ConsumerPhase) - {ConsumerPhase.GONE, ConsumerPhase.HELD}
