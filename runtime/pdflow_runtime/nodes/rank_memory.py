"""The memory of one rank: its KV blocks, then the lease words, then the staging memory of methods that have one. Where
these lie depends on the engine's device and on what the transport moves.

| location | the engine computes in | the transport moves |
| --- | --- | --- |
| region | the transport's region, in memory of this process | that |
| gpu | memory of a GPU | that, adopted; the words are in memory of the transport's own |
| mirrored | memory of a GPU | a copy of the blocks in host memory (`engines/host_mirror.py`) |
| unshared | memory of a GPU | nothing: the engine exchanges no KV |

Another engine's memory, such as vLLM's tensors, is adopted too; then pdflow neither reads nor writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
import numpy as np

from pdflow.layout.descriptors import Descriptor, RankMemory
from pdflow.layout.regions import KvRegion
from pdflow.layout.shapes import LayoutError
from pdflow_runtime.gpu import memory as gpu_memory
from pdflow_runtime.gpu.driver import GpuError
from pdflow_runtime.gpu.pieces import copy_pieces
from pdflow_runtime.transports.adopting import Segment, adopt, is_within_one, own_start
from pdflow_runtime.transports.base import Transport, TransportError
from pdflow_runtime.transports.joint import join

WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096
GPU: Final = 0
"""The GPU of this process: CUDA_VISIBLE_DEVICES puts it first (`process/devices.py`)."""

KvLocation: TypeAlias = Literal["region", "gpu", "mirrored", "unshared"]
StagingFactory: TypeAlias = Callable[[RankMemory, int], KvRegion]
"""Makes the staging memory of a rank, given the memory of its blocks and where the staging memory begins."""


@attrs.frozen
class AdoptedMemory:
    """KV memory that somebody else has allocated, such as vLLM's tensors. LayoutError if a region of it is not within
    one segment.

    `memory` counts its region bases through the segments, as `transports/adopting.py` does. `interior` names how the
    inside of a block is laid out (attention backend, dtype, ISA), and `interior_digest` is over a block of known
    content, empty if that is not known: two ranks that differ in either exchange nothing.
    """

    memory: RankMemory
    segments: tuple[Segment, ...]
    interior: str = ""
    interior_digest: bytes = b""

    def __attrs_post_init__(self) -> None:
        for base in self.memory.region_bases:
            if not is_within_one(self.segments, base, self.memory.region_bytes):
                raise LayoutError(
                    f"blocks from {base} to {base + self.memory.region_bytes} are not within one of the "
                    f"{len(self.segments)} segments of the memory that is adopted"
                )


@attrs.frozen(kw_only=True, eq=False)
class HeldMemory:
    """A rank's memory, as it was allocated."""

    words: memoryview
    words_at: int
    """The address of the words in the region that peers see."""
    kv: Any = None
    """The blocks, where the engine computes: bytes of this process, or a tensor of uint8 on a GPU; None if another
    engine has allocated them."""
    mirror: Any = None
    """The copy of the blocks in host memory, a tensor of uint8 that the GPU reaches; None if there is none."""
    view: memoryview | None = None
    """The region, where it is memory of this process that a transport has allocated."""
    staged: Any = None
    """The region on a GPU, with the staging memory behind the blocks."""
    kv_region: KvRegion | None = None

    def copy(self, pieces: Sequence[Descriptor]) -> None:
        """Copy pieces within the region; all of them are there when this returns."""
        if self.staged is not None:
            copy_pieces(self.staged, np.array(pieces, np.uint64).T)
            return
        view = self.view
        assert view is not None, "staging memory is never adopted"
        for at, to, length in pieces:
            view[to : to + length] = view[at : at + length]


def hold(
    location: KvLocation,
    transport: Transport,
    memory: RankMemory,
    kv_bytes: int,
    slots: int,
    staging: StagingFactory | None,
) -> HeldMemory:
    """Allocate a rank's memory. `slots`: the number of lease words. TransportError if there is not enough."""
    try:
        return _hold(location, transport, memory, kv_bytes, slots * WORD_BYTES, staging)
    except GpuError as error:
        raise TransportError(str(error)) from None


def _hold(
    location: KvLocation,
    transport: Transport,
    memory: RankMemory,
    kv_bytes: int,
    word_bytes: int,
    staging: StagingFactory | None,
) -> HeldMemory:
    if location == "unshared":
        words = transport.allocate(word_bytes)
        return HeldMemory(words=words, words_at=0, kv=gpu_memory.allocate(kv_bytes, GPU))
    if location == "gpu":
        return _on_gpu(transport, memory, kv_bytes, word_bytes, staging)
    words_at = _next(kv_bytes, WORD_BYTES)
    end = words_at + word_bytes
    kv_region = None if staging is None else staging(memory, _next(end, PAGE_BYTES))
    view = transport.allocate(end if kv_region is None else end_of(kv_region))
    own: dict[str, Any] = {"kv": view[:kv_bytes]}
    if location == "mirrored":
        mirror = gpu_memory.pinned(view[:kv_bytes], GPU)
        own = {"kv": gpu_memory.allocate(kv_bytes, GPU), "mirror": mirror}
    return HeldMemory(words=view[words_at:end], words_at=words_at, view=view, kv_region=kv_region, **own)


def _on_gpu(
    transport: Transport, memory: RankMemory, kv_bytes: int, word_bytes: int, staging: StagingFactory | None
) -> HeldMemory:
    kv_region = None if staging is None else staging(memory, _next(kv_bytes, PAGE_BYTES))
    region = gpu_memory.allocate(kv_bytes if kv_region is None else end_of(kv_region), GPU)
    segments = [Segment(region.data_ptr(), len(region), GPU)]
    words = adopt(transport, segments, word_bytes)
    return HeldMemory(
        words=words, words_at=own_start(segments), kv=region[:kv_bytes], staged=region, kv_region=kv_region
    )


def hold_adopted(adopted: AdoptedMemory, transport: Transport, slots: int) -> HeldMemory:
    """Have a transport use memory that another engine has allocated. TransportError."""
    words = adopt(transport, adopted.segments, slots * WORD_BYTES)
    return HeldMemory(words=words, words_at=own_start(adopted.segments))


def hold_jointly(owner: HeldMemory, transport: Transport, owners: Transport) -> HeldMemory:
    """Have a transport use the memory of another rank, whose transport is `owners`."""
    join(transport, owners)
    return owner


def check_adopted(adopted: RankMemory, expected: RankMemory, staging: StagingFactory | None) -> None:
    """Raise ValueError if this memory cannot be that of a rank whose own would be the other one."""
    if staging is not None:
        raise ValueError("adopted KV memory has no staging memory: pdflow neither reads nor writes it")
    for name in ("num_blocks", "block_size", "num_layers", "tensors_per_layer", "num_heads", "cell_bytes"):
        if getattr(adopted, name) != getattr(expected, name):
            raise LayoutError(
                f"{name} is {getattr(adopted, name)} in the memory that is adopted, and {getattr(expected, name)} in "
                "the model's rank"
            )


def end_of(region: KvRegion) -> int:
    """Return the address of the first byte behind the region."""
    memory = region.memory
    if region.kind == "ring":
        return memory.region_bases[0] + region.ring_bytes
    planes = memory.num_layers * memory.tensors_per_layer
    return memory.region_bases[0] + planes * memory.num_blocks * memory.plane_bytes


def _next(offset: int, multiple: int) -> int:
    return -(-offset // multiple) * multiple
