"""A runner that computes: works become one forward pass, in a thread, and logits become tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import trio

from runtime.engines.job import Sampled, Work
from runtime.engines.kv_cache import KvCache
from runtime.engines.model import Llama, Part, StepInput, context_blocks
from runtime.engines.sampling import sample


class TorchRunner:
    """One model and its cache. Steps are computed one at a time, each in trio's next idle thread."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    async def step(self, works: Seq[Work]) -> list[Sampled | None]:
        return await trio.to_thread.run_sync(self.compute, works)

    def compute(self, works: Seq[Work]) -> list[Sampled | None]:
        wants = [work.want for work in works if work.want is not None]
        logits = self._model.forward(self._input(works), self._cache)
        chosen = iter(sample(logits, wants))
        return [None if work.want is None else next(chosen) for work in works]

    def _input(self, works: Seq[Work]) -> StepInput:
        size = self._cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        parts, wanted = [], []
        for work in works:
            start, end = work.start, work.start + len(work.tokens)
            # The last block again, for what is padded: of another's nothing is read, not even in vain.
            here = work.blocks[: -(-end // size)]
            table = torch.tensor(here + here[-1:] * (context_blocks(end, size) - len(here)))
            parts.append(Part(first=len(tokens), count=end - start, start=start, blocks=table))
            tokens += work.tokens
            positions += range(start, end)
            blocks += [work.blocks[at // size] for at in range(start, end)]
            if work.want is not None:
                wanted.append(len(tokens) - 1)
        at = torch.tensor(positions)
        return StepInput(
            tokens=torch.tensor(tokens),
            positions=at,
            blocks=torch.tensor(blocks),
            offsets=at % size,
            parts=parts,
            wanted=torch.tensor(wanted, dtype=torch.int64),
        )
