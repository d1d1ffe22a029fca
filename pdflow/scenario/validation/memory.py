"""The rules for memory that a method keeps in GPUs outside the engine's share, NCCL groups and buffers of tensors, and
for a store's capacity, at least one block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from pdflow.cost.specs import ModelSpec
from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import MemoryKind
from pdflow.methods.nccl.groups import bytes_per_gpu, most_peers
from pdflow.scenario.reading.convert import Complaint
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema.scale import Scale, most_engines
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.validation.fit import store_block_bytes, stored_hidden_bytes


def check_memory(transfer: Transfer, pools: list[tuple[KeyPath, Pool]], scales: Sequence[Scale]) -> Iterator[Complaint]:
    """Check that NCCL groups and buffers fit beside vLLM's own share, which holds weights, KV and what a step needs.

    Groups are made later with every engine that the other side ever has, or with as many as a rank keeps groups.
    """
    method = METHODS[transfer.method]
    if not method.groups:
        return
    channels = transfer.nccl_num_channels
    for path, pool in pools:
        if pool.role == "aggregated" or pool.kv_tokens is not None:
            # With kv_tokens set, the engine's share of the GPU is unknown.
            continue
        memory = method.p_memory if pool.role == "prefill" else method.d_memory
        buffer = transfer.kv_buffer_size if memory in (MemoryKind.BUFFER, MemoryKind.STORE) else 0
        others = [other for _, other in pools if {other.role, pool.role} == {"prefill", "decode"}]
        peers = sum(most_engines(other.name, other.replicas, scales) for other in others)
        kept = peers if transfer.nccl_max_groups is None else min(peers, transfer.nccl_max_groups)
        left = int((1 - Fraction(pool.gpu_memory_utilization)) * pool.gpu.device_bytes)
        need = bytes_per_gpu(kept, channels)
        if need + buffer > left:
            most = most_peers(left - buffer, channels)
            buffer_note = f" in addition to {buffer / 1e9:.1f} GB for the buffer" if buffer > 1 << 20 else ""
            yield Complaint(
                (*path, "gpu_memory_utilization"),
                f"is {pool.gpu_memory_utilization:g}, which leaves {left / 1e9:.1f} GB of each GPU, but NCCL groups "
                f"with {kept} peers need {need / 1e9:.1f} GB{buffer_note} (nccl_num_channels {channels}); expected "
                f"less, or at most {most} {'peers' if kept == peers else 'groups (nccl_max_groups)'}",
            )


def check_store(transfer: Transfer, model: ModelSpec, pools: list[tuple[KeyPath, Pool]]) -> Iterator[Complaint]:
    """Check that a store's node holds one block: else no prompt ever fits, and each would be refused by itself."""
    pool = next((pool for _, pool in pools if pool.role == "decode"), None)
    if pool is None or not METHODS[transfer.method].stores:
        return
    block = store_block_bytes(model, pool, stored_hidden_bytes(transfer, model))
    if transfer.store_bytes < block:
        one = f"one block of {pool.block_size} tokens (pool {pool.name})"
        yield Complaint(("transfer", "store_bytes"), f"is {transfer.store_bytes:,}, expected at least {block:,}: {one}")
