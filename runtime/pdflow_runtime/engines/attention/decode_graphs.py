"""Decoding on a GPU: one token of each of many sequences, as a CUDA graph for each size of batch.

A step of a small model is some 200 kernels of a few microseconds each, which Python launches more slowly than they
run. A graph launches all at once. It is captured for 16, 32, 64, ... sequences. A batch takes the next size; the rows
that it leaves over read no context, and write what the batch's last row writes, where that one writes it.

Attention reads the pages of the cache by torch's flex attention, for which a page is one head's part of a block, and a
sequence's queries of one KV head are the rows of one product.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pdflow_runtime.engines.job import Work
from pdflow_runtime.engines.kv_cache import KvCache, Pages
from pdflow_runtime.engines.model import Llama, StepInput

log = logging.getLogger(__name__)

LEAST: Final = 16
"""The fewest rows of a graph; model.py pads to as many."""
MOST: Final = 256
KERNEL_OPTIONS: Final = {dtype: {"num_warps": 1, "num_stages": 4} for dtype in (torch.bfloat16, torch.float16)}
"""The fastest of 15 settings that were tried on an H200. torch's own choice took twice as long with blocks of 16 tokens
(`python -m benchmarks.gpu attention` shows both)."""
HEAD: Final = 3
"""The numbers of a row before its block table: token, position, and the row whose KV it writes: itself, or the last."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model and its cache. Called with the engine's computing stream as the current one."""

    most: Final = MOST

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self._model: Final = model
        self._cache: Final = cache
        self._device: Final = cache.device.where
        width = -(-model.config.max_position_embeddings // cache.block_size)
        self._width: Final = min(width, cache.num_blocks)
        self._inputs: Final = torch.zeros(MOST, HEAD + self._width, dtype=torch.int32, device=self._device)
        """The rows of the step, where graphs read them."""
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        self._host_rows: Final = np.zeros((MOST, HEAD + self._width), np.int32)
        self._tables: list[tuple[int, ...]] = [()] * MOST
        """The block table in each row. Most stay where they are from step to step."""
        # One for each size of batch, and for each number of heads at a rank.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._flex: Final = torch.compile(flex_attention, dynamic=False)

    def warm_up(self, sequences: int) -> None:
        """Capture the graphs for up to so many sequences. Writes to block 0."""
        log.info("compiling kernels and capturing CUDA graphs for up to %d sequences", min(sequences, MOST))
        size = LEAST
        while True:
            self._inputs.zero_()
            self._captured(size)
            if size >= min(sequences, MOST):
                break
            size *= 2

    def forward(self, works: Seq[Work]) -> Tensor:
        """Return the logits `[works, vocab]` of works that decode, at most MOST."""
        size = LEAST
        while size < len(works):
            size *= 2
        rows = self._rows(works, size)
        self._inputs[:size, : rows.shape[1]] = torch.from_numpy(rows).to(self._device, non_blocking=True)
        graph = self._graphs.get(size) or self._captured(size)
        graph.graph.replay()
        return graph.logits[: len(works)]

    def _rows(self, works: Seq[Work], size: int) -> Any:
        """Return the step's rows, `[size, HEAD + blocks]` of int32."""
        last = len(works) - 1
        rows = self._host_rows
        rows[: last + 1, 0] = [work.tokens[0] for work in works]
        rows[: last + 1, 1] = [work.start for work in works]
        rows[: last + 1, 2] = range(last + 1)
        rows[last + 1 : size, :HEAD] = rows[last, :HEAD]
        for number in range(size):
            blocks = works[min(number, last)].blocks
            if blocks is not self._tables[number]:
                self._tables[number] = blocks
                rows[number, HEAD : HEAD + len(blocks)] = blocks[: self._width]
        return rows[:size, : HEAD + max(len(work.blocks) for work in works)]

    def _captured(self, size: int) -> _Graph:
        """Capture the graph of a size. It is run once before, with the step's own rows: what that writes to the cache
        is what the step writes."""
        self._forward(size)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads allocate and copy meanwhile, on streams of their own.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            logits = self._forward(size)
        self._pool = self._pool or graph.pool()
        captured = self._graphs[size] = _Graph(graph, logits)
        return captured

    @torch.inference_mode()
    def _forward(self, size: int) -> Tensor:
        rows = self._inputs[:size]
        tokens, positions, written, tables = rows[:, 0].long(), rows[:, 1].long(), rows[:, 2].long(), rows[:, HEAD:]
        numbers = torch.arange(size, device=self._device)
        lengths = ((positions + 1) * (written == numbers)).int()
        block_size = self._cache.block_size
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        step = StepInput(
            tokens=tokens,
            positions=positions,
            slot_mapping=self._cache.slot_mapping(blocks, positions % block_size),
            attending=(PagedAttention(self._cache, tables, lengths, blocks.int(), self._flex),),
            logits_indices=numbers,
            kv_rows=written,
        )
        return self._model.forward(step, self._cache)


class PagedAttention:
    """The attention of one row of each sequence. Args: `tables` `[rows, blocks]`; `lengths`, the positions that a row
    sees, 0 for none; `last`, the block that its own position is in, `[rows]`; all of int32."""

    def __init__(self, cache: KvCache, tables: Tensor, lengths: Tensor, last: Tensor, flex: Any) -> None:
        self.rows: Final = slice(0, len(tables))
        self._cache: Final = cache
        self._flex: Final = flex
        self._tables, self._lengths, self._last = tables, lengths, last
        self._masks: dict[tuple[int, int, int], BlockMask] = {}
        """By the shape of a rank's pages."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        rows, heads, width = q.shape
        ranks = self._cache.pages(layer)
        group = heads // sum(len(pages.heads) for pages in ranks)
        found = []
        for pages in ranks:
            own = q[:, pages.heads.start * group : pages.heads.stop * group]
            out = self._flex(
                own.reshape(rows * len(pages.heads), 1, group, width),
                pages.k.view(1, 1, -1, width),
                pages.v.view(1, 1, -1, width),
                block_mask=self._mask(pages, group),
                kernel_options=KERNEL_OPTIONS.get(q.dtype),
            )
            found.append(out.view(rows, -1, width))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _mask(self, pages: Pages, group: int) -> BlockMask:
        heads = len(pages.heads)
        known = self._masks.get((heads, pages.step, len(pages.k)))
        if known is not None:
            return known
        size, lengths = self._cache.block_size, self._lengths.repeat_interleave(heads)
        numbers = torch.arange(heads, dtype=torch.int32, device=lengths.device)
        whole = (self._tables[:, None] * pages.step + numbers[None, :, None]).flatten(0, 1)[:, None, None].contiguous()
        last = (self._last[:, None] * pages.step + numbers).flatten()[:, None, None, None]
        tails = lengths % size

        def within(row: Tensor, head: Tensor, query: Tensor, at: Tensor) -> Tensor:
            return at % size < tails[row]

        mask = BlockMask.from_kv_blocks(
            (tails > 0).int()[:, None, None],
            last.expand_as(whole).contiguous(),
            (lengths // size)[:, None, None],
            whole,
            BLOCK_SIZE=(128, size),
            mask_mod=within,
            seq_lengths=(group, len(pages.k)),
            compute_q_blocks=False,
        )
        self._masks[(heads, pages.step, len(pages.k))] = mask
        return mask
