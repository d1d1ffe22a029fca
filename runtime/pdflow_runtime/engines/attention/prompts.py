"""Attention of prompts on a GPU, by torch's fused kernels: flash attention in 16 bits, memory-efficient attention else.

The context of a prompt is gathered from its blocks: a copy of what is then read once for every 64 or 128 of its
queries.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from pdflow_runtime.engines.job import Work
from pdflow_runtime.engines.kv_cache import KvCache


class PromptAttention:
    """The rows of one sequence: a prompt, or a chunk of it."""

    def __init__(self, rows: slice, work: Work, cache: KvCache) -> None:
        self.rows: Final = rows
        self._cache: Final = cache
        self._stop: Final = work.start + len(work.tokens)
        blocks = work.blocks[: -(-self._stop // cache.block_size)]
        self._tables: Final = cache.tables(cache.device.tensor([blocks]))
        self._mask: Tensor | None = None
        """The positions that each row sees, unless it is the causal mask of a prompt's first rows."""
        if work.start:
            positions = torch.arange(self._stop, device=cache.device.where)
            self._mask = positions <= positions[work.start :, None]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        k, v = self._cache.gather(layer, self._tables)[:, :, :, : self._stop].unbind(0)
        group = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=self._mask, is_causal=self._mask is None
        )
        return out[0].transpose(0, 1)


def prompts_attending(works: Seq[Work], cache: KvCache) -> list[PromptAttention]:
    """Return the attention of these works, whose rows stand one after the other."""
    found = []
    row = 0
    for work in works:
        found.append(PromptAttention(slice(row, row + len(work.tokens)), work, cache))
        row += len(work.tokens)
    return found
