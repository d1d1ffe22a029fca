"""Worlds with a P rank of two threads, as in vLLM: the engine's thread ends leases and forgets peers, the writer's
thread matches and posts, and drains its notifications as one batch.

In pdflow a P rank is one endpoint: it ends a lease, or matches, checks and posts, in one turn, and takes one frame at a
time. Here a turn is cut in two where vLLM's threads cut it, for `vllm-stock`; the endpoint is the writer. Between the
two halves the other thread may act at any moment, as any timer may fire. One rank on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec

from pdflow.protocol.ids import Reg, base_id
from pdflow.protocol.messages import Register
from pdflow.protocol.producer.matching import Matching
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.strict import LENGTH_BYTES, VERSION, decode_frame
from pdflow.protocol.wire.vllm import PUSH_REG, decode_notification
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.moves.compose import plain
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.shadow_state import Broken, PromptStage
from pdflow_sim.check.state.space import Draft, State, StateSpace

WRITER = "P.r0"
FOREIGN_ID = "u0-ffffffff"
"""A request id that no request of the world has, under the base id of the first prompt."""


class SplitLease:
    """Ends P's leases in two moves (R03): the engine's thread ends the lease and releases the blocks; the writer learns
    that later, from its inbox."""

    def __init__(self, base: Components) -> None:
        self.space = base.space
        self.plain = base.acts["timer"]

    def acts(self) -> Acts:
        return {"timer": self.fire}

    def fire(self, draft: Draft, move: Move) -> None:
        space = self.space
        timer = space.armed[draft[move[1]]][move[2]]
        if timer.kind is not TimerKind.LEASE:
            self.plain(draft, move)
            return
        product = space.cluster.xids.index(str(timer.key))
        if space.shadow_of(draft).products[product] == PromptStage.HELD:
            space.put_shadow(draft, "products", product, PromptStage.RELEASED)
            return
        # The writer lets go of what is gone already: not a second release.
        space.put_shadow(draft, "products", product, PromptStage.HELD)
        self.plain(draft, move)
        space.put_shadow(draft, "products", product, PromptStage.RELEASED)


class RaisingWriter:
    """A writer of P's that may raise, once: its loop logs that and goes on, without the batch that it had drained. Adds
    a slot: how often the event that makes it raise is still to come; and with `checks` another: whether it has checked
    and not yet posted."""

    def __init__(self, space: StateSpace, checks: bool = False) -> None:
        self.space = space
        self.slots = 1 + checks
        self.to_come = space.claim((1, 0)[: self.slots], self._by_value)
        self.checked = self.to_come + 1
        space.with_faults_over(self.to_come, 0)
        self.inbox = space.cluster.link_of["D.r0", WRITER]

    def _by_value(self, state: State) -> dict[str, Any]:
        return {"clocks": state[self.to_come : self.to_come + self.slots]}

    def raises(self, draft: Draft, request_id: str) -> None:
        """Raise in the writer at this registration: its match takes the prompt for good, and its WRITE is never posted;
        the rest of the batch is lost."""
        space = self.space
        draft[space.first_link + self.inbox] = 0
        body = space.body(draft, WRITER).fork()
        for xid in body.store.matching.product_bases.get(base_id(request_id), ())[:1]:
            body.store.matching.spend(xid, body.cells[xid].request_id)
        draft[space.cluster.at[WRITER]] = space.endpoint(WRITER, body)


class Poison:
    """A registration by an unknown peer, which has an id and no other field (R34). vLLM reads the other fields after it
    has matched the id: if there is a prompt, its writer raises. pdflow's dialects read the same bytes by their own
    decoders."""

    def __init__(self, base: Components) -> None:
        self.space = base.space
        self.writer = RaisingWriter(base.space)

    def acts(self) -> Acts:
        return {"poison": self.poison}

    def moves(self, state: State) -> Iterator[Move]:
        """Yield the move that drains the registration, if D's frames wait and it would match. It is drained before
        them: agents' notifications are drained in the agents' order."""
        space, writer = self.space, self.writer
        waits = state[writer.to_come] and state[space.first_link + writer.inbox]
        if waits and space.shadow_of(state).products[0] == PromptStage.HELD and self._matches(state):
            yield ("poison", 0)

    def _matches(self, state: State) -> bool:
        """True if vLLM would find a prompt for it; always in dialects whose decoder rejects it before it is matched."""
        ours = self.space.scope.dialect.registrations_end
        return ours or base_id(FOREIGN_ID) in self.space.body(state, WRITER).store.matching.product_bases

    def poison(self, draft: Draft, move: Move) -> None:
        dialect = self.space.scope.dialect
        draft[self.writer.to_come] = 0
        if dialect.registrations_end:
            read_as_nothing(*(STRICT_POISON if dialect.control_frames else VLLM_POISON))
        else:
            self.writer.raises(draft, FOREIGN_ID)

    def lost_by(self, state: State, move: Move) -> list[int]:
        """Return the link whose frames are lost: the batch that was drained with it."""
        return [] if self.space.scope.dialect.registrations_end else [self.writer.inbox]


class Eviction:
    """Eviction of D's connection for its age by P's engine thread (R47), as when another engine connects; D has been
    idle for as long as that takes. The writer checks that D is connected, and looks its descriptors up when it posts:
    the eviction may come between the two."""

    def __init__(self, base: Components) -> None:
        self.space = base.space
        self.frames = base.frames
        self.writer = RaisingWriter(base.space, checks=True)
        self.checked = self.writer.checked

    def acts(self) -> Acts:
        return {"check": self.check, "evict": self.evict, "deliver": self.deliver}

    def moves(self, state: State) -> Iterator[Move]:
        space = self.space
        body = space.body(state, WRITER)
        if "D.r0" in body.peers.connected:
            if not state[self.checked] and self._would_post(state, body.store.matching):
                yield ("check", self.writer.inbox)
            if state[self.writer.to_come] and not space.ops_of(state):
                yield ("evict", space.cluster.link_of[WRITER, "D.r0"])

    def _would_post(self, state: State, matching: Matching) -> bool:
        """True if the next frame is a registration whose prompt is there."""
        space = self.space
        waiting = space.chans.values[state[space.first_link + self.writer.inbox]]
        frame = space.frames.values[waiting[0]] if waiting else None
        return isinstance(frame, Register) and matching.product_of(frame) is not None

    def check(self, draft: Draft, move: Move) -> None:
        draft[self.checked] = 1

    def deliver(self, draft: Draft, move: Move) -> None:
        if move[1] == self.writer.inbox:
            draft[self.checked] = 0
        self.frames.deliver(draft, move)

    def evict(self, draft: Draft, move: Move) -> None:
        space, inbox = self.space, self.writer.inbox
        draft[self.writer.to_come] = 0
        if draft[self.checked]:
            draft[self.checked] = 0
            frame = space.frames.values[space.chans.values[draft[space.first_link + inbox]][0]]
            self.writer.raises(draft, frame.reg.request_id)
        body = space.body(draft, WRITER).fork()
        body.peers.lost("D.r0")
        draft[space.cluster.at[WRITER]] = space.endpoint(WRITER, body)

    def lost_by(self, state: State, move: Move) -> list[int]:
        """Return the link whose frames are lost: the drained batch, if the writer has checked and not yet posted."""
        return [self.writer.inbox] if state[self.checked] else []


def _framed(body: bytes) -> bytes:
    return (1 + len(body)).to_bytes(LENGTH_BYTES, "big") + bytes((VERSION,)) + body


Decoder = Callable[[bytes], object]
VLLM_POISON: tuple[Decoder, bytes] = (
    decode_notification,
    PUSH_REG + msgspec.msgpack.encode({"request_id": FOREIGN_ID}),
)
STRICT_POISON: tuple[Decoder, bytes] = (
    decode_frame,
    _framed(msgspec.msgpack.encode({"type": Register.__struct_config__.tag, "reg": Reg("X", 1, 1, FOREIGN_ID)})),
)


def read_as_nothing(decode: Decoder, poison: bytes) -> None:
    """Check that a decoder reads these bytes as Malformed, which reaches no endpoint, and does not raise (S9)."""
    try:
        read = decode(poison)
    except Exception as error:
        raise Broken("S9", f"a registration without its fields raises {error!r}") from error
    if not isinstance(read, Malformed):
        raise Broken("S9", f"a registration without its fields is read as {read}")


def stands_between(space: StateSpace, state: State) -> bool:
    """True if the writer has checked that D is connected and not yet posted, in the world of Eviction."""
    return bool(state[space.budget + 2])


def two_owners(scope: Scope) -> Relation:
    base = plain(scope)
    return Relation(attrs.evolve(base, acts=base.acts | SplitLease(base).acts()))


def poisoned(scope: Scope) -> Relation:
    base = plain(scope)
    poison = Poison(base)
    lost_by = base.lost_by | {"poison": poison.lost_by}
    return Relation(attrs.evolve(base, acts=base.acts | poison.acts(), further=(poison.moves,), lost_by=lost_by))


def evicting(scope: Scope) -> Relation:
    base = plain(scope)
    eviction = Eviction(base)
    lost_by = base.lost_by | {"evict": eviction.lost_by}
    return Relation(attrs.evolve(base, acts=base.acts | eviction.acts(), further=(eviction.moves,), lost_by=lost_by))


VARIANTS: dict[str, Callable[[Scope], Relation]] = {
    "TwoOwners": two_owners,
    "Poisoned": poisoned,
    "Evicting": evicting,
}
"""The variants, by their names in counterexample files (`own_world`)."""
