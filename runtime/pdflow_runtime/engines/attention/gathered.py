"""Attention over gathered contexts, on any device and in any dtype: the context of each sequence is copied from its
blocks, then multiplied.

Each sequence's rows are multiplied with its own context, in matrices of its own, and sums over the context go in tiles
of a fixed width, from the start on, whatever the context's length. So a sequence's numbers do not depend on who else is
in the step (model.py says where that holds to the bit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from pdflow_runtime.engines.job import Work
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.rows import ROWS, at_least_float32

TILE: Final = 128
"""Positions of context that are summed over at once."""
QUERIES: Final = 256
"""Tokens of one sequence whose attention is computed at once: bounds what a long prompt's scores take."""
CONTEXT_BYTES: Final = 2**22
"""K and V of one layer that several sequences gather at once: what fits a cache is faster than fewer products."""


class Gathered:
    """Rows of a step that attend together: several rows of one sequence, or one row of each of several. Args:
    `reaches`, each token's own position `[sequences, tokens]`; `tables`, the block table of each sequence; `group`, the
    query heads of one KV head."""

    def __init__(self, rows: slice, reaches: Tensor, tables: Seq[tuple[int, ...]], cache: KvCache, group: int) -> None:
        self.rows: Final = rows
        size = cache.block_size
        ends = [-(-(reach + 1) // size) for reach in reaches[:, -1].tolist()]
        count = context_blocks(int(reaches.max()) + 1, size)
        # The last block again, for what is padded: of another's nothing is read, not even in vain.
        whole = [[*table[:end], *table[end - 1 : end] * (count - end)] for table, end in zip(tables, ends, strict=True)]
        self._sequences: Final = len(whole)
        self._cache: Final = cache
        self._tables: Final = cache.tables(cache.device.tensor(whole))
        """The tables of their contexts, in whole tiles."""
        positions = torch.arange(count * size // TILE * TILE, device=cache.device.where)
        self._beyond: Final = positions.gt(reaches.to(positions.device).repeat(1, group)[:, None, :, None])
        """The mask of positions that each may not see: `[sequences, 1, group * tokens, positions]`."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Return the attention of `q` `[rows, heads, head_dim]` over the layer's KV."""
        kv = self._cache.gather(layer, self._tables)
        sequences, (rows, heads, width) = self._sequences, q.shape
        _, _, kv_heads, _, _ = kv.shape
        length = self._beyond.shape[-1]
        tokens, tiles = rows // sequences, length // TILE
        # [sequences, kv_heads, group * tokens, head_dim]: queries of one KV head are the rows of one product.
        flat = q.view(sequences, tokens, kv_heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        count = flat.shape[2]
        padding = (0, 0, 0, -count % ROWS)
        scores = torch.matmul(F.pad(flat, padding), kv[0, :, :, :length].transpose(2, 3))[:, :, :count]
        weights = scores.to(at_least_float32(q.dtype)) * width**-0.5
        weights.masked_fill_(self._beyond, -math.inf)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        # Tile by tile, then the tiles in order: what is masked at the end adds exactly nothing, however much it is.
        total = weights.view(sequences, kv_heads, count, tiles, TILE).sum(-1).movedim(-1, 0).contiguous().sum(0)
        tiled = F.pad(weights.to(q.dtype), padding).view(sequences, kv_heads, -1, tiles, TILE).transpose(2, 3)
        values = kv[1, :, :, :length].view(sequences, kv_heads, tiles, TILE, width)
        out: Tensor = torch.matmul(tiled, values).to(weights.dtype).sum(2)[:, :, :count] / total[..., None]
        grouped: Tensor = out.to(q.dtype).view(sequences, kv_heads, -1, tokens, width)
        return grouped.permute(0, 3, 1, 2, 4).reshape(rows, heads, width)


def gathered(works: Seq[Work], cache: KvCache, group: int) -> list[Gathered]:
    """Group the rows: sequences of one token whose contexts are of a size attend together; a prompt attends a part at a
    time. Works with one token stand first, by the size of their contexts."""
    found: list[Gathered] = []
    row = at = 0
    while at < len(works):
        work, many = works[at], len(works[at].tokens)
        if many == 1:
            alike = works[at : at + _alike(works, at, cache)]
            reaches = torch.tensor([[work.start] for work in alike])
            found.append(Gathered(slice(row, row + len(alike)), reaches, [work.blocks for work in alike], cache, group))
            at, row = at + len(alike), row + len(alike)
            continue
        for first in range(0, many, QUERIES):
            last = min(first + QUERIES, many)
            reaches = torch.arange(work.start + first, work.start + last)[None]
            found.append(Gathered(slice(row + first, row + last), reaches, [work.blocks], cache, group))
        at, row = at + 1, row + many
    return found


def context_blocks(positions: int, block_size: int) -> int:
    """Return how many blocks to gather for a context, so that it is whole tiles."""
    return -(-(-(-positions // TILE) * TILE) // block_size)


def _alike(works: Seq[Work], at: int, cache: KvCache) -> int:
    """Return how many works, from `at` on, have one token, and contexts of at most twice each other's size."""
    least = most = context_blocks(works[at].start + 1, cache.block_size)
    count = 1
    for work in works[at + 1 :]:
        blocks = context_blocks(work.start + 1, cache.block_size)
        least, most = min(least, blocks), max(most, blocks)
        if len(work.tokens) > 1 or most > 2 * least or (count + 1) * most * cache.block_bytes > CONTEXT_BYTES:
            break
        count += 1
    return count
