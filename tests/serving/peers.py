"""What peers and transports may say to a node next, and the events that say it.

Peers know what both nodes have sent so far. They answer it, or say the same again, or too late: what endpoints make of
nonsense is tested elsewhere, and both sides have the same endpoints.
"""

from __future__ import annotations

from typing import Any, Final

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import (
    FenceEnded,
    HandshakeEnded,
    PeerExited,
    PeerLost,
    ReadEnded,
    Received,
    WordRead,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.ids import Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Disposition,
    Done,
    Fail,
    Progress,
    Register,
    RegisterAck,
    Release,
    Sync,
    SyncReply,
    Taken,
)
from pdflow.protocol.values import Allocation
from tests.serving.script import Call, Event, Peer
from tests.serving.setting import (
    BLOCK,
    PEER_INCARNATION,
    REQUESTS,
    WEIGHTS,
    Ends,
    Setting,
    digest,
    request_id_of,
    word_of,
    xid_of,
)

NOBODY: Final = -1


class Peers:
    """The engine at the other end: rank n of it speaks to rank n of the node."""

    def __init__(self, setting: Setting, ends: Ends) -> None:
        self.setting = setting
        self.ends = ends
        self.geometry = setting.wiring().geometry
        self.incarnation = PEER_INCARNATION
        self.asked: list[int] = []
        """Ranks of the node that want a handshake."""
        self.connected: set[int] = set()
        """Ranks that had one that went well."""
        self.registrations: dict[tuple[int, int], Register] = {}
        """By request and rank: what the node has registered."""
        self.cancels: dict[tuple[int, int], Cancel] = {}
        self.syncs: dict[int, Sync] = {}
        self.fences: list[int] = []
        self.open: dict[tuple[int, int], PostWrite | PostRead] = {}
        """By request and rank: operations under way."""
        self.stopping: set[Op] = set()
        self.word_reads: dict[tuple[int, int], Op] = {}
        self.registered: set[tuple[int, int]] = set()
        """By request and rank: what the peer has registered, where it is D."""

    @property
    def requested(self) -> range:
        return range(len(REQUESTS) - 1)

    def me(self, rank: int) -> str:
        return rank_address(self.ends.me, rank)

    def peer(self, rank: int) -> str:
        return rank_address(self.ends.peer, rank)

    def on_calls(self, calls: list[Call]) -> None:
        """What a node has done in a step."""
        for call in calls:
            rank = rank_of(call.subject)
            if call.kind == "stop":
                self.stopping.add(call.details[0])
            if engine_of(call.subject) != self.ends.me:
                continue
            match call.kind:
                case "handshake":
                    self.asked.append(rank)
                case "fence":
                    self.fences.append(rank)
                case "send":
                    self._sent(rank, call.details[1])
                case "write" | "read":
                    effect = call.details[0]
                    self.open[number_of(effect.op.reg.request_id), rank] = effect
                case "read word":
                    op = call.details[0]
                    self.word_reads[number_of(op.reg.request_id), rank] = op

    def _sent(self, rank: int, message: Any) -> None:
        match message:
            case Register(reg=reg):
                self.registrations[number_of(reg.request_id), rank] = message
            case Cancel(reg=reg):
                self.cancels[number_of(reg.request_id), rank] = message
            case Sync():
                self.syncs[rank] = message

    # What may be said.

    def possible(self) -> list[Peer]:
        return [step._replace(side=self.ends.side) for step in self._possible()]

    def _possible(self) -> list[Peer]:
        found = [Peer(what, NOBODY, rank) for rank in self.asked for what in ("connected", "unreachable", "refused")]
        found += [Peer("fenced", NOBODY, rank) for rank in self.fences]
        found += [Peer("lost", NOBODY, rank) for rank in sorted(self.connected)]
        for r, rank in self.open:
            effect = self.open[r, rank]
            found += [Peer("ended", r, rank), Peer("broken", r, rank)]
            if effect.op in self.stopping:
                found.append(Peer("stopped", r, rank))
        found += [Peer(what, r, rank) for r, rank in self.word_reads for what in ("word", "word gone")]
        return found + (self._of_producer() if self.ends.produces else self._of_consumer())

    def _of_producer(self) -> list[Peer]:
        found = [
            Peer(what, r, rank)
            for r, rank in self.registrations
            if rank in self.connected
            for what in ("accepted", "done", "failed", "failed unflushed")
        ]
        found += [Peer("cancelled", r, rank) for r, rank in self.cancels if rank in self.connected]
        found += [Peer("sync answered", NOBODY, rank) for rank in self.syncs if rank in self.connected]
        return found + [Peer("exited", NOBODY, rank) for rank in sorted(self.connected)]

    def _of_consumer(self) -> list[Peer]:
        ranks = range(self.setting.ranks)
        whats = ("taken", "release") if self.ends.pulls else ("register", "cancel", "release")
        found = [Peer(what, r, rank) for r in self.requested for rank in ranks for what in whats]
        return found + [Peer("exited", NOBODY, rank) for rank in sorted(self.connected)]

    # What is said.

    def event(self, step: Peer) -> Event | None:
        """The event that it is; None if there is nothing of which it could be said."""
        what, r, rank, _ = step
        me, peer = self.me(rank), self.peer(rank)
        event: Any = None
        match what:
            case "connected" | "unreachable" | "refused" if rank in self.asked:
                self.asked.remove(rank)
                ok = what == "connected"
                if ok:
                    self.connected.add(rank)
                event = HandshakeEnded(peer, ok, self.incarnation if ok else 0, what == "refused")
            case "fenced" if rank in self.fences:
                self.fences.remove(rank)
                self.connected.discard(rank)
                event = FenceEnded(peer)
            case "lost" | "exited" if rank in self.connected:
                self.connected.discard(rank)
                event = PeerLost(peer) if what == "lost" else PeerExited(peer)
            case "ended" | "broken" if (r, rank) in self.open:
                effect = self.open.pop((r, rank))
                ended = WriteEnded if isinstance(effect, PostWrite) else ReadEnded
                event = ended(effect.op, what == "ended")
            case "stopped" if (r, rank) in self.open:
                event = WriteStopped(self.open.pop((r, rank)).op)
            case "word" | "word gone" if (r, rank) in self.word_reads:
                event = WordRead(self.word_reads.pop((r, rank)), word_of(r, rank) if what == "word" else None)
            case _:
                build_message = self._producer if self.ends.produces else self._consumer
                message = build_message(what, r, rank)
                event = None if message is None else Received(peer, self.incarnation, message)
        return None if event is None else Event(me, event)

    def _producer(self, what: str, r: int, rank: int) -> Any:
        """What a P rank sends to D's."""
        if what == "cancelled" and (r, rank) in self.cancels:
            return CancelAck(self.cancels[r, rank].reg, rank, Disposition.NOT_STARTED, True)
        if what == "sync answered" and rank in self.syncs:
            return SyncReply(self.syncs[rank].seq, ())
        registration = self.registrations.get((r, rank))
        if registration is None:
            return None
        shards = self.setting.shards
        nbytes = self.geometry.nbytes(rank, rank, shards, shards, registration.num_tokens)
        return {
            "accepted": RegisterAck(registration.reg, rank, Progress.IN_FLIGHT, (rank,)),
            "done": Done(registration.reg, rank, registration.target.generation, nbytes, WEIGHTS),
            "failed": Fail(registration.reg, rank, Code.IO, True),
            "failed unflushed": Fail(registration.reg, rank, Code.IO, False),
        }.get(what)

    def _consumer(self, what: str, r: int, rank: int) -> Any:
        """What a D rank sends to P's."""
        reg = Reg(self.ends.peer, self.incarnation, r + 1, request_id_of(r))
        tokens = REQUESTS[r].prompt
        if what == "register":
            self.registered.add((r, rank))
        blocks = tuple(range(10 * r, 10 * r + -(-tokens // BLOCK)))
        target = Allocation(50 + r, blocks)
        return {
            "register": Register(
                reg, xid_of(r), rank, self.setting.shards, target, 0, tokens, digest(r), WEIGHTS, 1, request_id_of(r)
            ),
            "cancel": Cancel(reg, 1),
            "release": Release(xid_of(r)),
            "taken": Taken(xid_of(r), rank, 1),
        }.get(what)


def number_of(request_id: str) -> int:
    return int(request_id[1 : request_id.index(".")])
