"""The node of a decode engine whose KV lands in memory beside its blocks (`pdflow/serving/landing.py`).

Copies are made at once, in trio's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.values import Instant
from pdflow.serving.core import Endpoint, Port
from pdflow.serving.effects import AskForRoom, CopyIn, GiveBackRoom, TakeRoom
from pdflow.serving.events import CopiedIn, RoomDue
from pdflow.serving.landing import StagedLanding
from pdflow_runtime.nodes.decode_node import LiveDecodeNode
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.transports.base import MakeTransport


class LiveStagedDecodeNode(LiveDecodeNode):
    """The node of a decode engine whose KV lands beside its blocks. Args: `staging` is that of each rank."""

    def __init__(
        self,
        config: NodeConfig,
        scheduler: ConsumerScheduler,
        ranks: Sequence[Endpoint],
        transport: MakeTransport,
        staging: Staging,
    ) -> None:
        super().__init__(config, scheduler, ranks, transport, StagedLanding(staging))
        self.staging: Staging = staging
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                TakeRoom: self.nothing,
                GiveBackRoom: self.nothing,
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

    def copy_in(self, port: Port, effect: CopyIn) -> None:
        blocks, tokens = self.table(effect.allocation).blocks, len(self.legs[effect.handle].prompt)
        for rank in self.ranks.values():
            for layer in range(rank.memory.num_layers):
                rank.copy_in(effect.staged, blocks, tokens, Piece(layer, effect.start, tokens))
        self.put(self.role, CopiedIn(effect.handle))
