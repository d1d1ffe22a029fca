"""The memory beside the blocks of a live engine: how much there is, which prompts have room in it, where it lies in a
rank's region.

A ring is the same as in simulations. Gathered tensors, P2P NCCL's buffer and pool, its store and Mooncake's lookup
buffer are pages here, each as large as a KV block: what lies there needs an address. None has more than an engine's own
blocks could fill, whatever the scenario allows, so that a laptop need not give 32 GiB for a pool.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.regions import KvRegion
from pdflow.methods.method import MemoryKind
from pdflow.methods.staging import PagedStaging, RingStaging, Staging
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.transfer import Transfer
from pdflow.wiring.engines import EngineWiring
from pdflow_runtime.nodes.rank_memory import StagingFactory

STEP_BYTES: Final = 4096
"""Parts of a ring begin at multiples of this."""


def make_staging(wiring: EngineWiring, memory: MemoryKind, pool: Pool) -> tuple[Staging, StagingFactory]:
    """Make an empty memory of this kind for an engine of this pool, and the factory of each rank's share of it."""
    size, blocks = wiring.staged_size(pool), wiring.blocks_of(pool)
    transfer = wiring.scenario.transfer
    if memory is MemoryKind.RING:
        layer_bytes = size.bytes_per_token * pool.block_size * blocks
        most = size.layers * (-(-layer_bytes // STEP_BYTES) * STEP_BYTES)
        staging = RingStaging.of_bytes(size, min(transfer.host_buffer_bytes, most), STEP_BYTES, pool.block_size)
        ring_bytes = staging.ring.capacity_bytes
        return staging, lambda rank, at: KvRegion("ring", _moved(rank, at, 1), ring_bytes, staging.ring.step_bytes)
    page_bytes = size.layers * size.bytes_per_token * pool.block_size
    pages = min(blocks, bytes_of(transfer, memory) // page_bytes) if memory is not MemoryKind.TENSORS else blocks
    paged = PagedStaging(size, pool.block_size, pages, evicts=memory is MemoryKind.STORE)
    return paged, staging_pages(pages)


def staging_pages(count: int) -> StagingFactory:
    """Return the factory of this many pages beside the blocks of each rank."""
    return lambda rank, at: KvRegion("pages", _moved(rank, at, count))


class RoomState(msgspec.Struct, frozen=True):
    """The state of the staging memory, at each rank."""

    bytes: int
    free: int
    prompts: int
    """The number of prompts that have room there."""
    waiting: int
    """The number of prompts that wait for room."""


def room_state(staging: Staging) -> RoomState:
    """Return the state for people: what a ring holds behind its oldest part is not free, though it may have been
    released."""
    match staging:
        case RingStaging(ring=ring):
            room, free = ring.capacity_bytes, ring.free_bytes
        case PagedStaging(num_pages=pages):
            page_bytes = staging.bytes_of(staging.block_size)
            room, free = pages * page_bytes, len(staging.free) * page_bytes
        case _:
            raise AssertionError(f"no live engine has staging memory of type {type(staging).__name__}")
    return RoomState(room, free, len(staging.held), len(staging.waiting))


def bytes_of(transfer: Transfer, memory: MemoryKind) -> int:
    """Return the bytes that a scenario allows a rank."""
    return transfer.kv_buffer_size + (transfer.mem_pool_size_gb << 30 if memory is MemoryKind.BUFFER else 0)


def _moved(memory: RankMemory, at: int, num_blocks: int) -> RankMemory:
    """Return the layout of so many blocks that look like these, side by side from `at` on."""
    step = num_blocks * memory.plane_bytes
    planes = range(memory.num_layers * memory.tensors_per_layer)
    return msgspec.structs.replace(
        memory,
        region_bases=tuple([at + plane * step for plane in planes]),
        block_stride=memory.plane_bytes,
        num_blocks=num_blocks,
        nesting="layer-major",
    )
