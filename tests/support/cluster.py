"""A tiny cluster for tests: real endpoints, a clock that is moved by hand, an oracle that watches all of it.

What lies between engines waits until a test carries it out (`network`). A test reads as a sequence diagram:

    c.holding = {"WRITE"}; c.run(); c.pass_time(31 * S); c.holding = set(); c.run()
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    FreeBlocks,
    Note,
    PostRead,
    PostWrite,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    Send,
    SendLocal,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillAborted,
    PrefillFinished,
    PrefillQueued,
    TimeReached,
)
from pdflow.protocol.ids import EngineInfo, KvParams, engine_of, rank_address
from pdflow.protocol.invariants.accounting import miscounted
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.invariants.timers import too_late, unscheduled
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from tests.support.endpoints import Agreed, engine_info
from tests.support.network import Item, Network


class Cluster(Network):
    """P engines and D engines by name; requests by name; everything else follows from effects.

    Args: `watched`: the oracle sees every event; `agreed`: other fields of Agreed.
    """

    def __init__(
        self,
        p: tuple[EngineInfo, ...] = (engine_info("P"),),
        d: tuple[EngineInfo, ...] = (engine_info("D"),),
        dialect: Dialect = STRICT,
        pulls: bool = False,
        watched: bool = True,
        **agreed: Any,
    ) -> None:
        super().__init__()
        self.agreed = Agreed(dialect=dialect, pulls=pulls, **agreed)
        self.oracle = Oracle(self.agreed.geometry, self.agreed.done_is_remote) if watched else None
        self.infos = {info.engine: info for info in (*p, *d)}
        self.endpoints: dict[str, Any] = {}
        self.now = 0
        self.lagging: set[str] = set()
        """Endpoints that are told things late: an "order" to them waits in `pending` like all else."""
        self.log: list[tuple[str, Any]] = []
        """Every effect, with the node that wanted it."""
        self.outcomes: dict[str, list[str]] = defaultdict(list)
        self.freed: list[Allocation] = []
        self.quarantined: list[Allocation] = []
        self.released: list[tuple[str, str]] = []
        """(xid, code) at P."""
        self.answers: dict[str, KvParams] = {}
        self.enqueued: list[str] = []
        self.notes: list[str] = []
        self.generation = 0
        self.sources: dict[str, PrefillFinished] = {}
        for info in p:
            self.start_prefill(info.engine, 101)
        for info in d:
            self.start_decode(info.engine, 201)

    def start_prefill(self, engine: str, incarnation: int) -> None:
        self.incarnations[engine] = incarnation
        self.endpoints.update(self.agreed.prefill(self.infos[engine], incarnation))

    def start_decode(self, engine: str, incarnation: int) -> None:
        self.incarnations[engine] = incarnation
        self.endpoints.update(self.agreed.decode(self.infos[engine], incarnation))

    def crash(self, engine: str) -> None:
        """All of an engine's processes die; what they had on the wire is lost, what they were owed too."""
        if self.oracle is not None:
            self.oracle.lost(engine)
        self.pending = [i for i in self.pending if engine not in (engine_of(i.node), engine_of(i.peer))]

    # What engines and clients do.

    def prefill(self, xid: str, engine: str = "P", request_id: str | None = None) -> None:
        self.feed(engine, PrefillQueued(xid, request_id or self.prefill_id(xid)))

    def prefill_id(self, xid: str) -> str:
        """P's internal id of a prompt, unless a test says otherwise."""
        return f"p-{xid}"

    def allocate(self, num_blocks: int) -> Allocation:
        self.generation += 1
        return Allocation(self.generation, tuple(range(self.generation * 1000, self.generation * 1000 + num_blocks)))

    def finish(self, xid: str, engine: str = "P", num_tokens: int = 64, digest: int = 7, weights: int = 1) -> None:
        size = self.infos[engine].shards.block_size
        event = PrefillFinished(xid, self.allocate(-(-num_tokens // size)), num_tokens, digest, weights)
        self.sources[xid] = event
        self.feed(engine, event)

    def abort_prefill(self, xid: str, engine: str = "P") -> None:
        self.feed(engine, PrefillAborted(xid, Code.PREFILL_ABORTED))

    def params(self, xid: str, engine: str = "P", num_tokens: int = 64) -> KvParams:
        """What the router tells D: P's answer where there is one, else what it can know before."""
        for params in self.answers.values():
            if params.xid == xid:
                return params
        return KvParams(self.infos[engine], xid, self.prefill_id(xid), num_tokens)

    def decode(
        self, request_id: str, xid: str, engine: str = "D", prefill: str = "P", deadline_ns: int = 0, blocks: int = 4
    ) -> None:
        self.feed(engine, DecodeQueued(request_id, self.params(xid, prefill), blocks, deadline_ns))

    def admit(
        self,
        request_id: str,
        engine: str = "D",
        token_start: int = 0,
        num_tokens: int = 64,
        digest: int = 7,
        weights: int = 1,
    ) -> Allocation:
        size = self.infos[engine].shards.block_size
        allocation = self.allocate(-(-num_tokens // size))
        self.feed(engine, DecodeAdmitted(request_id, allocation, token_start, num_tokens, digest, weights))
        return allocation

    def hit(self, request_id: str, engine: str = "D") -> None:
        self.feed(engine, DecodeHit(request_id))

    def abort(self, request_id: str, engine: str = "D") -> None:
        self.feed(engine, DecodeAborted(request_id, Code.CANCELLED))

    def prefill_and_admit(self, request_id: str, xid: str, **kw: Any) -> None:
        """Prefill, then decode, up to the admission."""
        self.prefill(xid)
        self.finish(xid)
        self.decode(request_id, xid, **kw)
        self.admit(request_id, **{k: v for k, v in kw.items() if k == "engine"})

    # What the world does.

    def feed(self, node: str, event: Any) -> list[Any]:
        """Hand over one event and everything that endpoints of one engine tell each other because of it. All effects
        of that."""
        queue, out = [(node, event)], []
        while queue:
            at, pending = queue.pop(0)
            effects = self.endpoints[at].handle(pending, self.now)
            self.observe(at, pending, effects)
            for effect in effects:
                out.append(effect)
                self.log.append((at, effect))
                if type(effect) is SendLocal and effect.to in self.lagging:
                    self.pending.append(Item("order", at, effect.to, effect.event))
                elif type(effect) is SendLocal:
                    queue.append((effect.to, effect.event))
                elif not self.begin(at, effect):
                    self.do(at, effect)
        return out

    def observe(self, node: str, event: Any, effects: tuple[Any, ...]) -> None:
        if self.oracle is not None:
            self.oracle.observe(node, event, effects, self.now)
            endpoint = self.endpoints[node]
            wrong = unscheduled(endpoint) or miscounted(endpoint) or too_late(endpoint, self.now)
            assert not wrong, f"after {event!r}, at {node}, {wrong}"

    def do(self, node: str, effect: Any) -> None:
        """What an effect does within its engine."""
        kind = type(effect)
        if kind is AnswerPrefill:
            self.answers[effect.request_id] = effect.params
            for rank, lease_word in enumerate(effect.params.rank_words):
                self.word_values[rank_address(node, rank), lease_word.index] = lease_word.value
        elif kind is ReleaseBlocks:
            self.released.append((effect.xid, effect.code.name))
        elif kind is Enqueue:
            self.enqueued.append(effect.request_id)
        elif kind is Commit:
            self.outcomes[effect.request_id].append("COMMITTED")
        elif kind is Resolve:
            self.outcomes[effect.request_id].append(effect.code.name)
        elif kind is Quarantine:
            self.quarantined.append(effect.allocation)
        elif kind is FreeBlocks:
            self.freed.append(effect.allocation)
        elif kind is Note:
            self.notes.append(effect.name)

    def pass_time(self, ns: int, step: bool = True) -> None:
        """Move the clock, stopping at every deadline on the way and running whatever it starts."""
        until = self.now + ns
        while True:
            self.run()
            due = [at for e in self.endpoints.values() if (at := e.wake_at()) is not None]
            first = min(due, default=until + 1)
            if first > until:
                break
            self.now = max(self.now, first)
            for node, endpoint in list(self.endpoints.items()):
                at = endpoint.wake_at()
                if at is not None and at <= self.now:
                    self.feed(node, TimeReached())
        self.now = until

    def frames(self, kind: type) -> list[Any]:
        """Every message of a class that was ever sent, notices included."""
        sent = [e.message for _, e in self.log if type(e) is Send and type(e.message) is kind]
        notifications = [
            e.notification for _, e in self.log if type(e) in (PostWrite, PostRead) and type(e.notification) is kind
        ]
        return sent + notifications

    def count(self, kind: type, node: str | None = None) -> int:
        """How many effects of a class there were, at one node or at all."""
        return sum(type(effect) is kind and node in (None, at) for at, effect in self.log)

    def wrote(self) -> list[PostWrite]:
        return [e for _, e in self.log if type(e) is PostWrite]

    def at_rest(self) -> None:
        """Long enough for every lease and quarantine to end; then nothing may be left."""
        self.holding = set()
        self.pass_time(700 * 1_000_000_000)
        if self.oracle is not None:
            self.oracle.finish(self.now)
        assert not self.pending
        for node, endpoint in self.endpoints.items():
            left = leftovers(endpoint)
            assert not left, (node, left, endpoint.unfinished())
