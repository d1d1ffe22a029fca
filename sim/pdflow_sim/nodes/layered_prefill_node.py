"""A prefill engine that sends a prompt layer by layer, from its blocks or from staging memory.

`pdflow/serving/sending.py` and `staged_sending.py` decide what goes when. This module has the times: layers are
computed one after the other through a step, so each is ready at its share of the step's time; a copy takes as long as
its path says.
"""

from __future__ import annotations

from functools import partial

from pdflow.engine.sequence import ChunkBegun, Prefilled
from pdflow.methods.method import Method
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.values import Instant
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    CopyOut,
    FreePrompt,
    HoldEngine,
    LeaveRoom,
    OfferPiece,
    ResumeEngine,
    TakeRoom,
    WithdrawPieces,
)
from pdflow.serving.events import ChunkStarted, CopiedOut, Handle, LayerReady
from pdflow.serving.prefill import PrefillCore
from pdflow_sim.network.shipped_pieces import describe_piece
from pdflow_sim.nodes.ports import EngineComponents
from pdflow_sim.nodes.prefill_node import SimPrefillNode


class SimLayeredPrefillNode(SimPrefillNode):
    """The node of a prefill engine that sends layer by layer. Args: `layers`: of the rank with the most; `staging`:
    that of one rank, if there is any.
    """

    def __init__(
        self,
        components: EngineComponents,
        core: PrefillCore,
        method: Method,
        layers: int,
        early: bool,
        staging: Staging | None,
    ) -> None:
        super().__init__(components, core)
        assert self.shipping is not None
        self.carrier = self.shipping
        self.method = method
        self.layers = layers
        self.staging = staging
        self.engine.reports_chunks = early
        self.step = 0
        self.step_time = (-1, -1)
        """The beginning and the end of the step of which a chunk was reported last."""
        self.held_since: Instant = 0
        self.postponed: list[ChunkBegun | Prefilled] = []
        """Chunks of a step that has not begun after all; the end of a step too, if it has no length."""
        self.perform.update(
            {
                OfferPiece: self.offer_piece,
                WithdrawPieces: self.withdraw,
                CopyOut: self.copy_out,
                TakeRoom: self.take_room,
                LeaveRoom: self.leave_room,
                HoldEngine: self.hold_engine,
                ResumeEngine: self.resume_engine,
            }
        )

    # What the engine computes.

    def on_engine_output(self, outcome: object) -> None:
        assert type(outcome) is ChunkBegun or type(outcome) is Prefilled
        if self.held and (type(outcome) is ChunkBegun or self._is_postponed(outcome)):
            self.postponed.append(outcome)
        elif type(outcome) is ChunkBegun:
            self.begun(outcome)
        else:
            super().on_engine_output(outcome)

    def _is_postponed(self, outcome: ChunkBegun | Prefilled) -> bool:
        return any(other.seq is outcome.seq for other in self.postponed)

    def begun(self, chunk: ChunkBegun) -> None:
        """Handle the beginning of a step that computes a chunk of a prompt."""
        leg = self.legs.get(chunk.seq.handle)
        if leg is None:
            return
        if self.step_time != (chunk.start_ns, chunk.end_ns):
            self.plan(chunk.start_ns, chunk.end_ns)
        assert leg.seq.allocation is not None
        known = chunk.computed + chunk.new
        self.feed(self.role, ChunkStarted(leg.xid, self.source(leg.seq.allocation), known, self.step))

    def plan(self, start: Instant, end: Instant) -> None:
        """Schedule when each layer of a step is ready."""
        self.step += 1
        self.step_time = (start, end)
        now, lasts = self.clock.now, end - start
        for layer in range(self.layers):
            at = start + lasts * (layer + 1) // self.layers
            self.clock.call(max(0, at - now), self.layer_ready, LayerReady(self.step, layer))

    def layer_ready(self, event: LayerReady) -> None:
        if event.layer == self.layers - 1 and event.step == self.step:
            self.step_time = (-1, -1)
        if self.alive:
            self.feed(self.role, event)

    # What goes.

    def offer_piece(self, port: Port, effect: OfferPiece) -> None:
        handle, piece, number, shipping = effect.handle, effect.piece, effect.rank, self.carrier
        for rank in self.ranks if number is None else [self.ranks[number]]:
            shipping.offer(rank.address, handle, piece)

    def withdraw(self, port: Port, effect: WithdrawPieces) -> None:
        for rank in self.ranks:
            self.carrier.withdraw(rank.address, effect.handle)

    def copy_out(self, port: Port, effect: CopyOut) -> None:
        hop, handle, piece, staging = self.method.staging, effect.handle, effect.piece, self.staging
        assert hop is not None
        assert staging is not None
        if piece is None:
            tokens = self.layers * self.legs[handle].seq.prompt_tokens
        else:
            tokens = piece.stop - piece.start
        if self.metrics.trace_line is not None:
            what = "all layers" if piece is None else describe_piece(piece, self.layers)
            self.metrics.trace_line(self.name, f"copies {what}, {hop.value}")
        nbytes = tokens * staging.size.bytes_per_token
        for number, rank in enumerate(self.ranks):
            self.carrier.hops.copy(rank, hop, nbytes, partial(self.copied_out, handle, piece, number))

    def copied_out(self, handle: Handle, piece: Piece | None, rank: int, ok: bool) -> None:
        if self.alive:
            self.feed(self.role, CopiedOut(handle, piece, rank))

    # Room to send from.

    def take_room(self, port: Port, effect: TakeRoom) -> None:
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, f"reserves memory in {self.method.p_memory.value}")

    def leave_room(self, port: Port, effect: LeaveRoom) -> None:
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, f"releases memory in {self.method.p_memory.value}")

    def free(self, port: Port, effect: FreePrompt) -> None:
        if self.staging is not None and self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, "frees the prompt's KV blocks")
        super().free(port, effect)

    def newest_generation(self) -> int:
        staged = 0 if self.staging is None else self.staging.generation
        return max(super().newest_generation(), staged)

    # The engine waits.

    def hold(self) -> None:
        if not self.held:
            self.held_since = self.clock.now
        super().hold()

    def resume_steps(self) -> None:
        super().resume_steps()
        postponed, self.postponed = self.postponed, []
        waited = self.clock.now - self.held_since
        for outcome in postponed:
            if type(outcome) is ChunkBegun:
                start, end = outcome.start_ns + waited, outcome.end_ns + waited
                self.on_engine_output(ChunkBegun(outcome.seq, outcome.computed, outcome.new, start, end))
            else:
                self.on_engine_output(outcome)

    def assert_empty(self) -> None:
        super().assert_empty()
        assert not self.postponed, f"{self.name} still keeps {self.postponed}"
        assert not self.held, f"{self.name} still waits"
