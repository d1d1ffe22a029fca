"""A runner that computes nothing: it takes as long as the cost model says, and its tokens show whether KV is right.

For rehearsing a cluster that one does not have: the same scheduler, blocks and transfers, no weights. Each token's KV
begins, in every layer and head, with two words: a tag, which depends on all tokens up to it, and the tag before it. The
next token is a function of the last tag, so of the tokens so far. A tag goes on from what stands in the KV, and where
words do not fit together, of a prompt that has come from elsewhere all of them, the answer is another from there on.
What follows the two words in each head's cell is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
import trio

from pdflow.cost.step import PS_PER_NS, StepCost
from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape
from pdflow.protocol.values import Instant
from pdflow_runtime.clock import deadline_of, now_ns
from pdflow_runtime.engines.config import ModelError
from pdflow_runtime.engines.job import LayerDone, Sampled, Work
from pdflow_runtime.engines.sampling.constraints import Constraints, History, forbidden
from pdflow_runtime.engines.sampling.logprobs import Logprobs, PromptScores
from pdflow_runtime.engines.shards import Shard, shards
from pdflow_runtime.engines.step_load import StepLoad

WORD_BYTES: Final = 8
CELL_WORDS: Final = 2
MASK: Final = 2**64 - 1
START: Final = 0x9E3779B97F4A7C15
"""The tag before the first token."""
WRONG: Final = 0xA5A5A5A5A5A5A5A5
"""The number that a tag is XORed with where KV is wrong."""
SPECIAL: Final = 2
"""Tokens that no answer has: a model's first ones begin and end texts."""


class SyntheticRunner:
    """A runner whose steps take as long as `cost` says. `regions`: each rank's registered memory, in whose bytes its
    `RankMemory` counts."""

    def __init__(
        self, cost: StepCost, shape: KvShape, memories: Seq[RankMemory], regions: Seq[memoryview], vocab_size: int
    ) -> None:
        if shape.cell_bytes < CELL_WORDS * WORD_BYTES or shape.cell_bytes % WORD_BYTES:
            raise ModelError(
                f"{shape.cell_bytes} bytes per head and token: synthetic KV needs a multiple of 8, at least 16"
            )
        self.wrong = 0
        """Steps of sequences whose KV was not what it should have been."""
        self._cost: Final = cost
        self._block_size: Final = shape.block_size
        self._layers: Final = shape.num_layers
        self._choices: Final = vocab_size - SPECIAL
        self._views: Final = [_word_view(memory, region) for memory, region in zip(memories, regions, strict=True)]
        self._salts: Final = [_salts(shard, shape.tensors_per_layer) for shard in shards(shape, memories)]
        self._until: Instant = 0

    async def step(
        self, works: Seq[Work], layer_done: LayerDone | None = None, load: StepLoad | None = None
    ) -> list[Sampled | None]:
        begun = now_ns()
        prefill = [(len(work.tokens), work.start) for work in works if not work.decodes]
        contexts = [work.start + 1 for work in works if work.decodes]
        lasts = -(-self._cost.step_ps(prefill, contexts) // PS_PER_NS)
        # A driver that is late by less than a step is no engine that stood still.
        self._until = (self._until if begun - self._until < lasts else begun) + lasts
        if load is not None:
            await trio.to_thread.run_sync(load.run)
            load.check()
            # All KV is here; the step ends when the layers that had to wait for theirs would have been computed.
            end_ps = load.rule.end_ps((self._until - lasts) * PS_PER_NS, lasts * PS_PER_NS)
            self._until = -(-end_ps // PS_PER_NS)
        results = [self._compute(work) for work in works]
        if layer_done is not None:
            for layer in range(self._layers):
                left = lasts * (self._layers - 1 - layer) // self._layers
                await trio.sleep_until(deadline_of(self._until - left))
                layer_done(layer, now_ns())
        await trio.sleep_until(deadline_of(self._until))
        return results

    def _compute(self, work: Work) -> Sampled | None:
        tags = self._tags(work)
        self._write(work, tags)
        if work.scores is not None:
            self._score(work.scores, work, tags)
        token_request = work.token_request
        if token_request is None:
            return None
        sampling = token_request.sampling
        token = self._next(tags[-1] ^ (sampling.seed if sampling.temperature else 0))
        if sampling.constraints is not None and token_request.history is not None:
            token = self._constrained(token, sampling.constraints, token_request.history)
        return Sampled(token, _certain(token) if sampling.logprobs is not None else None)

    def _next(self, tag: int) -> int:
        """Return the one token that can follow a tag: all others have the probability 0."""
        return SPECIAL + _mixed(tag) % self._choices

    def _constrained(self, token: int, constraints: Constraints, history: History) -> int:
        """Return this token, or another one if it may not come. Biases and penalties, which are finite, cannot make
        another one come."""
        never = forbidden(constraints, history, self._choices + SPECIAL)
        if constraints.allowed is not None and not constraints.allows(token):
            token = constraints.allowed[_mixed(token) % len(constraints.allowed)]
        while token in never or not constraints.allows(token):
            token = (token + 1) % (self._choices + SPECIAL)
        return token

    def _score(self, scores: PromptScores, work: Work, tags: list[int]) -> None:
        for position in scores.rows(work.start, work.start + len(work.tokens)):
            expected, token = self._next(tags[position - work.start + 1]), scores.tokens[position + 1]
            top = _certain(expected).top[: scores.top]
            scores.logprobs[position + 1] = Logprobs(0.0 if token == expected else -math.inf, top)

    def _tags(self, work: Work) -> list[int]:
        """Return the tag before this work's tokens, as the KV has it, and then those of the tokens."""
        tags = [START]
        start = work.start
        if start:
            look = range(start) if work.loaded else sorted({start - 1, _mixed(start) % start})
            here = self._fit(work, np.array(look))
            tags = [self._read(work, start - 1) ^ (0 if here else WRONG)]
            self.wrong += not here
        for token in work.tokens:
            tags.append(_mixed(tags[-1] + token + 1))
        return tags

    def _read(self, work: Work, position: int) -> int:
        at, offset = divmod(position, self._block_size)
        return int(self._views[0][0, 0, work.blocks[at], 0, offset, 0]) ^ int(self._salts[0][0, 0, 0])

    def _fit(self, work: Work, positions: Any) -> bool:
        """True if all layers and heads hold the same tags at these positions, and each tag follows from its
        neighbour."""
        blocks = np.array(work.blocks)[positions // self._block_size]
        offsets = positions % self._block_size
        tags: Any = None
        for view, salts in zip(self._views, self._salts, strict=True):
            # [positions, layers, tensors, heads, words]: what is indexed comes first.
            found = view[:, :, blocks, :, offsets] ^ salts[None, ..., None]
            if tags is None:
                tags = found[:, 0, 0, 0]
            if not (found == tags[:, None, None, None]).all():
                return False
        follows = np.diff(positions) == 1
        links = tags[1:, 1] == tags[:-1, 0]
        return bool(links[follows].all() and (positions[0] or tags[0, 1] == START))

    def _write(self, work: Work, tags: list[int]) -> None:
        positions = np.arange(work.start, work.start + len(work.tokens))
        blocks = np.array(work.blocks)[positions // self._block_size]
        both = np.array([tags[1:], tags[:-1]], dtype=np.uint64).T
        for view, salts in zip(self._views, self._salts, strict=True):
            view[:, :, blocks, :, positions % self._block_size] = both[:, None, None, None] ^ salts[None, ..., None]


def _certain(token: int) -> Logprobs:
    return Logprobs(0.0, ((token, 0.0),))


def _mixed(number: int) -> int:
    """The finaliser of splitmix64."""
    number &= MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def _salts(shard: Shard, tensors: int) -> Any:
    """Return `[layers, tensors, heads]`: a number for each layer, K or V and head, whichever rank keeps it."""
    numbers = [
        [[_mixed((layer << 20) + (tensor << 16) + head + 1) for head in shard.heads] for tensor in range(tensors)]
        for layer in shard.layers
    ]
    return np.array(numbers, dtype=np.uint64)


def _word_view(memory: RankMemory, region: memoryview) -> Any:
    """Return a view `[layers, tensors, blocks, heads, block_size, 2]` of the first words of each cell of a rank."""
    cell, tensors = memory.cell_bytes, memory.tensors_per_layer
    planes = [memory.plane_address(layer, tensor, 0) for layer in range(memory.num_layers) for tensor in range(tensors)]
    step = planes[1] - planes[0] if len(planes) > 1 else 0
    assert planes == [planes[0] + index * step for index in range(len(planes))]
    head, token = (memory.block_size * cell, cell) if memory.order == "HND" else (cell, memory.num_heads * cell)
    return np.ndarray(
        (memory.num_layers, tensors, memory.num_blocks, memory.num_heads, memory.block_size, CELL_WORDS),
        dtype="<u8",
        buffer=region,
        offset=planes[0],
        strides=(tensors * step, step, memory.block_stride, head, token, WORD_BYTES),
    )
