"""A P rank as vLLM has it: the engine's thread ends leases and forgets peers, the writer's matches and posts, and what
the writer has drained is one batch of its own.

In pdflow a P rank is one endpoint: it ends a lease, or matches, checks and posts, in one turn, and takes one frame at a
time. Here a turn is cut in two where vLLM's threads cut it, for `vllm-stock`; the endpoint is the writer. Between the
two halves the other thread may do what it does at any moment, as any timer may fire. One rank on each side.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdflow.protocol.ids import Reg, base_id
from pdflow.protocol.matching import Matching
from pdflow.protocol.messages import Register
from pdflow.protocol.timers import TimerKind
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.strict import LENGTH_BYTES, VERSION, decode_frame
from pdflow.protocol.wire.vllm import PUSH_REG, decode_notification
from sim.check.ghost import Broken, Product
from sim.check.relation import Move, Relation
from sim.check.scope import Scope
from sim.check.world import Draft, State

WRITER = "P.r0"
STRANGER = "u0-ffffffff"
"""A request id of nobody here, under the base id of the first prompt."""


class TwoOwners(Relation):
    """A Relation in which P's leases end in two moves (R03): the engine's thread ends the lease, and the blocks are
    gone; then the writer finds that in its inbox, and only then does it know."""

    def timer(self, draft: Draft, node: int, i: int) -> None:
        timer = self.armed[draft[node]][i]
        if timer.kind is not TimerKind.LEASE:
            super().timer(draft, node, i)
            return
        product = self.cluster.xids.index(str(timer.key))
        if self.ghost_of(draft).products[product] == Product.HELD:
            self.put_ghost(draft, "products", product, Product.RELEASED)
            return
        # The writer lets go of what is gone already: not a second release.
        self.put_ghost(draft, "products", product, Product.HELD)
        super().timer(draft, node, i)
        self.put_ghost(draft, "products", product, Product.RELEASED)


class Raising(Relation):
    """A Relation whose writer may raise, once: its loop logs that and goes on, without what it had drained. One more
    slot: how often what makes it raise is still to come."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.to_come = self.budget + 1
        self.inbox = self.cluster.link_of["D.r0", WRITER]

    def beginning(self) -> State:
        return (*super().beginning(), 1)

    def spent(self, state: State) -> State:
        return self.put(super().spent(state), self.to_come, 0)

    def lost_by(self, state: State, move: Move) -> list[int]:
        """The links whose frames were in the batch that this move loses."""
        return []

    def raises(self, draft: Draft, request_id: str) -> None:
        """A match takes the prompt for good, and its WRITE is never posted; the rest of the batch is gone."""
        draft[self.first_link + self.inbox] = 0
        body = self.body(draft, WRITER).fork()
        for xid in body.store.matching.product_bases.get(base_id(request_id), ())[:1]:
            body.store.matching.spend(xid, body.cells[xid].request_id)
        draft[self.cluster.at[WRITER]] = self.endpoint(WRITER, body)


class Poisoned(Raising):
    """A stranger's registration has an id and nothing else (R34). vLLM looks for the other fields when the id has been
    matched: with a prompt that is there, the writer raises. Ours read the same bytes by their own decoders."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.do["poison"] = self.poison

    def moves(self, state: State) -> list[Move]:
        """It is drained before whatever has come from D: agents' notifications are drained in the agents' order."""
        found = super().moves(state)
        waits = state[self.to_come] and state[self.first_link + self.inbox]
        if waits and self.ghost_of(state).products[0] == Product.HELD and self._matches(state):
            found.append(("poison", 0))
        return found

    def _matches(self, state: State) -> bool:
        """Whether vLLM would find a prompt for it, which ours do not look for."""
        ours = self.scope.dialect.registrations_end
        return ours or base_id(STRANGER) in self.body(state, WRITER).store.matching.product_bases

    def poison(self, draft: Draft, product: int) -> None:
        draft[self.to_come] = 0
        if self.scope.dialect.registrations_end:
            read_as_nothing(*(STRICT_POISON if self.scope.dialect.control_frames else VLLM_POISON))
        else:
            self.raises(draft, STRANGER)

    def lost_by(self, state: State, move: Move) -> list[int]:
        return [self.inbox] if move[0] == "poison" and not self.scope.dialect.registrations_end else []


class Evicting(Raising):
    """P's engine thread forgets D for its age (R47), as it does when another engine comes up; D has been idle for as
    long as that takes. The writer checks that D is connected, and looks its descriptors up when it posts: one more
    slot, whether it stands between the two."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.checked = self.budget + 2
        self.do |= {"check": self.check, "evict": self.evict}

    def beginning(self) -> State:
        return (*super().beginning(), 0)

    def moves(self, state: State) -> list[Move]:
        found = super().moves(state)
        writer = self.body(state, WRITER)
        if "D.r0" in writer.peers.connected:
            if not state[self.checked] and self._would_post(state, writer.store.matching):
                found.append(("check", self.inbox))
            if state[self.to_come] and not self.ops_of(state):
                found.append(("evict", self.cluster.link_of[WRITER, "D.r0"]))
        return found

    def _would_post(self, state: State, matching: Matching) -> bool:
        """Whether what comes next is a registration whose prompt is there."""
        waiting = self.chans.values[state[self.first_link + self.inbox]]
        frame = self.frames.values[waiting[0]] if waiting else None
        return isinstance(frame, Register) and matching.product_of(frame) is not None

    def check(self, draft: Draft, link: int) -> None:
        draft[self.checked] = 1

    def deliver(self, draft: Draft, link: int) -> None:
        if link == self.inbox:
            draft[self.checked] = 0
        super().deliver(draft, link)

    def evict(self, draft: Draft, link: int) -> None:
        draft[self.to_come] = 0
        if draft[self.checked]:
            draft[self.checked] = 0
            frame = self.frames.values[self.chans.values[draft[self.first_link + self.inbox]][0]]
            self.raises(draft, frame.reg.request_id)
        body = self.body(draft, WRITER).fork()
        body.peers.lost("D.r0")
        draft[self.cluster.at[WRITER]] = self.endpoint(WRITER, body)

    def lost_by(self, state: State, move: Move) -> list[int]:
        return [self.inbox] if move[0] == "evict" and state[self.checked] else []


def _framed(body: bytes) -> bytes:
    return (1 + len(body)).to_bytes(LENGTH_BYTES, "big") + bytes((VERSION,)) + body


Decoder = Callable[[bytes], object]
VLLM_POISON: tuple[Decoder, bytes] = (
    decode_notification,
    PUSH_REG + msgspec.msgpack.encode({"request_id": STRANGER}),
)
STRICT_POISON: tuple[Decoder, bytes] = (
    decode_frame,
    _framed(msgspec.msgpack.encode({"type": Register.__struct_config__.tag, "reg": Reg("X", 1, 1, STRANGER)})),
)


def read_as_nothing(decode: Decoder, poison: bytes) -> None:
    """It must be read as nothing that an endpoint is told of, and without raising."""
    try:
        read = decode(poison)
    except Exception as error:
        raise Broken("S9", f"a registration without its fields raises {error!r}") from error
    if not isinstance(read, Malformed):
        raise Broken("S9", f"a registration without its fields is read as {read}")


WORLDS: dict[str, type[Relation]] = {world.__name__: world for world in (TwoOwners, Poisoned, Evicting)}
"""By the names that stories know them by."""
