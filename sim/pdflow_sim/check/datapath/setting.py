"""The smallest worlds in which methods can go wrong: two prompts of two layers, in two chunks, and room for one."""

from __future__ import annotations

from itertools import pairwise

import attrs

from pdflow.methods.guards import Guards
from pdflow.methods.method import Grain, MemoryKind, Method, PipelinePolicy
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import KvSize, Staging, comes_with_the_write, staging_of
from pdflow_sim.check.datapath.room import TOKEN_BYTES

TOKENS = 4
EDGE = 3
"""Token at which the first chunk ends: within a block."""
BLOCK_TOKENS = 2
LAYER_BYTES = TOKENS * TOKEN_BYTES
"""Bytes of one layer."""


@attrs.frozen
class Setting:
    """The parameters of a data path world: a method in a dialect, and one P for both requests or one for each
    (`ps`)."""

    method: Method
    pipeline_policy: PipelinePolicy
    ps: int
    faults: int = 1
    """Number of faults: pieces lost, or P engines that die."""

    @property
    def guards(self) -> Guards:
        return self.pipeline_policy.guards

    @property
    def room_with_write(self) -> bool:
        return comes_with_the_write(self.method, self.pipeline_policy)

    @property
    def layers(self) -> int:
        """Layers of a prompt; 1 where a prompt is sent whole."""
        return 2 if self.method.in_pieces else 1

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of a prompt, in the order in which they are computed."""
        edges = (0, EDGE, TOKENS) if self.method.grain is Grain.LAYER_CHUNK else (0, TOKENS)
        return tuple(Piece(layer, start, stop) for start, stop in pairwise(edges) for layer in range(self.layers))

    def memory(self, memory: MemoryKind) -> Staging:
        """Create an empty staging memory with room for one prompt."""
        size = KvSize(self.layers, TOKEN_BYTES)
        whole = self.layers * LAYER_BYTES
        # Of two layers one lies on the GPU, and one in the host's pool.
        buffer, pool = (LAYER_BYTES, LAYER_BYTES) if memory is MemoryKind.BUFFER else (whole, 0)
        return staging_of(memory, size, whole, buffer, pool, self.guards.reserves_whole)
