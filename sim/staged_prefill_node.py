"""A prefill engine that sends from memory beside its KV blocks: what it computes is copied there first.

What goes when is `pdflow.methods.departures`'s to say. Here are the times: layers are computed one after the other
through a step, so each of a chunk's is ready at its share of the step's time; a copy takes as long as its path says.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.departures import Departure, Departures
from pdflow.methods.method import Conduct, Method
from pdflow.methods.shipment import Piece, whole
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import PostWrite, ReleaseBlocks, StopWrite
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished, SourceWithdrawn
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, Xid
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.node import Port
from sim.prefill_node import WEIGHTS, PrefillLeg, PrefillNode
from sim.shipping import words

if TYPE_CHECKING:
    from sim.world import World


class StagedPrefillNode(PrefillNode):
    """Args: staging is that of one rank, its layers those of the rank with the most; width is how many ranks there
    are."""

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
        width: int,
    ) -> None:
        super().__init__(world, index, name, engine, block_bytes)
        self.method = method
        self.conduct = conduct
        self.staging = staging
        self.layers = staging.size.layers
        self.width = width
        self.departures = Departures(self, method, conduct, staging, self.layers * width, width)
        engine.reports_chunks = conduct.early
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
            known = outcome.computed + outcome.new
            if leg is not None and leg.keeps and self.departures.concerns(known, leg.seq.prompt_tokens):
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
        if self.held:
            self.postponed.append((leg, chunk))
        else:
            self.departures.computing(leg, leg.xid, leg.seq.prompt_tokens, chunk.computed + chunk.new, chunk)

    def layers_of(self, going: Departure, chunk: Any, before: int) -> None:
        self.layer_by_layer(chunk, self.layers, before, self.layer_computed, going)

    def layer_computed(self, about: tuple[Departure, Piece]) -> None:
        going, piece = about
        if self.alive:
            self.departures.layer_computed(going, piece, self.width)

    def computed(self, leg: PrefillLeg) -> None:
        """All of the prompt's KV is in blocks."""
        self.note_computed(leg)
        self.departures.computed(leg, leg.xid, leg.seq.prompt_tokens)

    def announce(self, going: Departure) -> None:
        self.feed(self.scheduler, PrefillBegun(*self.about(going.leg)))

    def finish(self, going: Departure) -> None:
        self.feed(self.scheduler, PrefillFinished(*self.about(going.leg)))

    def about(self, leg: PrefillLeg) -> tuple[Xid, Allocation, int, int, int]:
        """What the protocol knows of a prompt: it goes by its blocks, wherever it lies."""
        assert leg.seq.allocation is not None
        source, digest = self.source(leg.seq.allocation), self.world.digest(leg.request)
        return leg.xid, source, leg.seq.prompt_tokens, digest, WEIGHTS

    # Out of the blocks.

    def copy_out(self, going: Departure, piece: Piece | None) -> None:
        hop = self.method.staging
        assert hop is not None
        tokens = self.layers * going.tokens if piece is None else piece.stop - piece.start
        if self.world.tell is not None:
            what = "all layers" if piece is None else words(piece, self.layers)
            self.world.tell(self.name, f"copies {what}, {hop.value}")
        for port in self.ranks():
            nbytes = tokens * self.staging.size.bytes_per_token
            self.world.shipping.copy(port, hop, nbytes, partial(self.copied_out, port, going, piece))

    def copied_out(self, port: Port, going: Departure, piece: Piece | None, ok: bool) -> None:
        if not self.alive:
            return
        if going.place is not None and not self.method.pulls:
            for part in (piece,) if piece is not None else whole(self.layers, going.tokens):
                self.world.shipping.offer(port.address, going.xid, part)
        self.departures.done_copying(going, 1)

    def has_left(self, going: Departure) -> None:
        if self.world.tell is not None:
            self.world.tell(self.name, "frees the prompt's KV blocks")
        leg: PrefillLeg = going.leg
        assert leg.seq.allocation is not None
        self.strand(len(leg.seq.allocation.blocks), leg.finished_ns)
        self.give_back(leg)
        self.rearm()

    def forget(self, xid: Xid) -> None:
        self.by_xid.pop(xid, None)

    # Room to send from.

    def post_write(self, port: Port, effect: PostWrite) -> None:
        self.departures.written(effect.grant.xid)
        super().post_write(port, effect)

    def withdraw(self, xid: Xid) -> None:
        self.feed(self.scheduler, SourceWithdrawn(xid))

    def took_room(self, going: Departure) -> None:
        if self.world.tell is not None:
            self.world.tell(self.name, f"takes room in {self.method.p_memory.value}")

    def gave_room_back(self, going: Departure) -> None:
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.p_memory.value}")

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        self.departures.released(effect.xid)

    def recall(self, xid: Xid) -> None:
        for rank in self.ranks():
            self.world.shipping.withdraw(rank.address, xid)

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.world.shipping.stop(effect.op)

    def end(self, leg: PrefillLeg, code: Code) -> None:
        """This prefill ends without KV, or without the rest of it. Its blocks are the engine's."""
        self.postponed = [(other, chunk) for other, chunk in self.postponed if other is not leg]
        del self.by_request[leg.request_id], self.by_seq[id(leg.seq)]
        self.departures.ended(leg.xid)
        if leg.keeps:
            self.feed(self.scheduler, PrefillAborted(leg.xid, code))
        self.wait_no_more(leg.xid)
        self.departures.grant()

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
        self.departures.assert_empty(self.name)
        kept = (self.awaited, self.postponed)
        assert not any(kept), f"{self.name} still keeps {kept}"
        assert not self.held, f"{self.name} still waits"

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)
