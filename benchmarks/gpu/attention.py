"""Attention of one token each of 64 sequences over pages, by the size of a block, against the KV that it must read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (its name everywhere)
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.gpu.timing import copy_bytes_per_s, gpu_us, in_graph_us
from pdflow.layout.descriptors import rank_memory
from pdflow.layout.shapes import KvShape
from pdflow_runtime.engines.attention import decode_graphs
from pdflow_runtime.engines.attention.decode_graphs import PagedAttention
from pdflow_runtime.engines.device import Cuda
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.weights import DTYPES
from pdflow_runtime.gpu.memory import allocate

SEQUENCES, CONTEXT, KV_HEADS, HEADS, WIDTH = 64, 1024, 8, 32, 64


def main() -> int:
    bandwidth = copy_bytes_per_s()
    flex: Any = torch.compile(flex_attention, dynamic=False)
    print(f"{SEQUENCES} sequences at {CONTEXT} tokens, {HEADS} heads on {KV_HEADS}, head_dim {WIDTH}; one layer")
    print("| dtype | block_size | over pages | torch's options | the KV at a copy's bandwidth | gather, SDPA |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype, size in (("bfloat16", 16), ("bfloat16", 32), ("bfloat16", 64), ("bfloat16", 128), ("float32", 64)):
        blocks_each = CONTEXT // size
        numbers = random.Random(0).sample(range(SEQUENCES * blocks_each), SEQUENCES * blocks_each)
        tables = torch.tensor(numbers, dtype=torch.int32, device="cuda").view(SEQUENCES, blocks_each)
        shape = KvShape(1, KV_HEADS, WIDTH, DTYPES[dtype].itemsize, size)
        memory = rank_memory(shape, len(numbers), 1)
        region = allocate(shape.rank_block_bytes(1, 1, 0) * len(numbers), 0)
        region.view(DTYPES[dtype]).normal_()
        cache = KvCache(shape, [memory], [region], DTYPES[dtype], Cuda())
        lengths = torch.full((SEQUENCES,), CONTEXT - 3, dtype=torch.int32, device="cuda")
        paged = PagedAttention(cache, tables, lengths, tables[:, -1].contiguous(), flex)
        q = torch.randn(SEQUENCES, HEADS, WIDTH, dtype=DTYPES[dtype], device="cuda")
        whole = cache.tables(tables.long())

        def gathered(q: Any = q, cache: KvCache = cache, whole: Any = whole) -> Any:
            k, v = cache.gather(0, whole).unbind(0)
            return F.scaled_dot_product_attention(q.view(SEQUENCES, KV_HEADS, -1, WIDTH), k, v)

        us = in_graph_us(lambda paged=paged, q=q: paged.attend(0, q), 10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_graphs, "KERNEL_OPTIONS", {})
            own_us = in_graph_us(lambda paged=paged, q=q: paged.attend(0, q), 10)
        least = len(region) / bandwidth * 1e6
        times = f"{us:.0f} us | {own_us:.0f} us | {least:.0f} us | {gpu_us(gathered):.0f} us"
        print(f"| {dtype} | {size} | {times} |", flush=True)
    return 0
