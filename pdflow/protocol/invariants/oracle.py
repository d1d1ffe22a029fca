"""The checker of the safety invariants: an observer of every event into and every effect out of every endpoint.

It knows no rule of the protocol and reads no cell. From events and effects alone it keeps shadow state: who owns each
allocation at P and D, which one-sided operations are reading and which may still land, how every request ended. What it
decides is whether S1 to S9 hold (docs/invariants.md). One event costs O(1), except a fence, which looks at one link.

| invariant | how it is seen here |
| --- | --- |
| S1 | a PostWrite's target is the current allocation of exactly that registration; no FreeBlocks while anything may |
|    | still land in it; no allocation is made of blocks that a registration still holds |
| S2 | a PostWrite's source is held; no ReleaseBlocks while a WRITE reads it; no Commit of a READ whose source was |
|    | released before the READ had ended (P cannot know of a READ, D must find out: spec 2.3) |
| S3 | Commit only when the WRITE or READ of every pair has landed, each posted once and none still in flight |
| S4 | digest, weights and number of tokens of the source equal D's own, and the bytes are the layout's: at PostWrite, |
|    | and at Commit for a READ |
| S5 | nothing is hashed before Commit, so S5 is S3 and S4 at Commit |
| S6 | one Resolve or Commit for every request; every allocation is freed once, a product released once |
| S7 | P says SENT, to D or to its scheduler, only of shards whose WRITE ended well |
| S8 | a frame of another incarnation than the last handshake showed causes nothing but a Note and a handshake |
| S9 | a frame moves only what its sender owns: WRITEs and answers go to the sender's engine, and D's request changes |
|    | for its own prefill engine alone. (What stops a loop is an exception, and needs no observer.) |

The ownership of blocks is checked in `invariants.blocks`, the movement of bytes in `invariants.operations`, frames and
reports (S7, S8, S9) here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from pdflow.protocol.effects import (
    Commit,
    Effects,
    Enqueue,
    Flush,
    FreeBlocks,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
)
from pdflow.protocol.errors import InvariantViolated
from pdflow.protocol.events import (
    DecodeAdmitted,
    DecodeQueued,
    Event,
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PairFailed,
    PairLanded,
    PairReported,
    PeerExited,
    PrefillBegun,
    PrefillFinished,
    ReadEnded,
    Received,
    ShardReleased,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import Reg, engine_of, rank_of
from pdflow.protocol.invariants.operations import OperationOracle
from pdflow.protocol.messages import CancelAck, Code, Completion, Disposition, Done, Progress, RegisterAck, SyncReply
from pdflow.protocol.values import Address, EngineId, Instant

TRACE_EVENTS = 4096
"""The number of latest events from which the trace of a violation is taken."""
TRACE_LINES = 60


InvariantChecker: TypeAlias = Callable[[Any, Address, Any, Any], None]
Turn: TypeAlias = tuple[Instant, Address, Any, tuple[Any, ...]]
"""When a node answered an event, the node, the event and the effects."""


class Oracle(OperationOracle):
    """Checks the invariants of one cluster.

    Args:
        geometry: which P rank writes which D rank; the only code it shares with the state machine.
        done_is_remote: as in the P ranks' context: a good handle means that the bytes have landed.
    """

    __slots__ = ("_incarnations", "_now", "_recent")

    def __init__(self, geometry: Geometry, done_is_remote: bool = True) -> None:
        super().__init__(geometry, done_is_remote)
        self._incarnations: dict[tuple[Address, EngineId], int] = {}
        """The incarnation that each node learnt by handshake, by (node, peer engine)."""
        self._recent: deque[Turn] = deque(maxlen=TRACE_EVENTS)
        self._now: Instant = 0

    def observe(self, node: Address, event: Event, effects: Effects, now: Instant) -> None:
        """Check the `effects` with which `node` answered `event` at `now`. To be called before they are executed.

        Raises InvariantViolated.
        """
        self._now = now
        self._recent.append((now, node, event, effects))
        seen = _ON_EVENT.get(type(event))
        if seen is not None:
            seen(self, node, event, effects)
        for effect in effects:
            check = _ON_EFFECT.get(type(effect))
            if check is not None:
                check(self, node, effect, event)

    def finish(self, now: Instant) -> None:
        """Check at the end of a run that nothing is held. Raises InvariantViolated("quiescence")."""
        self._now = now
        for (engine, request_id), request in self._requests.items():
            how = "resolved, but its blocks are" if request.over else "neither committed nor resolved, its blocks are"
            self._fail("quiescence", f"{engine} still holds request {request_id!r}: {how} held", request_id)
        for (engine, xid), product in self._products.items():
            held = len(product.allocation.blocks)
            self._fail("quiescence", f"{engine} still holds the {held} blocks of {xid!r}", xid)
        for (p_rank, d_rank), operations in self._links.items():
            for op in operations:
                self._fail("quiescence", f"a WRITE from {p_rank} to {d_rank} has no end", op.reg.request_id)
        for node, op in self._reads:
            self._fail("quiescence", f"a READ at {node} has no end", op.reg.request_id)

    def lost(self, engine: EngineId) -> None:
        """Forget an engine all of whose processes are dead, with its memory. What its NICs still write may land
        elsewhere."""
        for key in [key for key in self._products if key[0] == engine]:
            product = self._products.pop(key)
            product.released = True
            del self._sources[engine, product.allocation.generation]
        for rkey in [key for key in self._requests if key[0] == engine]:
            request = self._requests.pop(rkey)
            if request.allocation is not None:
                self._targets.pop((engine, request.allocation.generation), None)
        self._owned.pop(engine, None)
        for link in list(self._links):
            if engine in (engine_of(link[0]), engine_of(link[1])):
                gone = engine_of(link[0]) == engine
                for op, operation in list(self._links[link].items()):
                    self._settle(link, op, operation, reading=not gone, landing=gone)
        for node, op in [key for key in self._reads if engine_of(key[0]) == engine]:
            del self._reads[node, op]
        for node, peer in [key for key in self._incarnations if engine_of(key[0]) == engine]:
            del self._incarnations[node, peer]

    # Frames, and what is reported of transfers.

    def _reported(self, node: Address, effect: SendLocal, event: Event) -> None:
        report = effect.event
        if type(report) is not ShardReleased or report.code is not Code.NONE:
            return
        product = self._products.get((engine_of(node), report.xid))
        if product is not None and product.failed >> report.rank & 1 and not product.sent >> report.rank & 1:
            self._fail("S7", f"{node} reports {report.xid!r} as sent, but its WRITE failed", report.xid)

    def _received(self, node: Address, event: Received, effects: Effects) -> None:
        sender, message = event.sender, event.message
        current = self._incarnations.get((node, engine_of(sender)))
        if current is not None and current != event.incarnation:
            for effect in effects:
                if type(effect) is not Note and type(effect) is not Handshake:
                    self._fail("S8", f"a frame of {sender} of incarnation {event.incarnation} made {node} act", sender)
            return
        if isinstance(message, Done):
            self._notification_arrived(node, sender, message.reg, message.generation)
        elif isinstance(message, Completion):
            read = self._read_notifications.pop((node, sender, message.request_id), None)
            if read is not None:
                # A READ's notice is behind its data: P may free before D has polled its own handle.
                read.reading = False
            self._notification_arrived(node, sender, Reg(engine_of(node), 0, 0, message.request_id), None)

    def _handshake_ended(self, node: Address, event: HandshakeEnded, effects: Effects) -> None:
        if event.ok:
            self._incarnations[node, engine_of(event.peer)] = event.incarnation

    def _sent(self, node: Address, effect: Send, event: Event) -> None:
        if type(event) is Received and engine_of(effect.to) != engine_of(event.sender):
            self._fail("S9", f"a frame of {event.sender} made {node} send to {effect.to}", effect.to)
        message = effect.message
        if isinstance(message, RegisterAck):
            if message.progress is Progress.SENT:
                self._claimed_sent(node, effect.to, message.reg)
        elif isinstance(message, CancelAck):
            if message.disposition is Disposition.SENT:
                self._claimed_sent(node, effect.to, message.reg)
        elif isinstance(message, SyncReply):
            for item in message.items:
                if item.progress is Progress.SENT:
                    self._claimed_sent(node, effect.to, item.reg)

    def _claimed_sent(self, node: Address, to: Address, reg: Reg) -> None:
        request = self._requests.get((reg.engine, reg.request_id))
        if request is None or request.reg != reg:
            return
        if not request.landed & request.pairs.get((rank_of(node), rank_of(to)), 0):
            self._fail("S7", f"{node} told {to} SENT of a WRITE that has not ended well", reg.request_id)

    def _pair_event(self, node: Address, event: PairLanded | PairFailed | PairReported, effects: Effects) -> None:
        if not effects or type(effects[0]) is Note:
            return
        request = self._requests.get((node, event.op.reg.request_id))
        if request is not None and engine_of(event.sender) != request.prefill:
            self._fail("S9", f"{event.sender} changed a request of {request.prefill}", event.op.reg.request_id)

    # Violations.

    def broken(self, name: str, what: str, node: Address) -> InvariantViolated:
        """Return the violation of an invariant that someone else has seen at a node, or at one whose address begins
        like this, with the latest events there."""
        recent = [turn for turn in self._recent if turn[1].startswith(node)]
        lines = [line for turn in recent for line in _described(turn)]
        return InvariantViolated(name, f"{what} (at {self._now} ns)", "\n".join(lines[-TRACE_LINES:]))

    def _fail(self, name: str, what: str, subject: str) -> NoReturn:
        """Raise InvariantViolated with the latest events and effects that name `subject`."""
        lines = []
        for turn in self._recent:
            if any(subject in repr(shown) for shown in (turn[2], *turn[3])):
                lines += _described(turn)
        raise InvariantViolated(name, f"{what} (at {self._now} ns)", "\n".join(lines[-TRACE_LINES:]))


def _described(turn: Turn) -> list[str]:
    """Return the lines of a trace for an event with its effects."""
    at, node, event, effects = turn
    return [f"{at:>14} {node:<16} {event!r}", *[f"{'':>14} {'':<16}   -> {effect!r}" for effect in effects]]


_ON_EVENT: dict[type, InvariantChecker] = {
    DecodeQueued: Oracle._queued,
    DecodeAdmitted: Oracle._admitted,
    PrefillBegun: Oracle._begun,
    PrefillFinished: Oracle._prefilled,
    WriteEnded: Oracle._write_ended,
    WriteStopped: Oracle._write_stopped,
    ReadEnded: Oracle._read_ended,
    FlushEnded: Oracle._flushed,
    FenceEnded: Oracle._fenced,
    PeerExited: Oracle._fenced,
    Received: Oracle._received,
    HandshakeEnded: Oracle._handshake_ended,
    PairLanded: Oracle._pair_event,
    PairFailed: Oracle._pair_event,
    PairReported: Oracle._pair_event,
}
_ON_EFFECT: dict[type, InvariantChecker] = {
    Enqueue: Oracle._enqueued,
    Resolve: Oracle._resolved,
    Commit: Oracle._committed,
    Quarantine: Oracle._quarantined,
    FreeBlocks: Oracle._freed,
    ReleaseBlocks: Oracle._released,
    SendLocal: Oracle._reported,
    PostWrite: Oracle._write_posted,
    PostRead: Oracle._read_posted,
    Flush: Oracle._flush_posted,
    Send: Oracle._sent,
}
