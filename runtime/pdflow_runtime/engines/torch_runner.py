"""A runner that computes the model in torch: works become one forward pass, in a thread, and logits become tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
import trio
from torch import Tensor

from pdflow_runtime.clock import clock_for_threads
from pdflow_runtime.engines.job import LayerDone, Sampled, Work
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.malloc import keep_what_is_freed
from pdflow_runtime.engines.model import (
    CONTEXT_BYTES,
    QUERIES,
    TILE,
    Attending,
    Llama,
    StepInput,
    beyond,
    context_blocks,
)
from pdflow_runtime.engines.sampling import sample


class TorchRunner:
    """A runner of one model and its cache. Steps are computed one at a time, each in trio's next idle thread."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        keep_what_is_freed()
        self._model = model
        self._cache = cache

    async def step(self, works: Seq[Work], layer_done: LayerDone | None = None) -> list[Sampled | None]:
        if layer_done is None:
            return await trio.to_thread.run_sync(self.compute, works)
        # In the order of the calls, and before what the thread returns.
        soon = trio.lowlevel.current_trio_token().run_sync_soon
        now = clock_for_threads()
        return await trio.to_thread.run_sync(self.compute, works, lambda layer: soon(layer_done, layer, now()))

    def compute(self, works: Seq[Work], written: Callable[[int], None] | None = None) -> list[Sampled | None]:
        # Those with one token by the size of their contexts: neighbours attend together.
        order = sorted(range(len(works)), key=lambda at: (len(works[at].tokens) > 1, works[at].start))
        ordered = [works[at] for at in order]
        logits = self._model.forward(self._input(ordered), self._cache, written)
        to_sample = [at for at in order if works[at].token_request is not None]
        chosen = dict(
            zip(
                to_sample,
                sample(logits, [token_request for work in ordered if (token_request := work.token_request)]),
                strict=True,
            )
        )
        return [chosen.get(at) for at in range(len(works))]

    def _input(self, works: Seq[Work]) -> StepInput:
        size, cache = self._cache.block_size, self._cache
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        logits_indices = []
        for work in works:
            end = work.start + len(work.tokens)
            tokens += work.tokens
            positions += range(work.start, end)
            blocks += [work.blocks[at // size] for at in range(work.start, end)]
            if work.token_request is not None:
                logits_indices.append(len(tokens) - 1)
        self._clear_ends(works)
        at = torch.tensor(positions)
        return StepInput(
            tokens=torch.tensor(tokens),
            positions=at,
            slot_mapping=cache.slot_mapping(torch.tensor(blocks), at % size),
            attending=self._attending(works),
            logits_indices=torch.tensor(logits_indices, dtype=torch.int64),
        )

    def _attending(self, works: Seq[Work]) -> list[Attending]:
        """Group the rows: sequences of one token whose contexts are of a size attend together; a prompt attends a part
        at a time."""
        found: list[Attending] = []
        row = at = 0
        while at < len(works):
            many = len(works[at].tokens)
            if many == 1:
                several = self._alike(works, at)
                found.append(self._together(works[at : at + several], row))
                at, row = at + several, row + several
                continue
            for first in range(0, many, QUERIES):
                last = min(first + QUERIES, many)
                found.append(self._query_chunk(works[at], first, last, row))
            at, row = at + 1, row + many
        return found

    def _alike(self, works: Seq[Work], at: int) -> int:
        """Return how many works, from `at` on, have one token, and contexts of at most twice each other's size."""
        least = most = context_blocks(works[at].start + 1, self._cache.block_size)
        count = 1
        for work in works[at + 1 :]:
            blocks = context_blocks(work.start + 1, self._cache.block_size)
            least, most = min(least, blocks), max(most, blocks)
            if len(work.tokens) > 1 or most > 2 * least or (count + 1) * most * self._cache.block_bytes > CONTEXT_BYTES:
                break
            count += 1
        return count

    def _together(self, works: Seq[Work], row: int) -> Attending:
        reaches = torch.tensor([[work.start] for work in works])
        return self._attend(slice(row, row + len(works)), reaches, [work.blocks for work in works])

    def _query_chunk(self, work: Work, first: int, last: int, row: int) -> Attending:
        reaches = torch.arange(work.start + first, work.start + last)[None]
        return self._attend(slice(row + first, row + last), reaches, [work.blocks])

    def _attend(self, rows: slice, reaches: Tensor, tables: Seq[tuple[int, ...]]) -> Attending:
        size = self._cache.block_size
        ends = [-(-(reach + 1) // size) for reach in reaches[:, -1].tolist()]
        count = context_blocks(int(reaches.max()) + 1, size)
        # The last block again, for what is padded: of another's nothing is read, not even in vain.
        whole = [[*table[:end], *table[end - 1 : end] * (count - end)] for table, end in zip(tables, ends, strict=True)]
        return Attending(
            rows=rows,
            sequences=len(whole),
            tables=self._cache.tables(torch.tensor(whole)),
            beyond=beyond(reaches, self._model.group, count * size // TILE * TILE),
        )

    def _clear_ends(self, works: Seq[Work]) -> None:
        """Zero the slots beyond each sequence's end in its last block: they may hold anything, and 0 times infinity is
        no number."""
        size = self._cache.block_size
        blocks: list[int] = []
        offsets: list[int] = []
        for work in works:
            end = work.start + len(work.tokens)
            if end % size and (work.loaded or not work.decodes or not work.start % size):
                blocks += [work.blocks[end // size]] * (size - end % size)
                offsets += range(end % size, size)
        if blocks:
            self._cache.clear(torch.tensor(blocks), torch.tensor(offsets))
