"""The digest of the inside of a block: alike for all that keep the same keys and values as the same bytes, and for no
others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="KV tensors are torch's")

from pdflow.layout.shapes import KvShape, MlaDims  # noqa: E402
from pdflow_runtime.vllm.interior import NULL_BLOCK, interior_digest  # noqa: E402
from pdflow_runtime.vllm.worker.kv_memory import adopted_memory  # noqa: E402

BLOCKS, HEADS, DIM, LAYERS = 3, 4, 8, 2


class CellWriter:
    """Writes K and V of each token side by side, as the backends of GPUs do. `swapped`: V comes first."""

    def __init__(self, swapped: bool = False) -> None:
        self.swapped = swapped

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        size = cache.shape[2]
        cells = torch.cat((values, keys) if self.swapped else (keys, values), dim=2)
        for token, slot in enumerate(slots.tolist()):
            cache[slot // size, :, slot % size] = cells[token]


class PackedWriter:
    """Writes K of all tokens of a head and then V, as vLLM's attention on CPUs does, in groups of so many tokens."""

    def __init__(self, group: int) -> None:
        self.group = group

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        for head in range(keys.shape[1]):
            packed = [each[:, head].reshape(-1, self.group, DIM).transpose(1, 2).flatten() for each in (keys, values)]
            cache[NULL_BLOCK, head] = torch.cat(packed).view(cache.shape[2:])


class LatentWriter:
    """Writes MLA's latent and its rotary part. `gap`: values between them."""

    kv_lora_rank, qk_rope_head_dim, kv_cache_dtype = 6, 2, "auto"

    def do_kv_cache_update(self, latent: Any, rotary: Any, cache: Any, slots: Any, dtype: str, scale: Any) -> None:
        cache[NULL_BLOCK, : len(slots)] = torch.cat((latent, rotary.squeeze(1)), dim=1)


def layer(impl: Any, heads: int = HEADS) -> Any:
    return SimpleNamespace(impl=impl, num_kv_heads=heads, head_size=DIM, head_size_v=DIM, _k_scale=None)


def digest(
    impl: Any,
    *,
    backend: str = "FLASH_ATTN",
    tp: int = 1,
    block: int = 16,
    nhd: bool = False,
    dtype: Any = torch.float32,
) -> bytes:
    heads = HEADS // tp
    shape = (BLOCKS, block, heads, 2 * DIM) if nhd else (BLOCKS, heads, block, 2 * DIM)
    caches = [torch.full(shape, 3.0, dtype=dtype) for _ in range(LAYERS)]
    caches = [cache.permute(0, 2, 1, 3) if nhd else cache for cache in caches]
    whole = KvShape(LAYERS, HEADS, DIM, dtype.itemsize, block, packed=True)
    memory = adopted_memory({f"l.{n}": each for n, each in enumerate(caches)}, whole, tp, backend, "", BLOCKS)
    found = interior_digest(layer(impl, heads), caches, memory.memory, dtype)
    assert all(bool((cache == 3.0).all()) for cache in caches), "the block is as it was"
    return found


def test_it_is_alike_for_every_tp_block_size_and_order_of_heads() -> None:
    alike = {
        digest(CellWriter(), tp=tp, block=block, nhd=nhd) for tp in (1, 2, 4) for block in (16, 32) for nhd in (0, 1)
    }
    assert len(alike) == 1
    assert alike != {b""}


def test_it_differs_for_what_is_written_otherwise() -> None:
    found = [
        digest(CellWriter()),
        digest(CellWriter(swapped=True)),
        digest(CellWriter(), dtype=torch.bfloat16),
        *(digest(PackedWriter(group), backend="CPU_ATTN") for group in (4, 8, 16)),
    ]
    assert len(set(found)) == len(found)
    assert digest(PackedWriter(8), backend="CPU_ATTN", tp=2) == found[4]


def test_mla_has_one_latent_a_token() -> None:
    caches = [torch.zeros(BLOCKS, 16, DIM) for _ in range(LAYERS)]
    shape = KvShape(LAYERS, 1, DIM, 4, 16, mla=MlaDims(DIM, 0))
    memory = adopted_memory({f"l.{n}": each for n, each in enumerate(caches)}, shape, 4, "FLASHMLA", "", BLOCKS)
    assert interior_digest(layer(LatentWriter()), caches, memory.memory, torch.float32)


class Failing:
    def do_kv_cache_update(self, *_: Any) -> None:
        raise RuntimeError("no kernel")


@pytest.mark.parametrize("impl", [object(), Failing()])
def test_where_it_cannot_be_had_it_is_empty_and_a_log_line_says_so(impl: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert digest(impl) == b""
    assert "peers cannot compare the contents of KV blocks" in caplog.text


def test_a_model_that_is_not_loaded_has_none() -> None:
    cache = torch.zeros(BLOCKS, HEADS, 16, 2 * DIM)
    memory = adopted_memory({"l.0": cache}, KvShape(1, HEADS, DIM, 4, 16, packed=True), 1, "FLASH_ATTN", "", BLOCKS)
    assert interior_digest(None, [cache], memory.memory, torch.float32) == b""
