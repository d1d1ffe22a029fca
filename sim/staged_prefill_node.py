"""A prefill engine that sends from memory beside its KV blocks: what it computes is copied there first.

Layers are computed one after the other through a step, so each of a chunk's is ready at its share of the step's time.
Where the method sends early, each is copied and offered then; otherwise the whole prompt is, when it is computed. A
prompt without room stays in blocks, and the engine goes on: were it to wait, so would those prompts that hold the room.
The blocks come back as soon as they are copied; the lease is the prompt's, wherever it lies.

When a prompt asks for room is `pdflow.methods.staging`'s to say. Where that is with the WRITE, it is announced without;
where D reads, when it can be read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.method import Conduct, Grain, Memory, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging, comes_with_the_write
from pdflow.protocol.effects import PostWrite, ReleaseBlocks, StopWrite
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished, SourceWithdrawn
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, Xid
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.node import Port
from sim.prefill_node import WEIGHTS, PrefillLeg, PrefillNode
from sim.shipping import whole, words

if TYPE_CHECKING:
    from sim.world import World


class Outgoing:
    """One prompt on its way out of the blocks."""

    __slots__ = ("chunks", "computed", "copied", "copying", "held", "in_blocks", "leg", "over", "place", "wanted")

    def __init__(self, leg: PrefillLeg) -> None:
        self.leg = leg
        self.held = False
        """By the protocol."""
        self.wanted = False
        """Room was asked for."""
        self.place: Allocation | None = None
        """Where it has room."""
        self.chunks: list[ChunkBegun] = []
        """Computed, or being computed, while it has none."""
        self.copied = 0
        """Tokens whose copies have been ordered."""
        self.copying = 0
        """Copies under way, or to come of a step that has begun."""
        self.computed = False
        self.in_blocks = True
        """Its blocks are still needed."""
        self.over = False
        """Nothing of it is sent any more."""


class StagedPrefillNode(PrefillNode):
    """Args: staging is that of one rank, its layers those of the rank with the most."""

    def __init__(
        self,
        world: World,
        index: int,
        name: str,
        engine: Engine,
        block_bytes: int,
        method: Method,
        conduct: Conduct,
        staging: Staging,
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.method = method
        self.conduct = conduct
        self.staging = staging
        self.room_with_write = comes_with_the_write(method, conduct)
        self.layers = staging.size.layers
        engine.reports_chunks = conduct.early
        self.outgoing: dict[Xid, Outgoing] = {}
        self.held_since: Instant = 0
        self.postponed: list[tuple[PrefillLeg, ChunkBegun | None]] = []
        """Parts of a step that has not begun after all; of one without length also its end (None)."""
        self.do[StopWrite] = self.stop_write

    def accept(self, leg: DispatchPrefill) -> None:
        tokens = self.world.records.input_tokens[leg.request]
        if leg.keeps and not self.staging.fits_ever(tokens):
            self.world.router.later(PrefillAnswered(leg.request_id, None, Code.REJECTED))
            return
        super().accept(leg)

    # What the engine does.

    def came(self, outcome: object) -> None:
        if type(outcome) is ChunkBegun:
            leg = self.by_seq.get(id(outcome.seq))
            if leg is not None and leg.keeps:
                self.computing(leg, outcome)
            return
        assert type(outcome) is Prefilled
        leg = self.by_seq[id(outcome.seq)]
        if not leg.keeps:
            super().came(outcome)
        elif any(other is leg for other, _ in self.postponed):
            self.postponed.append((leg, None))
        else:
            self.computed(leg)

    def computing(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        """A step with a part of this prompt begins."""
        if self.method.grain is Grain.LAYER and chunk.computed + chunk.new < leg.seq.prompt_tokens:
            return
        if self.held:
            self.postponed.append((leg, chunk))
            return
        going = self.outgoing.get(leg.xid) or self.depart(leg)
        if going.over:
            return
        if going.place is None:
            going.chunks.append(chunk)
        else:
            self.plan(going, chunk)

    def depart(self, leg: PrefillLeg) -> Outgoing:
        """It is on its way from now on."""
        going = self.outgoing[leg.xid] = Outgoing(leg)
        if not self.room_with_write:
            self.want(going)
        elif self.conduct.early:
            self.announce(going)
        return going

    def plan(self, going: Outgoing, chunk: ChunkBegun) -> None:
        """Each layer of this chunk is there at its share of the step."""
        before, known = going.copied, chunk.computed + chunk.new
        going.copied = known
        going.copying += self.layers * self.width()
        self.layer_by_layer(chunk, self.layers, before, self.layer_computed, going)

    def layer_computed(self, about: tuple[Outgoing, Piece]) -> None:
        going, piece = about
        if going.place is not None and self.alive:
            self.copy_out(going, piece)
        else:
            self.done_copying(going, self.width())

    def computed(self, leg: PrefillLeg) -> None:
        """All of the prompt's KV is in blocks."""
        self.note_computed(leg)
        going = self.outgoing.get(leg.xid) or self.depart(leg)
        going.computed = True
        if self.room_with_write:
            self.finish(going)
            self.done_copying(going, 0)
            return
        if self.conduct.prefill_waits and not (self.conduct.early and self.stays(going)):
            self.wait_for(leg.xid)
        if self.conduct.early and not self.stays(going):
            self.finish(going)
            self.done_copying(going, 0)

    def stays(self, going: Outgoing) -> bool:
        """Whether it waits for room."""
        return going.place is None and not going.over

    def announce(self, going: Outgoing) -> None:
        """The protocol's from now on, though it is still being computed."""
        going.held = True
        self.feed(self.scheduler, PrefillBegun(*self.about(going.leg)))

    def finish(self, going: Outgoing) -> None:
        """The protocol's from now on, all of it."""
        going.held = going.held or not going.over
        self.feed(self.scheduler, PrefillFinished(*self.about(going.leg)))

    def about(self, leg: PrefillLeg) -> tuple[Xid, Allocation, int, int, int]:
        """What the protocol knows of a prompt: it goes by its blocks, wherever it lies."""
        assert leg.seq.allocation is not None
        source, digest = self.source(leg.seq.allocation), self.world.digest(leg.request)
        return leg.xid, source, leg.seq.prompt_tokens, digest, WEIGHTS

    # Out of the blocks.

    def copy_out(self, going: Outgoing, piece: Piece | None = None) -> None:
        """Bring this piece, or the whole prompt, to where it is sent from."""
        hop = self.method.staging
        assert hop is not None
        tokens = self.layers * going.leg.seq.prompt_tokens if piece is None else piece.stop - piece.start
        if self.world.tell is not None:
            what = "all layers" if piece is None else words(piece, self.layers)
            self.world.tell(self.name, f"copies {what}, {hop.value}")
        for port in self.ranks():
            nbytes = tokens * self.staging.size.bytes_per_token
            self.world.shipping.copy(port, hop, nbytes, partial(self.copied_out, port, going, piece))

    def copied_out(self, port: Port, going: Outgoing, piece: Piece | None, ok: bool) -> None:
        if not self.alive:
            return
        if going.place is not None and not self.method.pulls:
            for part in (piece,) if piece is not None else whole(self.layers, going.leg.seq.prompt_tokens):
                self.world.shipping.offer(port.address, going.leg.xid, part)
        self.done_copying(going, 1)

    def done_copying(self, going: Outgoing, copies: int) -> None:
        """So many copies are made, or need not be. Behind the last of all, the blocks are free."""
        going.copying -= copies
        if going.copying or not going.computed or not going.in_blocks or self.stays(going):
            return
        leg, going.in_blocks = going.leg, False
        if not self.room_with_write and not self.conduct.early:
            self.finish(going)
        if self.method.p_memory is not Memory.TENSORS:
            self.wait_no_more(leg.xid)
        if self.world.tell is not None:
            self.world.tell(self.name, "frees the prompt's KV blocks")
        assert leg.seq.allocation is not None
        self.strand(len(leg.seq.allocation.blocks), leg.finished_ns)
        self.give_back(leg)
        self.forget(going)
        self.rearm()

    def forget(self, going: Outgoing) -> None:
        """It lies nowhere any more."""
        if going.over and not going.in_blocks and not going.held:
            self.outgoing.pop(going.leg.xid, None)
            self.by_xid.pop(going.leg.xid, None)

    def width(self) -> int:
        """How many ranks there are."""
        return len(self.ports) - 1

    # Room to send from.

    def post_write(self, port: Port, effect: PostWrite) -> None:
        going = self.outgoing[effect.grant.xid]
        if not going.wanted and not going.over:
            if self.conduct.prefill_waits:
                self.wait_for(going.leg.xid)
            self.want(going)
        super().post_write(port, effect)

    def want(self, going: Outgoing) -> None:
        going.wanted = True
        self.staging.want(going.leg.xid, going.leg.seq.prompt_tokens)
        self.grant()

    def grant(self) -> None:
        for xid in self.staging.victims():
            self.feed(self.scheduler, SourceWithdrawn(xid))
        while (served := self.staging.serve()) is not None:
            xid, place = served
            going = self.outgoing[xid]
            going.place = place
            if self.world.tell is not None:
                self.world.tell(self.name, f"takes room in {self.method.p_memory.value}")
            if not self.conduct.early:
                going.copying = self.width()
                self.copy_out(going)
                continue
            if not going.held:
                self.announce(going)
            for chunk in going.chunks:
                self.plan(going, chunk)
            going.chunks.clear()
            if going.computed and not self.room_with_write:
                self.finish(going)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        going = self.outgoing[effect.xid]
        going.held, going.over = False, True
        self.vacate(going)
        for rank in self.ranks():
            self.world.shipping.withdraw(rank.address, effect.xid)
        self.done_copying(going, 0)
        self.forget(going)
        self.wait_no_more(effect.xid)
        self.grant()

    def vacate(self, going: Outgoing) -> None:
        """It has no room any more, and wants none."""
        place, going.place = going.place, None
        if place is None:
            self.staging.forget(going.leg.xid)
            return
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.p_memory.value}")
        self.staging.release(place)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.world.shipping.stop(effect.op)

    def end(self, leg: PrefillLeg, code: Code) -> None:
        """This prefill ends without KV, or without the rest of it. Its blocks are the engine's."""
        self.staging.forget(leg.xid)
        self.postponed = [(other, chunk) for other, chunk in self.postponed if other is not leg]
        del self.by_request[leg.request_id], self.by_seq[id(leg.seq)]
        going = self.outgoing.get(leg.xid)
        if going is None:
            del self.by_xid[leg.xid]
        else:
            going.over, going.in_blocks = True, False
            self.forget(going)
        if leg.keeps:
            self.feed(self.scheduler, PrefillAborted(leg.xid, code))
        self.wait_no_more(leg.xid)
        self.grant()

    # The engine waits.

    def hold(self) -> None:
        if not self.held:
            self.held_since = self.env.now
        super().hold()

    def let_go(self) -> None:
        super().let_go()
        postponed, self.postponed = self.postponed, []
        waited = self.env.now - self.held_since
        for leg, chunk in postponed:
            if chunk is not None:
                start, end = chunk.start_ns + waited, chunk.end_ns + waited
                self.computing(leg, ChunkBegun(chunk.seq, chunk.computed, chunk.new, start, end))
            elif self.postponed:
                self.postponed.append((leg, None))
            else:
                self.computed(leg)

    def assert_empty(self) -> None:
        kept = (self.staging.held, self.staging.waiting, self.outgoing, self.awaited, self.postponed)
        assert not any(kept), f"{self.name} still keeps {kept}"
        assert not self.held, f"{self.name} still waits"

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)
