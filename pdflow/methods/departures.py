"""Prompts on their way out of P's blocks, into the memory that P sends from: who asks for room when, what is copied
when, from when on a prompt is the protocol's, and when its blocks are free.

Where the method sends early, each layer of a chunk is copied and offered as it is computed; otherwise the whole prompt
is, when all of it is. A prompt without room stays in blocks, and the engine goes on: were it to wait, so would those
prompts that hold the room. The blocks come back as soon as they are copied; the lease is the prompt's, wherever it
lies.

When a prompt asks for room is `staging.py`'s to say. Where that is with the WRITE, it is announced without; where D
reads, when it can be read. How bytes are copied, and how long that takes, is the host's: a simulated engine's, or a
live one's.
"""

from __future__ import annotations

from typing import Any, Protocol

from pdflow.methods.method import Conduct, Grain, Memory, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging, comes_with_the_write
from pdflow.protocol.values import Allocation, Xid


class Departure:
    """One prompt on its way. `leg` is the host's."""

    __slots__ = (
        "chunks",
        "computed",
        "copied",
        "copying",
        "held",
        "in_blocks",
        "leg",
        "over",
        "place",
        "tokens",
        "wanted",
        "xid",
    )

    def __init__(self, leg: Any, xid: Xid, tokens: int) -> None:
        self.leg = leg
        self.xid = xid
        self.tokens = tokens
        self.held = False
        """By the protocol."""
        self.wanted = False
        """Room was asked for."""
        self.place: Allocation | None = None
        """Where it has room."""
        self.chunks: list[tuple[int, Any]] = []
        """Computed, or being computed, while it has none: up to which token, and the host's word for it."""
        self.copied = 0
        """Tokens whose copies have been ordered."""
        self.copying = 0
        """Copies under way, or to come of a step that has begun."""
        self.computed = False
        self.in_blocks = True
        """Its blocks are still needed."""
        self.over = False
        """Nothing of it is sent any more."""


class Host(Protocol):
    """What an engine's node does of it. Only `copy_out` and `layers_of` may call back before they return."""

    def announce(self, going: Departure) -> None:
        """The protocol's from now on, though it is still being computed."""

    def finish(self, going: Departure) -> None:
        """The protocol's from now on, all of it."""

    def withdraw(self, xid: Xid) -> None:
        """Its room is wanted: its lease ends."""

    def recall(self, xid: Xid) -> None:
        """Nothing more of it may be sent."""

    def layers_of(self, going: Departure, chunk: Any, before: int) -> None:
        """Have `layer_computed` be called as each layer of the tokens from `before` to the chunk's end is there."""

    def copy_out(self, going: Departure, piece: Piece | None) -> None:
        """Bring this piece, or the whole prompt, to where it is sent from, and call `done_copying` for each share."""

    def has_left(self, going: Departure) -> None:
        """Its blocks are free."""

    def forget(self, xid: Xid) -> None:
        """It lies nowhere any more."""

    def took_room(self, going: Departure) -> None: ...

    def gave_room_back(self, going: Departure) -> None: ...

    def wait_for(self, xid: Xid) -> None:
        """The engine begins no step before this."""

    def wait_no_more(self, xid: Xid) -> None: ...


class Departures:
    """Args: `staging` is that of one rank. A layer of a chunk is copied in `layer_shares` parts in all, a prompt that
    goes whole in `whole_shares`."""

    def __init__(
        self, host: Host, method: Method, conduct: Conduct, staging: Staging, layer_shares: int, whole_shares: int
    ) -> None:
        self.host = host
        self.method = method
        self.conduct = conduct
        self.staging = staging
        self.layer_shares = layer_shares
        """Of all its layers together."""
        self.whole_shares = whole_shares
        self.room_with_write = comes_with_the_write(method, conduct)
        self.outgoing: dict[Xid, Departure] = {}

    # What the engine does.

    def concerns(self, known: int, tokens: int) -> bool:
        """Whether anything of a prompt of so many tokens goes with the step after which so many are known."""
        return self.method.grain is not Grain.LAYER or known >= tokens

    def computing(self, leg: Any, xid: Xid, tokens: int, known: int, chunk: Any) -> None:
        """A step with a part of this prompt begins."""
        going = self.outgoing.get(xid) or self._depart(leg, xid, tokens)
        if going.over:
            return
        if going.place is None:
            going.chunks.append((known, chunk))
        else:
            self._plan(going, known, chunk)

    def layer_computed(self, going: Departure, piece: Piece, shares: int) -> None:
        """One layer of a chunk is there, of which so many parts are to be copied."""
        if going.place is not None:
            self.host.copy_out(going, piece)
        else:
            self.done_copying(going, shares)

    def computed(self, leg: Any, xid: Xid, tokens: int) -> None:
        """All of the prompt's KV is in blocks."""
        going = self.outgoing.get(xid)
        if going is None:
            going = self._depart(leg, xid, tokens, computed=True)
        going.computed = True
        if self.room_with_write:
            self._finish(going)
            self.done_copying(going, 0)
            return
        if self.conduct.prefill_waits and not (self.conduct.early and self._stays(going)):
            self.host.wait_for(xid)
        if self.conduct.early and not self._stays(going):
            self._finish(going)
            self.done_copying(going, 0)

    def done_copying(self, going: Departure, copies: int) -> None:
        """So many copies are made, or need not be. Behind the last of all, the blocks are free."""
        going.copying -= copies
        if going.copying or not going.computed or not going.in_blocks or self._stays(going):
            return
        going.in_blocks = False
        if not self.room_with_write and not self.conduct.early:
            self._finish(going)
        if self.method.p_memory is not Memory.TENSORS:
            self.host.wait_no_more(going.xid)
        self.host.has_left(going)
        self._forget(going)

    def ended(self, xid: Xid) -> None:
        """This prefill ends without KV, or without the rest of it. Its blocks are the engine's."""
        self.staging.forget(xid)
        going = self.outgoing.get(xid)
        if going is None:
            self.host.forget(xid)
        else:
            going.over, going.in_blocks = True, False
            self._forget(going)

    # What the protocol does.

    def written(self, xid: Xid) -> None:
        """A WRITE of it is posted."""
        going = self.outgoing[xid]
        if not going.wanted and not going.over:
            if self.conduct.prefill_waits:
                self.host.wait_for(xid)
            self._want(going)

    def released(self, xid: Xid) -> None:
        """The protocol lets go of it."""
        going = self.outgoing[xid]
        going.held, going.over = False, True
        self._vacate(going)
        self.host.recall(xid)
        self.done_copying(going, 0)
        self._forget(going)
        self.host.wait_no_more(xid)
        self.grant()

    # Room.

    def grant(self) -> None:
        """Whoever has room now goes on."""
        for xid in self.staging.victims():
            self.host.withdraw(xid)
        while (served := self.staging.serve()) is not None:
            xid, place = served
            going = self.outgoing[xid]
            going.place = place
            self.host.took_room(going)
            if not self.conduct.early:
                going.copying = self.whole_shares
                self.host.copy_out(going, None)
                continue
            if not going.held:
                self._announce(going)
            # Who copies at once may be done with one chunk before the next is ordered: that is not the last of all.
            going.copying += 1
            for known, chunk in going.chunks:
                self._plan(going, known, chunk)
            going.chunks.clear()
            if going.computed and not self.room_with_write:
                self._finish(going)
            self.done_copying(going, 1)

    def _depart(self, leg: Any, xid: Xid, tokens: int, computed: bool = False) -> Departure:
        """It is on its way from now on. Where room is had and copied to at once, it has left when this returns."""
        going = self.outgoing[xid] = Departure(leg, xid, tokens)
        going.computed = computed
        if not self.room_with_write:
            self._want(going)
        elif self.conduct.early:
            self._announce(going)
        return going

    def _want(self, going: Departure) -> None:
        going.wanted = True
        self.staging.want(going.xid, going.tokens)
        self.grant()

    def _vacate(self, going: Departure) -> None:
        """It has no room any more, and wants none."""
        place, going.place = going.place, None
        if place is None:
            self.staging.forget(going.xid)
            return
        self.host.gave_room_back(going)
        self.staging.release(place)

    def _plan(self, going: Departure, known: int, chunk: Any) -> None:
        before = going.copied
        going.copied = known
        going.copying += self.layer_shares
        self.host.layers_of(going, chunk, before)

    def _stays(self, going: Departure) -> bool:
        """Whether it waits for room."""
        return going.place is None and not going.over

    def _announce(self, going: Departure) -> None:
        going.held = True
        self.host.announce(going)

    def _finish(self, going: Departure) -> None:
        going.held = going.held or not going.over
        self.host.finish(going)

    def _forget(self, going: Departure) -> None:
        if going.over and not going.in_blocks and not going.held and self.outgoing.pop(going.xid, None) is not None:
            self.host.forget(going.xid)

    def assert_empty(self, whose: str) -> None:
        kept = (self.staging.held, self.staging.waiting, self.outgoing)
        assert not any(kept), f"{whose} still keeps {kept}"
