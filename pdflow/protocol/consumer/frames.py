"""The handling of peers' frames at one D rank: what the rank reports to its scheduler for each.

There is no table of registrations: the scheduler made the cell before any rank could send its REG, so a completion can
never be early here (R26), and it names its shard by its sender, never by a count (R14). `vllm-stock` does keep one, of
how many completions each request still waits for here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, TypeAlias, TypeVar, cast

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import Effect, Effects, Note, SendLocal
from pdflow.protocol.events import PairFailed, PairLanded, PairMissing, PairReported, PeerResponded
from pdflow.protocol.ids import EngineInfo, Op, Reg, rank_of
from pdflow.protocol.messages import (
    CancelAck,
    Code,
    Completion,
    Done,
    Fail,
    Message,
    Progress,
    Register,
    RegisterAck,
    Sync,
    SyncReply,
)
from pdflow.protocol.values import Address, EngineId, RequestId, in_order

ConsumerFrame: TypeAlias = Done | Completion | RegisterAck | Fail | CancelAck | SyncReply
"""The frames that a D rank accepts from its peers. Any other frame is noted, and changes nothing."""


class ConsumerFrames:
    """Translates peers' frames into reports to D's scheduler, with the state of what this rank has sent them."""

    __slots__ = ("awaited", "counts", "dialect", "engine", "incarnation", "info", "rank", "scheduler", "synced")

    def __init__(self, info: EngineInfo, rank: int, incarnation: int, dialect: Dialect) -> None:
        self.info = info
        self.engine: EngineId = info.engine
        self.scheduler: Address = info.engine
        self.rank = rank
        self.incarnation = incarnation
        self.dialect = dialect
        self.synced: dict[Address, Sync] = {}
        """The last SYNC that each peer has not answered."""
        self.counts = not (dialect.counts_senders and dialect.keeps_early)
        self.awaited: dict[RequestId, tuple[Address, ...]] = {}
        """vllm-stock: the writers of every request registered from here whose completion has not been counted."""

    def fork(self) -> ConsumerFrames:
        other = ConsumerFrames(self.info, self.rank, self.incarnation, self.dialect)
        other.synced = self.synced.copy()
        other.awaited = self.awaited.copy()
        return other

    def fingerprint(self) -> tuple[Hashable, Hashable]:
        """The hashable state: SYNCs without an answer, and the completions that are awaited."""
        return (in_order(self.synced.items()), in_order(self.awaited.items()))

    # What is sent.

    def registered(self, message: Register, writers: tuple[Address, ...]) -> None:
        """Record that a registration is sent to these writers, so that their completions are counted (`counts`)."""
        self.awaited[message.reg.request_id] = writers

    def unregistered(self, message: Register) -> None:
        """Stop counting for a registration that did not reach one of its writers."""
        self.awaited.pop(message.reg.request_id, None)

    def sync_sent(self, peer: Address, message: Sync) -> None:
        """Remember a SYNC until its answer: registrations that the answer leaves out are missing at the peer."""
        self.synced[peer] = message

    def connection_lost(self, peer: Address) -> None:
        """Forget the SYNC sent over a lost connection: no answer to it will come."""
        self.synced.pop(peer, None)

    # What has come.

    def _mine(self, reg: Reg) -> bool:
        """Whether a registration is of this engine and incarnation; a frame for any other changes nothing (S8)."""
        return reg.engine == self.engine and reg.incarnation in (self.incarnation, 0)

    def _done(self, sender: Address, message: Done) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: DONE of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (SendLocal(self.scheduler, PairLanded(op, sender, message)),)

    def _completed(self, sender: Address, message: Completion) -> Effects:
        if self.counts:
            writer = self._counted(sender, message.request_id)
            if writer is None:
                return (Note("consumer: completion of an unknown request"),)
            sender = writer
        reg = Reg(self.engine, 0, 0, message.request_id)
        return (SendLocal(self.scheduler, PairLanded(Op(reg, rank_of(sender), self.rank), sender)),)

    def _counted(self, sender: Address, request_id: RequestId) -> Address | None:
        """Return the writer that this completion is counted for: where senders are not distinguished, the next one
        awaited, whichever rank sent it (R14). None if this rank has not registered the request, or not yet (R26)."""
        awaited = self.awaited.get(request_id)
        if awaited is None:
            return sender if self.dialect.keeps_early else None
        writer = sender if self.dialect.counts_senders else awaited[0]
        rest = tuple([w for w in awaited if w != writer])
        if rest:
            self.awaited[request_id] = rest
        else:
            del self.awaited[request_id]
        return writer

    def _acknowledged(self, sender: Address, message: RegisterAck) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: REG_ACK of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        if message.targets and self.rank not in message.targets:
            return (SendLocal(self.scheduler, PairFailed(op, sender, Code.LAYOUT, False)),)
        return (SendLocal(self.scheduler, PairReported(op, sender, message.progress)),)

    def _failed(self, sender: Address, message: Fail) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: FAIL of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (SendLocal(self.scheduler, PairFailed(op, sender, message.code, message.flushed)),)

    def _cancel_answered(self, sender: Address, message: CancelAck) -> Effects:
        if not self._mine(message.reg):
            return (Note("consumer: CANCEL_ACK of another incarnation"),)
        op = Op(message.reg, rank_of(sender), self.rank)
        return (SendLocal(self.scheduler, PairFailed(op, sender, Code.CANCELLED, message.flushed)),)

    def _sync_answered(self, sender: Address, message: SyncReply) -> Effects:
        effects: list[Effect] = [SendLocal(self.scheduler, PeerResponded(sender))]
        p_rank = rank_of(sender)
        answered = set()
        for item in message.items:
            if not self._mine(item.reg):
                continue
            answered.add(item.reg)
            op = Op(item.reg, p_rank, self.rank)
            if item.progress is not Progress.UNKNOWN:
                effects.append(SendLocal(self.scheduler, PairReported(op, sender, item.progress, True)))
            elif item.code is not Code.NONE:
                effects.append(SendLocal(self.scheduler, PairFailed(op, sender, item.code, item.flushed)))
        asked = self.synced.get(sender)
        if asked is not None and asked.seq == message.seq:
            del self.synced[sender]
            for reg in asked.open:
                if reg not in answered:
                    effects.append(SendLocal(self.scheduler, PairMissing(Op(reg, p_rank, self.rank))))
        return tuple(effects)


FrameHandler: TypeAlias = Callable[[ConsumerFrames, Address, Message], Effects]
"""A handler as the table stores it: it is called only with frames of its row."""
F = TypeVar("F", bound=ConsumerFrame)


def _on_frame(kind: type[F], handler: Callable[[ConsumerFrames, Address, F], Effects]) -> tuple[type, FrameHandler]:
    """A row of the table. That the handler takes this kind of frame is checked by its types."""
    return kind, cast(FrameHandler, handler)


ON_FRAME: Final[dict[type, FrameHandler]] = dict(
    (
        _on_frame(Done, ConsumerFrames._done),
        _on_frame(Completion, ConsumerFrames._completed),
        _on_frame(RegisterAck, ConsumerFrames._acknowledged),
        _on_frame(Fail, ConsumerFrames._failed),
        _on_frame(CancelAck, ConsumerFrames._cancel_answered),
        _on_frame(SyncReply, ConsumerFrames._sync_answered),
    )
)
"""The handler of each kind of frame; tests/protocol/test_consumer_cells.py holds it against ConsumerFrame."""
