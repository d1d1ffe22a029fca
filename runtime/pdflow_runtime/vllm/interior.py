"""A digest of the inside of a block, as the attention backend of this instance writes it. Peers compare theirs on first
contact: where they differ, the same keys and values would mean something else after a transfer.

Known keys and values are written into vLLM's null block, which no request reads, by the function that writes those of
requests (`do_kv_cache_update` of the layer's implementation); what is digested are the bytes at the addresses that a
transfer would move. So a digest covers the backend's packing, the CPU's instructions, and the layout that the connector
has read off the strides. All heads get the same, and the first one is digested: ranks of different TP have one digest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import torch

from pdflow.layout.descriptors import RankMemory, descriptors
from pdflow.layout.pairing import runs_within
from pdflow.layout.ranks import Pair

log = logging.getLogger(__name__)

NULL_BLOCK: Final = 0
TOKENS: Final = 8
"""Tokens whose cells are digested where a block is a cell a token."""


def interior_digest(layer: Any, caches: list[Any], memory: RankMemory, dtype: Any) -> bytes:
    """Return the digest, empty where the layer's implementation has no such function or it fails.

    Args:
        layer: the first layer of the model's attention, or None.
        caches: the KV tensors of all layers, as vLLM has them.
        memory: what the connector makes of them, with addresses counted through their allocations.
        dtype: of keys and values before they are written, which is the model's.
    """
    cache = caches[0]
    if memory.order != "opaque" and memory.block_size < TOKENS:
        return b""  # Peers of larger blocks would digest more tokens.
    if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
        log.warning(
            "pdflow: peers cannot compare the contents of KV blocks: this attention backend has no do_kv_cache_update"
        )
        return b""
    before = cache[NULL_BLOCK].clone()
    try:
        _write(layer, cache, memory.block_size, dtype)
        data = b"".join(_bytes_at(caches, at, length) for at, length in _pieces(memory))
    except Exception as error:  # Whatever a kernel raises: without the digest the names of interiors are compared.
        log.warning("pdflow: peers cannot compare the contents of KV blocks: %s: %s", type(error).__name__, error)
        return b""
    finally:
        cache[NULL_BLOCK] = before
    digest = blake2b(data, digest_size=16).digest()
    log.info("pdflow: digest of a KV block with known contents: %s", digest.hex())
    return digest


def _write(layer: Any, cache: Any, tokens: int, dtype: Any) -> None:
    """Write known keys and values of so many tokens, a block of them, into the null block."""
    impl, pattern = layer.impl, partial(_pattern, dtype=dtype, device=cache.device)
    slots = torch.arange(tokens, device=cache.device) + NULL_BLOCK * tokens
    if hasattr(impl, "kv_lora_rank"):
        latent = pattern((tokens, 1, impl.kv_lora_rank), 7).squeeze(1)
        rotary = pattern((tokens, 1, impl.qk_rope_head_dim), 11)
        impl.do_kv_cache_update(latent, rotary, cache, slots, impl.kv_cache_dtype, layer._k_scale)
    else:
        keys = pattern((tokens, layer.num_kv_heads, layer.head_size), 7)
        values = pattern((tokens, layer.num_kv_heads, layer.head_size_v), 11)
        impl.do_kv_cache_update(layer, keys, values, cache, slots)


def _pattern(shape: tuple[int, int, int], step: int, dtype: Any, device: Any) -> Any:
    """Return values of shape [tokens, heads, size] that every float of 16 bits has exactly; the same for each head."""
    tokens, _, size = shape
    positions = torch.arange(tokens, device=device).view(-1, 1, 1) * step
    numbers = (positions + torch.arange(size, device=device) * 3) % 61 - 30
    return (numbers / 32).to(dtype).expand(shape).contiguous()


def _pieces(memory: RankMemory) -> Iterator[tuple[int, int]]:
    """Yield the addresses and lengths of what is digested: the null block's first head, whole or of some tokens."""
    size = memory.block_size
    runs = runs_within((NULL_BLOCK,), size, (NULL_BLOCK,), size, 0, 0, min(TOKENS, size))
    first_head = Pair(0, 0, 0, 0, 1, 0, 0, 1, memory.cell_bytes)
    for at, _, length in descriptors(first_head, memory, memory, runs):
        yield at, length


def _bytes_at(caches: list[Any], at: int, length: int) -> bytes:
    """Return bytes of the tensors' allocations, counted through them in their order."""
    start = 0
    for storage in {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}.values():
        if start <= at < start + storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            found: bytes = flat[at - start : at - start + length].cpu().numpy().tobytes()
            return found
        start += storage.nbytes()
    raise ValueError(f"address {at} is in none of the allocations")
