"""One engine of ours in the dialect `vllm-stock`: the endpoints of its scheduler and ranks, looked at in the rhythm of
vLLM's steps, so that both can be led through one schedule."""

from __future__ import annotations

from collections import deque
from typing import Any

from pdflow.layout.geometry import TransferGeometry
from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    FreeBlocks,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
)
from pdflow.protocol.events import HandshakeEnded, Received, TimeReached, TimerFired, WriteEnded
from pdflow.protocol.ids import EngineInfo, KvParams, engine_of, rank_address
from pdflow.protocol.messages import Register
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.values import Address, Instant
from tests.support.endpoints import Agreed

INCARNATIONS = {"P": 101, "D": 201}


class StockEngine:
    """What it wants done since it was last read: `sent`, `posted`, `handshakes`, `released`, `received`."""

    def __init__(
        self, info: EngineInfo, producer: bool, pulls: bool, geometry: TransferGeometry, dialect: Dialect
    ) -> None:
        self.engine = info.engine
        self.producer = producer
        ranks = range(info.shards.ranks)
        agreed = Agreed(dialect=dialect, pulls=pulls, geometry=geometry, pool_blocks=64)
        endpoints = (agreed.prefill if producer else agreed.decode)(info, INCARNATIONS[info.engine])
        self.scheduler = endpoints.pop(info.engine)
        self.ranks = list(endpoints.values())
        self.now: Instant = 0
        self.rank_events: list[list[Any]] = [[] for _ in ranks]
        """What the scheduler has told each rank since the last step."""
        self.mail: list[deque[list[Any]]] = [deque() for _ in ranks]
        self.inboxes: list[dict[Address, list[Received]]] = [{} for _ in ranks]
        """By sender, as `get_new_notifs` has them."""
        self.unread: list[list[Received]] = [[] for _ in ranks]
        """What the writer has put aside for the results."""
        self.ended: list[list[Any]] = [[] for _ in ranks]
        """Operations whose handle is final and has not been polled."""
        self.events: list[list[Any]] = [[] for _ in ranks]
        """What each rank has told the scheduler since its last report."""
        self.reports: list[deque[list[Any]]] = [deque() for _ in ranks]
        self.pulls = pulls
        self.shaken: list[list[HandshakeEnded]] = [[] for _ in ranks]
        """Pull: handshakes that have ended well, which the next step finds."""
        self.refuses = -1
        """The rank whose next WRITE is refused."""
        self.sent: list[tuple[Address, Send]] = []
        self.posted: list[tuple[Address, PostWrite | PostRead]] = []
        self.handshakes: list[tuple[Address, Address]] = []
        self.connecting: list[set[Address]] = [set() for _ in ranks]
        self.released: list[str] = []
        self.received: list[tuple[str, bool]] = []
        self.notes: list[str] = []
        self.strange: list[str] = []
        """Effects that vLLM has no counterpart of."""
        self.answers: dict[str, KvParams] = {}
        self.blocks: dict[int, str] = {}
        """D: which request each allocation is for."""

    # What the engine's core tells its scheduler.

    def feed_scheduler(self, event: Any) -> None:
        resolved = False
        for effect in self.scheduler.handle(event, self.now):
            if type(effect) is SendLocal:
                self.rank_events[int(effect.to.rpartition(".r")[2])].append(effect.event)
            elif type(effect) is AnswerPrefill:
                self.answers[effect.request_id] = effect.params
            elif type(effect) is ReleaseBlocks:
                self.released.append(effect.xid)
            elif type(effect) is Commit:
                self.received.append((effect.request_id, False))
            elif type(effect) is Resolve:
                resolved = True
            elif type(effect) is FreeBlocks:
                self.received.append((self.blocks[effect.allocation.generation], resolved))

    # Steps.

    def step(self, heartbeat: bool) -> None:
        if heartbeat:
            for timer in self.scheduler.armed():
                if timer.kind is TimerKind.SYNC:
                    self.feed_scheduler(TimerFired(timer))
        for rank, box in enumerate(self.mail):
            box.append(self.rank_events[rank])
            self.rank_events[rank] = []

    def work(self, rank: int) -> None:
        """Orders first; then registrations, as the writer reads them; then what the results are made of; then time."""
        shaken, self.shaken[rank] = self.shaken[rank], []
        for event in shaken:
            self.feed(rank, event)
        for event in self.mail[rank].popleft():
            self.feed(rank, event)
        self.write(rank)
        unread, self.unread[rank] = self.unread[rank], []
        for event in unread:
            self.feed(rank, event)
        ended, self.ended[rank] = self.ended[rank], []
        for event in ended:
            self.feed(rank, event)
        if self.producer:
            self.feed(rank, TimeReached())
        self.reports[rank].append(self.events[rank])
        self.events[rank] = []
        while all(self.reports):
            for reports in self.reports:
                for event in reports.popleft():
                    self.feed_scheduler(event)

    def write(self, rank: int) -> None:
        """A pass of the writer: registrations are read, the rest waits for the results."""
        arrived, self.inboxes[rank] = self.inboxes[rank], {}
        for events in arrived.values():
            for event in events:
                if type(event.message) is Register:
                    self.feed(rank, event)
                else:
                    self.unread[rank].append(event)

    def end_handshake(self, rank: int, other: str, ok: bool) -> None:
        """vLLM shakes hands with an engine, we with each of its ranks: all of them at once."""
        for peer in sorted(self.connecting[rank]):
            if engine_of(peer) == other:
                self.connecting[rank].discard(peer)
                event = HandshakeEnded(peer, ok, INCARNATIONS[other] if ok else 0)
                if ok and self.pulls:
                    self.shaken[rank].append(event)
                else:
                    self.feed(rank, event)
        self.write(rank)

    def feed(self, rank: int, event: Any) -> None:
        address = rank_address(self.engine, rank)
        for effect in self.ranks[rank].handle(event, self.now):
            kind = type(effect)
            if kind is SendLocal:
                self.events[rank].append(effect.event)
            elif kind is Send:
                self.sent.append((address, effect))
            elif kind is Handshake:
                self.handshakes.append((address, effect.peer))
                self.connecting[rank].add(effect.peer)
            elif kind is Note:
                self.notes.append(effect.name)
            elif kind is PostWrite or kind is PostRead:
                self.posted.append((address, effect))
                if self.refuses == rank:
                    self.refuses = -1
                    self.feed(rank, WriteEnded(effect.op, False))
            else:
                self.strange.append(kind.__name__)
