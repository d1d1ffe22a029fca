"""A prefill engine that sends from memory beside its KV blocks: what it computes is copied there first.

Layers are computed one after the other through a step, so each of a chunk's is ready at its share of the step's time.
Where the method sends early, each is copied and offered then; otherwise the whole prompt is, when it is computed. The
blocks come back as soon as they are copied; what the lease holds is the copy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.method import Conduct, Grain, Memory, Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import ReleaseBlocks, StopWrite
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished, SourceWithdrawn
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant, Xid
from pdflow.results.records import P_QUEUE, PREFILL
from pdflow.routing.router import DispatchPrefill, PrefillAnswered
from sim.node import Port
from sim.prefill_node import WEIGHTS, PrefillLeg, PrefillNode
from sim.shipping import whole, words

if TYPE_CHECKING:
    from sim.world import World


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
        self.layers = staging.size.layers
        engine.reports_chunks = conduct.early
        self.places: dict[Xid, Allocation] = {}
        """Where each prompt has room."""
        self.copied: dict[Xid, int] = {}
        """Of prompts that have room: tokens whose copies have been ordered."""
        self.copying: dict[Xid, int] = {}
        """Copies under way, or to come of a step that has begun."""
        self.leaving: dict[Xid, PrefillLeg] = {}
        """Computed, and not wholly copied: their blocks are still needed."""
        self.given_up: set[Xid] = set()
        """Let go of while they were computed: nothing more of them is sent."""
        self.unannounced: set[Xid] = set()
        """Computed before there was room for any of it."""
        self.awaited: dict[Xid, None] = {}
        """What the engine waits for before it goes on."""
        self.postponed: list[tuple[PrefillLeg, ChunkBegun]] = []
        """Parts of the step that has not begun after all."""
        self.in_blocks: dict[Xid, list[ChunkBegun]] = {}
        """Of prompts that wait for room: what has been computed of them, and lies where it was."""
        self.held_since: Instant = 0
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
            return
        self.computed(leg)

    def computing(self, leg: PrefillLeg, chunk: ChunkBegun) -> None:
        """A step with a part of this prompt begins. Without room it stays in blocks, and the engine goes on: were it to
        wait, so would those prompts that hold the room."""
        tokens = leg.seq.prompt_tokens
        known = chunk.computed + chunk.new
        if self.method.grain is Grain.LAYER and known < tokens:
            return
        if self.held:
            self.postponed.append((leg, chunk))
            return
        xid = leg.xid
        if xid in self.given_up:
            return
        if xid not in self.places and xid not in self.staging.waiting:
            self.staging.want(xid, tokens)
            self.grant()
        if xid in self.places:
            self.plan(leg, known, chunk.start_ns, chunk.end_ns)
        else:
            self.in_blocks.setdefault(xid, []).append(chunk)

    def plan(self, leg: PrefillLeg, known: int, start_ns: Instant, end_ns: Instant) -> None:
        """Each layer of the tokens up to `known` is there at its share of the step."""
        before = self.copied.get(leg.xid, 0)
        self.copied[leg.xid] = known
        self.owe(leg.xid, self.layers)
        now = self.env.now
        for layer in range(self.layers):
            at = start_ns + (end_ns - start_ns) * (layer + 1) // self.layers
            self.env.call(max(0, at - now), self.layer_computed, (leg, Piece(layer, before, known)))
        if leg.xid in self.unannounced and known == leg.seq.prompt_tokens:
            self.unannounced.remove(leg.xid)
            self.finish(leg)

    def layer_computed(self, about: tuple[PrefillLeg, Piece]) -> None:
        leg, piece = about
        if leg.xid in self.places and self.alive:
            self.copy_out(leg.xid, piece)
        else:
            self.paid(leg.xid, len(self.ports) - 1)

    def copy_out(self, xid: Xid, *pieces: Piece) -> None:
        """Bring these, which lie in blocks, to where they are sent from."""
        hop = self.method.staging
        assert hop is not None
        nbytes = sum(piece.stop - piece.start for piece in pieces) * self.staging.size.bytes_per_token
        if self.world.tell is not None:
            what = words(pieces[0], self.layers) if len(pieces) == 1 else "all layers"
            self.world.tell(self.name, f"copies {what}, {hop.value}")
        for port in self.ranks():
            self.world.shipping.copy(port, hop, nbytes, partial(self.copied_out, port, xid, pieces))

    def ranks(self) -> list[Port]:
        return [port for address, port in self.ports.items() if address != self.name]

    def copied_out(self, port: Port, xid: Xid, pieces: tuple[Piece, ...], ok: bool) -> None:
        if not self.alive:
            return
        if xid in self.places:
            for piece in pieces:
                self.world.shipping.offer(port.address, xid, piece)
        self.paid(xid, 1)

    def owe(self, xid: Xid, pieces: int) -> None:
        """So many pieces will be copied by each rank."""
        self.copying[xid] = self.copying.get(xid, 0) + pieces * (len(self.ports) - 1)

    def paid(self, xid: Xid, pieces: int) -> None:
        """So many are, or need not be."""
        left = self.copying[xid] = self.copying[xid] - pieces
        if left:
            return
        del self.copying[xid]
        if xid in self.leaving and xid not in self.unannounced:
            self.leave(self.leaving.pop(xid))

    def computed(self, leg: PrefillLeg) -> None:
        """All of the prompt's KV is in blocks."""
        now, records, seq = self.env.now, self.world.records, leg.seq
        del self.by_seq[id(seq)]
        leg.finished_ns = now
        self.measure_pool()
        records.ends[P_QUEUE][seq.index] = seq.start_ns
        records.ends[PREFILL][seq.index] = now
        xid = leg.xid
        self.leaving[xid] = leg
        if self.conduct.early and xid not in self.places and xid not in self.given_up:
            self.unannounced.add(xid)
            return
        if self.conduct.prefill_waits:
            self.wait_for(xid)
        if self.conduct.early:
            self.given_up.discard(xid)
            self.finish(leg)
            if xid not in self.copying:
                self.leave(self.leaving.pop(xid))
            return
        self.staging.want(xid, seq.prompt_tokens)
        self.grant()

    def finish(self, leg: PrefillLeg) -> None:
        place = self.places.get(leg.xid, Allocation(0, ()))
        digest = self.world.digest(leg.request)
        self.feed(self.scheduler, PrefillFinished(leg.xid, place, leg.seq.prompt_tokens, digest, WEIGHTS))

    def leave(self, leg: PrefillLeg) -> None:
        """Nothing of it is needed in blocks any more."""
        if not self.conduct.early and leg.xid in self.places:
            self.finish(leg)
        if self.method.p_memory is not Memory.TENSORS:
            self.waits_no_more(leg.xid)
        assert leg.seq.allocation is not None
        if self.world.tell is not None:
            self.world.tell(self.name, "frees the prompt's KV blocks")
        self.strand(len(leg.seq.allocation.blocks), leg.finished_ns)
        self.give_back(leg)
        self.forget(leg)
        self.rearm()

    def forget(self, leg: PrefillLeg) -> None:
        if leg.xid not in self.places:
            self.by_xid.pop(leg.xid, None)

    # Room to send from.

    def grant(self) -> None:
        for xid in self.staging.victims():
            self.feed(self.scheduler, SourceWithdrawn(xid))
        while (served := self.staging.serve()) is not None:
            xid, place = served
            self.places[xid] = place
            if self.world.tell is not None:
                self.world.tell(self.name, f"takes room in {self.method.p_memory.value}")
            leg = self.by_xid[xid]
            if not self.conduct.early:
                self.owe(xid, 1)
                self.copy_out(xid, *whole(self.layers, leg.seq.prompt_tokens))
                continue
            digest = self.world.digest(leg.request)
            self.feed(self.scheduler, PrefillBegun(xid, place, leg.seq.prompt_tokens, digest, WEIGHTS))
            for chunk in self.in_blocks.pop(xid, ()):
                self.plan(leg, chunk.computed + chunk.new, chunk.start_ns, chunk.end_ns)

    def release(self, port: Port, effect: ReleaseBlocks) -> None:
        xid = effect.xid
        if self.world.tell is not None:
            self.world.tell(self.name, f"gives back room in {self.method.p_memory.value}")
        self.staging.release(effect.allocation)
        del self.places[xid]
        self.copied.pop(xid, None)
        for rank in self.ranks():
            self.world.shipping.withdraw(rank.address, xid)
        leg = self.by_xid.get(xid)
        if leg is not None and not leg.finished_ns and id(leg.seq) in self.by_seq:
            self.given_up.add(xid)
        elif xid not in self.leaving:
            self.by_xid.pop(xid, None)
        self.waits_no_more(xid)
        self.grant()

    def stop_write(self, port: Port, effect: StopWrite) -> None:
        self.world.shipping.stop(effect.op)

    # The engine waits.

    def wait_for(self, xid: Xid) -> None:
        self.awaited[xid] = None
        if not self.held:
            self.held_since = self.env.now
            self.hold()

    def waits_no_more(self, xid: Xid) -> None:
        if self.awaited.pop(xid, self) is self or self.awaited:
            return
        self.let_go()
        postponed, self.postponed = self.postponed, []
        waited = self.env.now - self.held_since
        for leg, chunk in postponed:
            start, end = chunk.start_ns + waited, chunk.end_ns + waited
            self.computing(leg, ChunkBegun(chunk.seq, chunk.computed, chunk.new, start, end))

    def end(self, leg: PrefillLeg, code: Code) -> None:
        """This prefill ends without KV, or without the rest of it."""
        self.staging.forget(leg.xid)
        self.given_up.discard(leg.xid)
        self.in_blocks.pop(leg.xid, None)
        self.postponed = [(other, chunk) for other, chunk in self.postponed if other is not leg]
        del self.by_request[leg.request_id], self.by_seq[id(leg.seq)]
        if leg.xid not in self.places:
            del self.by_xid[leg.xid]
        if leg.keeps:
            self.feed(self.scheduler, PrefillAborted(leg.xid, code))
        self.waits_no_more(leg.xid)
        self.grant()

    def assert_empty(self) -> None:
        staging = self.staging
        kept = (staging.held, staging.waiting, self.places, self.copying, self.leaving, self.awaited)
        assert not any((*kept, self.postponed, self.in_blocks, self.unannounced)), f"{self.name} still keeps {kept}"
        assert not self.held, f"{self.name} still waits"

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)
