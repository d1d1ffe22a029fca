"""The KV capacity of a pool's engines and the sizes of its KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec

from pdflow.cost.capacity import kv_capacity_tokens
from pdflow.cost.specs import ModelSpec
from pdflow.layout.shapes import KvShape, MlaDims
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.schema.scenario import Pool
from pdflow.scenario.schema.transfer import Transfer

HIDDEN_BYTES_PER_VALUE = 2
"""Hidden states of the V0 connectors, in 16 bits."""


def as_kept(model: ModelSpec, transfer: Transfer, pools: Iterable[Pool]) -> tuple[ModelSpec, str]:
    """Return the model as engines keep it with this method, and a note if that is more than its windows, or ""."""
    if model.window is None or not model.dropping_layers or all(pool.role == "aggregated" for pool in pools):
        return model, ""
    if moves_groups(transfer):
        return model, ""
    how = f"{transfer.method} with progressive" if transfer.progressive else transfer.method
    note = f"layers with a window keep whole contexts: {how} moves one KV cache group only"
    return attrs.evolve(model, window=attrs.evolve(model.window, whole_kv=True)), note


def moves_groups(transfer: Transfer) -> bool:
    """Return whether the method moves several KV cache groups, each as it is kept."""
    method = transfer.adapted_method()
    return method.hybrid and not (method.in_pieces or method.staged_at_p or method.staged_at_d)


def kv_tokens_of(model: ModelSpec, pool: Pool) -> int:
    """Return the KV capacity of one engine of the pool, in tokens, a whole number of blocks of each of its replicas.

    `kv_tokens`, where the pool says it, is taken at its word, as vLLM's log line is. Raises ValueError, with a sentence
    for the scenario's author, if not even one block fits.
    """
    replicas = pool.attention_replicas
    if pool.kv_tokens is None:
        share, block_size = pool.gpu_memory_utilization, pool.block_size
        tokens = kv_capacity_tokens(model, pool.gpu, pool.tp, pool.pp, share, block_size, dp=replicas, ep=pool.ep)
        return replicas * tokens
    blocks = pool.kv_tokens // pool.block_size
    if blocks < 1:
        raise ValueError(f"kv_tokens {pool.kv_tokens} is less than one block of {pool.block_size} tokens")
    return replicas * blocks * pool.block_size


def kv_shape_of(model: ModelSpec, pool: Pool) -> KvShape:
    """Return the geometry of this model's KV in this pool's blocks."""
    mla = None if model.mla is None else MlaDims(model.mla.kv_lora_rank, model.mla.qk_rope_head_dim)
    return KvShape(
        num_layers=model.attention_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        bytes_per_value=model.kv_bytes_per_value,
        block_size=pool.block_size,
        mla=mla,
        index_bytes=model.index_bytes_per_token,
        index_layers=0 if model.sparse_attention is None else model.sparse_attention.layers,
    )


def moved_shape_of(model: ModelSpec, pool: Pool) -> KvShape:
    """Return the geometry of what a transfer moves of this model's KV: of layers with a window, the blocks at the
    prompt's end that vLLM's NIXL connector names (`get_sw_clipped_blocks`: the window's, and one more); and all states.
    """
    states = 0 if model.linear_attention is None else 2 * model.linear_attention.layers
    shape = msgspec.structs.replace(kv_shape_of(model, pool), state_bytes=model.state_bytes, state_tensors=states)
    if model.window is None or not model.dropping_layers:
        return shape
    return msgspec.structs.replace(
        shape,
        window_layers=model.dropping_layers,
        window_tokens=(-(-model.window.tokens // pool.block_size) + 1) * pool.block_size,
    )


def stored_hidden_bytes(transfer: Transfer, model: ModelSpec) -> int:
    """Return the bytes that a store keeps of one token at one rank beside its KV."""
    method = METHODS[transfer.method]
    hidden = transfer.store_hidden_states or method.pipeline_policy(transfer.dialect).hidden_states
    return model.hidden_size * HIDDEN_BYTES_PER_VALUE if method.stores and hidden else 0


def store_block_bytes(model: ModelSpec, pool: Pool, hidden_bytes: int) -> int:
    """Return the bytes of a block of this pool in a store's node, with `hidden_bytes` per token and rank beside KV."""
    token_bytes = kv_shape_of(model, pool).engine_bytes_per_token(pool.tp) + hidden_bytes * pool.tp
    return token_bytes * pool.block_size
