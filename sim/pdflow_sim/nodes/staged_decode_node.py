"""A decode engine whose KV lands in staging memory (`pdflow/serving/landing.py`): what copies take, and when requests
that wait for room are looked at.
"""

from __future__ import annotations

from functools import partial

from pdflow.methods.method import Hop, Method
from pdflow.methods.staging import BufferStaging, Staging
from pdflow.protocol.values import Allocation, RequestId
from pdflow.serving.batch import drop
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import AskForRoom, CopyIn, Drop, GiveBackRoom, TakeRoom
from pdflow.serving.events import CopiedIn, RoomDue
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.ports import EngineComponents


class SimStagedDecodeNode(SimDecodeNode):
    """The node of a decode engine with staging memory. Args: `staging` is that of one rank."""

    def __init__(
        self,
        components: EngineComponents,
        core: DecodeCore,
        method: Method,
        staging: Staging,
    ) -> None:
        super().__init__(components, core)
        assert self.shipping is not None
        self.carrier = self.shipping
        self.method = method
        self.staging = staging
        self.loading: dict[RequestId, int] = {}
        """Copies under way, by request."""
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                TakeRoom: self.take_room,
                GiveBackRoom: self.give_back_room,
                CopyIn: self.copy_in,
            }
        )

    # Room to land in.

    def ask_for_room(self, port: Port, effect: AskForRoom) -> None:
        self.clock.call(0, self.room_due, None)

    def room_due(self, _: None) -> None:
        if self.alive:
            self.feed(self.role, RoomDue())

    def take_room(self, port: Port, effect: TakeRoom) -> None:
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, f"reserves memory in {self.method.d_memory.value}")

    def give_back_room(self, port: Port, effect: GiveBackRoom) -> None:
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(self.name, f"releases memory in {self.method.d_memory.value}")

    # The engine has made room.

    def copy_in(self, port: Port, effect: CopyIn) -> None:
        request = self.legs[effect.handle].index
        size, tokens = self.staging.size, self.metrics.records.input_tokens[request] - effect.start
        ports = self.ranks
        load_hops = [(hop, layers) for hop, layers in self.load_hops(effect.staged) if layers]
        self.loading[effect.handle] = len(ports) * len(load_hops)
        for rank in ports:
            for hop, layers in load_hops:
                nbytes = layers * size.bytes_per_token * tokens
                if self.metrics.trace_line is not None:
                    self.metrics.trace_line(self.name, f"copies {layers} layers, {hop.value}")
                self.carrier.hops.copy(rank, hop, nbytes, partial(self.copied_in, effect.handle))

    def load_hops(self, staged: Allocation) -> list[tuple[Hop, int]]:
        """Return the hops into KV blocks, and how many layers go over each: those in the host's memory go over PCIe."""
        hop = self.method.loading
        assert hop is not None
        if not isinstance(self.staging, BufferStaging):
            return [(hop, self.staging.size.layers)]
        spilled = self.staging.spilled(staged)
        return [(hop, self.staging.size.layers - spilled), (Hop.H2D, spilled)]

    def copied_in(self, handle: RequestId, ok: bool) -> None:
        if not self.alive:
            return
        left = self.loading[handle] = self.loading[handle] - 1
        if not left:
            del self.loading[handle]
            self.feed(self.role, CopiedIn(handle))

    def drop(self, port: Port, effect: Drop) -> None:
        """Drop a sequence. Blocks that are being copied into for no request are not counted as stranded: no transfer
        waits for them.
        """
        self.feed(self.role, drop(self.engine, self.legs[effect.handle], self.clock.now))
        self.rearm()

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)
