"""The node of a decode engine whose KV lands in staging memory (`pdflow/serving/landing.py`).

Copies are made at once, in trio's thread; with `by_layer`, by the step that admits the request, layer by layer
(`engines/step_load.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import trio

from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.values import Allocation, Instant
from pdflow.serving.core import Endpoint, Port
from pdflow.serving.effects import AskForRoom, CopyIn, GiveBackRoom, LoadInStep, TakeRoom
from pdflow.serving.events import CopiedIn, RoomDue
from pdflow.serving.landing import StagedLanding
from pdflow_runtime.nodes.decode_node import LiveDecodeNode
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.transports.base import MakeTransport


class LiveStagedDecodeNode(LiveDecodeNode):
    """The node of a decode engine whose KV lands in staging memory. Args: `staging` is that of each rank; `by_layer`:
    a prompt is copied into blocks layer by layer, in its first step."""

    def __init__(
        self,
        config: NodeConfig,
        scheduler: ConsumerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        staging: Staging,
        by_layer: bool = False,
    ) -> None:
        super().__init__(config, scheduler, ranks, transport, StagedLanding(staging, by_layer))
        self.staging: Staging = staging
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                TakeRoom: self.nothing,
                GiveBackRoom: self.nothing,
                LoadInStep: self.load_in_step,
                CopyIn: self.copy_in,
            }
        )

    def newest_generation(self) -> int:
        return self.staging.generation

    def is_drained(self) -> bool:
        """True if the blocks are free and no room beside them is held; room in quarantine is."""
        return super().is_drained() and not self.staging.held

    def ask_for_room(self, port: Port, effect: AskForRoom) -> None:
        self.admit_soon()

    def admissions(self, now: Instant) -> Iterator[tuple[Port, Any]]:
        yield self.role, RoomDue()

    def nothing(self, port: Port, effect: TakeRoom | GiveBackRoom) -> None:
        """Do nothing: peers write where they were granted room, and nothing here depends on which prompt has which."""

    def load_in_step(self, port: Port, effect: LoadInStep) -> None:
        self.legs[effect.handle].job.seq.loads_in_step = True

    def copy_in(self, port: Port, effect: CopyIn) -> None:
        leg, layers = self.legs[effect.handle], self.config.shape.num_layers
        blocks, copied = self.table(effect.allocation).blocks, CopiedIn(effect.handle)
        copy = partial(self.copy_layer, effect.staged, blocks, effect.start, len(leg.prompt))
        seq = leg.job.seq
        if seq.loads_in_step:
            soon = trio.lowlevel.current_trio_token().run_sync_soon
            self.engine.load_in_step(seq, layers, copy, lambda: soon(self.put, self.role, copied))
            return
        for rank in self.ranks.values():
            self._copy_rank(rank, effect.staged, blocks, Piece(0, effect.start, len(leg.prompt)), rank.layers)
        self.put(self.role, copied)

    def copy_layer(self, staged: Allocation, blocks: Sequence[int], start: int, stop: int, layer: int) -> None:
        """Copy a layer of a prompt of `stop` tokens, from `start` on, at all ranks that keep it. In any thread."""
        for rank in self.ranks.values():
            if layer in rank.layers:
                self._copy_rank(rank, staged, blocks, Piece(0, start, stop), range(layer, layer + 1))

    def _copy_rank(self, rank: Any, staged: Allocation, blocks: Sequence[int], tokens: Piece, layers: range) -> None:
        for layer in layers:
            rank.copy_in(staged, blocks, tokens.stop, Piece(layer - rank.layers.start, tokens.start, tokens.stop))
