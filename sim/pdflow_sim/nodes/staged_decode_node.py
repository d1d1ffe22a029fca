"""A decode engine whose KV lands in staging memory (`pdflow/serving/landing.py`): what copies take, and when requests
that wait for room are looked at.
"""

from __future__ import annotations

from functools import partial

from pdflow.engine.hosted import HostedEngine
from pdflow.engine.layered import LayeredLoad
from pdflow.engine.sequence import Sequence
from pdflow.methods.method import Hop, Method
from pdflow.methods.staging import BufferStaging, Staging
from pdflow.protocol.values import Allocation, RequestId
from pdflow.serving.batch import drop
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import AskForRoom, CopyIn, Drop, GiveBackRoom, LoadInStep, TakeRoom
from pdflow.serving.events import CopiedIn, RoomDue
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.node import SimPort
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
        """Copies under way, by request: one of each rank where they are made by layer, else one of each hop."""
        self.layered: LayeredLoad | None = None
        """The layers that the running step waits for."""
        self.in_step: dict[RequestId, Sequence] = {}
        """Sequences whose layers are being copied for the running step."""
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                TakeRoom: self.take_room,
                GiveBackRoom: self.give_back_room,
                LoadInStep: self.load_in_step,
                CopyIn: self.copy_in,
            }
        )

    @property
    def host(self) -> HostedEngine:
        assert isinstance(self.engine, HostedEngine)
        return self.engine

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

    def load_in_step(self, port: Port, effect: LoadInStep) -> None:
        self.legs[effect.handle].loads_in_step = True

    def copy_in(self, port: Port, effect: CopyIn) -> None:
        seq = self.legs[effect.handle]
        if seq.loads_in_step:
            self.in_step[effect.handle] = seq
            self.copy_by_layer(effect)
        else:
            self.copy_whole(effect)

    def copy_by_layer(self, effect: CopyIn) -> None:
        """Begin the copies of a request that the running step waits for."""
        if self.layered is None:
            self.layered = LayeredLoad(sum(layers for _, layers in self.load_hops(effect.staged)))
        self.layered.begin(len(self.ranks))
        request = self.legs[effect.handle].index
        nbytes = self.staging.size.bytes_per_token * (self.prompt_tokens(request) - effect.start)
        self.loading[effect.handle] = len(self.ranks)
        for rank in self.ranks:
            self.copy_layer(effect.handle, rank, nbytes, 0)

    def copy_layer(self, handle: RequestId, rank: SimPort, nbytes: int, layer: int) -> None:
        hop = self.method.loading
        assert hop is not None
        if self.metrics.trace_line is not None:
            self.metrics.trace_line(rank.address, f"copies layer {layer}, {hop.value}")
        then = partial(self.copied_layer, handle, rank, nbytes, layer)
        self.carrier.hops.copy(rank, hop, nbytes, then, queued=layer > 0)

    def copied_layer(self, handle: RequestId, rank: SimPort, nbytes: int, layer: int, ok: bool) -> None:
        """Copy a rank's next layer; with the last one, the step waits for this request no more."""
        layered = self.layered
        if not self.alive or layered is None:
            return
        layered.copied(layer, self.clock.now)
        if layer + 1 < layered.layers:
            self.copy_layer(handle, rank, nbytes, layer + 1)
        elif self.loading[handle] > 1:
            self.loading[handle] -= 1
        else:
            seq = self.in_step.pop(handle)
            self.wait_no_more(seq)
            self.copied_in(handle, ok)

    def wait_no_more(self, seq: Sequence) -> None:
        self.host.wait_no_more(seq, self.clock.now, self.layered)
        if not self.host.awaits_layers:
            self.layered = None
        self.rearm()

    def copy_whole(self, effect: CopyIn) -> None:
        request = self.legs[effect.handle].index
        size, tokens = self.staging.size, self.prompt_tokens(request) - effect.start
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
        seq = self.legs[effect.handle]
        self.feed(self.role, drop(self.engine, seq, self.clock.now))
        if seq.loads_in_step and effect.handle not in self.in_step and self.host.awaits(seq):
            # Its admission is not known yet, and will be followed by no copy.
            self.wait_no_more(seq)
        self.rearm()

    def newest_generation(self) -> int:
        return max(super().newest_generation(), self.staging.generation)
