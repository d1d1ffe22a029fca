"""What lies in the KV cache of one rank: for each slot, a fingerprint of the tokens up to there.

The KV of a token depends on every token before it. A forward pass therefore reads the fingerprints of all tokens before
its own, and writes, for each of its tokens, the fingerprint of the tokens up to there. A load of other content, or a
write into blocks that have another owner by then, is detected at the next step of the request that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.vllm.support.engine_config import HEADS, LAYERS_PER_GROUP

MASK = (1 << 62) - 1
FIRST_SAMPLED = 20_000
"""Prompts have lower tokens."""


def sampled_token(position: int) -> int:
    """The output token at this position, whatever came before."""
    return FIRST_SAMPLED + position


class Fingerprints:
    """Of one request's tokens, as many as were needed so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self.values = np.empty(0, dtype=np.int64)

    def up_to(self, num_tokens: int) -> Any:
        """`[num_tokens]`, one per position."""
        known = len(self.values)
        if known < num_tokens:
            value = int(self.values[-1]) if known else 1
            more = []
            for position in range(known, max(num_tokens, len(self.prompt))):
                token = self.prompt[position] if position < len(self.prompt) else sampled_token(position)
                value = (value * 1_000_003 + token + 1) & MASK
                more.append(value)
            self.values = np.concatenate([self.values, np.array(more, dtype=np.int64)])
        return self.values[:num_tokens]


class Chunk:
    """What one step computes of one request: tokens `start` to `end`, into blocks of each KV cache group.

    `samples`: the prompt is complete with it, so a token comes out.
    """

    def __init__(
        self,
        request_id: str,
        fingerprints: Fingerprints,
        start: int,
        end: int,
        block_ids: tuple[list[int], ...],
        samples: bool,
    ) -> None:
        self.request_id = request_id
        self.expected = fingerprints.up_to(end)
        self.start = start
        self.end = end
        self.block_ids = block_ids
        self.samples = samples
        self.slots: dict[int, tuple[int, Any, Any]] = {}

    def slots_of(self, group: int, window: int | None, block_size: int) -> tuple[int, Any, Any]:
        """(first, read, write): the first position that its tokens attend to, and the slots of those that they read
        and of those that they write, as indices of a block and within it. Layers and ranks share them."""
        if group not in self.slots:
            first = 0 if window is None else max(0, self.start - window + 1)
            positions = np.arange(first, self.end)
            blocks = np.array(self.block_ids[group], dtype=np.int64)[positions // block_size]
            offsets = positions % block_size
            known = self.start - first
            self.slots[group] = first, (blocks[:known], offsets[:known]), (blocks[known:], offsets[known:])
        return self.slots[group]


class KvMemory:
    """One rank's. `layers[name]` is `[heads of this rank, num_blocks, block_size]`; an unwritten slot is 0."""

    def __init__(self, windows: tuple[int | None, ...], num_blocks: int, block_size: int, rank: int, tp: int) -> None:
        self.windows = windows
        self.block_size = block_size
        heads = HEADS // tp
        self.heads = range(rank * heads, (rank + 1) * heads)
        self.layers: dict[str, Any] = {
            f"layers.{group}.{layer}": np.zeros((heads, num_blocks, block_size), dtype=np.int64)
            for group in range(len(windows))
            for layer in range(LAYERS_PER_GROUP)
        }

    def forward(self, layer: str, chunks: Sequence[Chunk]) -> None:
        """One layer's attention over a batch."""
        group = int(layer.split(".")[1])
        memory = self.layers[layer]
        for chunk in chunks:
            first, read, write = chunk.slots_of(group, self.windows[group], self.block_size)
            expected = chunk.expected
            if first < chunk.start:
                wrong = memory[:, *read] != expected[first : chunk.start]
                if wrong.any():
                    index = int(wrong.any(axis=0).argmax())
                    raise AssertionError(
                        f"{chunk.request_id} reads KV that is not of its tokens, in {layer} at position "
                        f"{first + index} (block {read[0][index]}); wrong are {wrong.sum()} of {wrong.size}"
                    )
            memory[:, *write] = expected[chunk.start : chunk.end]

    def copy_from(self, source: KvMemory, from_blocks: Sequence[int], to_blocks: Sequence[int], group: int = 0) -> None:
        """Whole blocks of a group: all layers, and the heads that both ranks have."""
        shared = range(max(self.heads.start, source.heads.start), min(self.heads.stop, source.heads.stop))
        ours = slice(shared.start - self.heads.start, shared.stop - self.heads.start)
        theirs = slice(shared.start - source.heads.start, shared.stop - source.heads.start)
        for layer in range(LAYERS_PER_GROUP):
            name = f"layers.{group}.{layer}"
            self.layers[name][ours, list(to_blocks)] = source.layers[name][theirs, list(from_blocks)]
