"""Checks of every step of an endpoint, and of endpoints at rest: S8, S10, S11, L5 and L8 to L12.

A step is an endpoint and an event; each is run, and checked, once. For wake-ups and for D's scheduler that is more than
once for each state of an endpoint, and it has to be: heaps and its counts are in no fingerprint, so two steps may lead
to what counts as one state. The counts of all other endpoints are checked once for each state.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Handshake, Note, Resolve
from pdflow.protocol.events import HandshakeEnded, PeerRestarted, Received, TimerFired
from pdflow.protocol.ids import Shards, engine_of
from pdflow.protocol.invariants.accounting import miscounted, overadmitted, underadmitted
from pdflow.protocol.invariants.doubts import cancelled_in_vain, doubted_in_vain
from pdflow.protocol.invariants.former import acts_on, fails_for_former_restart
from pdflow.protocol.invariants.leases import expired_in, unrenewed, waits_in_vain
from pdflow.protocol.invariants.queues import overtaken, overtaken_in
from pdflow.protocol.invariants.timers import assume_scheduled, too_early, too_late, unscheduled
from pdflow.protocol.messages import Code, Heartbeat, Sync
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Address
from pdflow_sim.check.state.cluster import FIRST_INCARNATION
from pdflow_sim.check.state.shadow_state import CRASH, Broken


class GoalRecorder(Protocol):
    """Records which goals a search has reached."""

    def goal(self, name: str) -> None: ...


def is_woken(node: Address, before: Any, armed_before: tuple[Timer, ...], after: Any, armed: tuple[Timer, ...]) -> None:
    """Check that a driver would fire every armed timer in time (S10), if it would have before an event, and that the
    event has armed none for a time that has passed (L12). The heap of `after` has what the event has pushed alone.
    `armed_before`, `armed`: what was armed before, and what is after."""
    if why := too_early(before, after, armed, 0):
        raise Broken("L12", f"at {node}, {why}")
    assume_scheduled(after, before, armed_before)
    if why := unscheduled(after, armed):
        raise Broken("S10", f"at {node}, {why}")


def is_woken_again(node: Address, before: Any, armed: tuple[Timer, ...], event: TimerFired) -> None:
    """Check the same after a timer has fired, in a copy in which it fires when it is due, as with any driver. Where
    time stands still it fires earlier, and the next deadline may then be no other than this one."""
    after = before.fork()
    try:
        after.handle(event, max(0, before.deadline(event.timer)))
    except Exception as error:
        raise Broken(CRASH, f"{event.timer.kind.name} fires when it is due: {type(error).__name__}: {error}") from error
    assume_scheduled(after, before, armed, event.timer)
    if why := unscheduled(after):
        raise Broken("S10", f"at {node}, {why}")


def admits_right(node: Address, before: Any, after: Any, counted: bool) -> None:
    """Check that D's scheduler counts right (S11), and that admission keeps to its limits: no engine binds more (L6),
    no request waits that they allow (S11), and none is overtaken (L11). `counted`: `counts_right` has checked this
    state."""
    if not isinstance(after, ConsumerScheduler):
        return
    if why := overadmitted(before, after, 0):
        raise Broken("L6", f"at {node}, {why}")
    if why := ("" if counted else miscounted(after)) or underadmitted(before, after, 0):
        raise Broken("S11", f"at {node}, {why}")
    if why := overtaken(before, after):
        raise Broken("L11", f"at {node}, {why}")


def counts_right(node: Address, after: Any) -> None:
    """Check that counts and indexes of a new state of an endpoint equal what its cells say (S11), and that what it
    repeats is not put off for longer than its largest period (L12)."""
    if why := miscounted(after):
        raise Broken("S11", f"at {node}, {why}")
    if why := too_late(after, 0):
        raise Broken("L12", f"at {node}, {why}")


def gives_room_in_order(node: Address, before: Any, after: Any) -> None:
    """Check that an engine's core gives staging memory to prompts in the order in which they asked (L11)."""
    queue, now = getattr(before, "staging", None), getattr(after, "staging", None)
    if queue is None or now is None or not now.waiting:
        return
    had = {name for name, _ in queue.held.values()}
    granted = {name for name, _ in now.held.values()} - had
    order = dict.fromkeys((*queue.waiting, *now.waiting, *sorted(granted)))
    if why := overtaken_in(order, now.waiting, granted):
        raise Broken("L11", f"at {node}, {why}")


def spares_later_requests(node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
    """Check that P's restart fails no request of a later incarnation (L10): of none whose prompt that incarnation has
    computed, and of none that has come since D knows of the restart, when another rank reports it."""
    if type(event) is not PeerRestarted:
        return
    for effect in effects:
        if type(effect) is Resolve and effect.code is Code.PEER_RESTARTED:
            computed_by = before.store.cells[effect.request_id].params.incarnation
            # Incarnations are counted here.
            if computed_by is not UNSET and computed_by > event.retired:
                raise Broken("L10", f"{effect.request_id} is resolved PEER_RESTARTED, but P has computed it since")
    if fails_for_former_restart(after, event):
        raise Broken(
            "L10", f"another report that {event.engine} has restarted fails requests that came after the first"
        )


def refuses_the_expired(
    shards: Shards, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]
) -> None:
    """Check that a P rank that releases an expired prompt refuses a later registration for it at once (L9). `shards`:
    those of the D engines."""
    if type(after) is not ProducerRank or not after.store.context.dialect.control_frames:
        return
    xid = expired_in(effects)
    if xid is not None and waits_in_vain(after, xid, shards):
        raise Broken("L9", f"{node} releases {xid} as expired, and a later registration for it would wait")


def doubts_with_cause(node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
    """Check that P lets D have the blocks of a registration that it has never written to, and that D cancels nothing
    that is settled (L9)."""
    why = ""
    if type(after) is ConsumerScheduler:
        why = cancelled_in_vain(after, effects)
    elif type(before) is ProducerRank and before.store.context.dialect.control_frames:
        why = doubted_in_vain(before, effects)
    if why:
        raise Broken("L9", f"at {node}, {why}")


def renews_what_is_wanted(node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
    """Check that a P rank renews the leases and registrations that a SYNC or a heartbeat of its D names (L5)."""
    if type(after) is not ProducerRank or not after.store.context.dialect.registrations_end:
        return
    message = event.message if type(event) is Received else None
    if not isinstance(message, Sync | Heartbeat) or any(type(effect) in (Note, Handshake) for effect in effects):
        return
    if why := unrenewed(after, event.sender, message, 0):
        raise Broken("L5", f"at {node}, {why}")


def ignores_former_incarnation(node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
    """Check that a copy of the endpoint does nothing about a frame of a former incarnation (S8)."""
    if type(event) is not HandshakeEnded or not event.ok or not after.peers.dialect.checks_incarnation:
        return
    engine = engine_of(event.peer)
    known = before.peers.incarnations.get(engine, 0)
    former = known if known not in (0, event.incarnation) else event.incarnation - 1
    if former >= FIRST_INCARNATION[engine] and acts_on(after, event.peer, former):
        raise Broken(
            "S8", f"a frame of a former incarnation makes {node} act, although {event.peer} has shown a new one"
        )


def dies_of_silence(node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]) -> None:
    """Check that a request ends as PEER_DEAD only if some request has been open to that P for `dead_ns` (L6): while
    none is, D sends P no SYNC. Holds where no client aborts, so that a request ends early only if P has answered."""
    dead = {effect.request_id for effect in effects if type(effect) is Resolve and effect.code is Code.PEER_DEAD}
    if type(event) is not TimerFired or not dead:
        return
    opened = [cell.deadline_until - before.store.context.timers.deadline_ns for cell in before.cells.values()]
    if min(opened) > -before.store.context.timers.dead_ns:
        raise Broken("L6", f"at {node}, {min(dead)} is resolved PEER_DEAD, but D has not waited for P so long")


def notes_window(
    goals: GoalRecorder, node: Address, before: Any, after: Any, event: Any, effects: tuple[Any, ...]
) -> None:
    """Record that P has dropped a frame whose registration is beyond D's window."""
    if any(type(effect) is Note and effect.name.endswith("too far above the floor") for effect in effects):
        goals.goal("beyond the window")
