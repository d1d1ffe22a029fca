"""Pairing of source blocks with target blocks: by token position, never by list ends.

This module computes runs of tokens from two block lists; layers, heads and addresses are not its concern.

P's blocks begin at token 0 of the prompt. D's list covers only what D lacks: tokens `token_start` and on, where
`token_start` (a prefix hit) is a multiple of D's block size. Trimming lists against each other's ends (as vLLM 0.32.0
does) is right only when both end at the same token and have one block size; one block too many shifts every token
silently (R52). Here a list that is longer than the range does no harm, and one that is too short is an error.

One block size divides the other. A run never crosses a border of the smaller block: the larger side's blocks are cut.
So the count of runs has a closed form, which a simulator uses instead of the lists.

Source: spec 1.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdflow.layout.shapes import LayoutError
from pdflow.protocol.values import Value


class TokenRun(Value, frozen=True, gc=False):
    """Consecutive tokens that lie in one source block and in one target block; offsets are in tokens."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    tokens: int


class RunCounts(Value, frozen=True, gc=False):
    """The number of runs in a range of tokens: `full` of `unit` tokens each, plus one of `tail` unless that is 0."""

    unit: int
    full: int
    tail: int

    @property
    def count(self) -> int:
        return self.full + (self.tail > 0)


def pieces(source_block_size: int, target_block_size: int, num_tokens: int) -> RunCounts:
    """Count the runs that `runs` would yield, in O(1). The start of the range does not matter, as it is on a border."""
    unit = split_size(source_block_size, target_block_size)
    if num_tokens < 0:
        raise LayoutError(f"a range of {num_tokens} tokens: it must be 0 or more")
    full, tail = divmod(num_tokens, unit)
    return RunCounts(unit, full, tail)


def split_size(source_block_size: int, target_block_size: int) -> int:
    """Return the smaller block size, into which the larger blocks are cut. Raises LayoutError if it does not divide."""
    small, large = sorted((source_block_size, target_block_size))
    if small < 1:
        raise LayoutError(f"block sizes {source_block_size} and {target_block_size}: they must be 1 or more")
    if large % small:
        raise LayoutError(
            f"prefill block size {source_block_size} and decode block size {target_block_size}: "
            "one of the two must divide the other"
        )
    return small


def runs(
    source_blocks: Sequence[int],
    source_block_size: int,
    target_blocks: Sequence[int],
    target_block_size: int,
    token_start: int,
    num_tokens: int,
) -> Iterator[TokenRun]:
    """Yield the runs of tokens `token_start ... token_start + num_tokens - 1`, in order of position.

    `source_blocks` begin at token 0, `target_blocks` at `token_start`. Everything is checked before the first run:
    raises LayoutError if `token_start` is not on a border of the target's blocks or a list is too short.
    """
    shape = pieces(source_block_size, target_block_size, num_tokens)
    if token_start < 0 or token_start % target_block_size:
        raise LayoutError(
            f"the first token, {token_start}, is not a multiple of decode's block size {target_block_size}"
        )
    for side, blocks, size, end in (
        ("prefill", source_blocks, source_block_size, token_start + num_tokens),
        ("decode", target_blocks, target_block_size, num_tokens),
    ):
        if num_tokens and len(blocks) * size < end:
            raise LayoutError(
                f"{len(blocks)} {side} blocks of {size} tokens do not cover the {num_tokens} tokens from {token_start}"
            )
    return _runs(source_blocks, source_block_size, target_blocks, target_block_size, token_start, shape)


def _runs(
    source_blocks: Sequence[int],
    source_block_size: int,
    target_blocks: Sequence[int],
    target_block_size: int,
    token_start: int,
    shape: RunCounts,
) -> Iterator[TokenRun]:
    unit = shape.unit
    for piece in range(shape.count):
        tokens = unit if piece < shape.full else shape.tail
        target_at, target_offset = divmod(piece * unit, target_block_size)
        source_at, source_offset = divmod(token_start + piece * unit, source_block_size)
        yield TokenRun(source_blocks[source_at], source_offset, target_blocks[target_at], target_offset, tokens)


def runs_within(
    source_blocks: Sequence[int],
    source_block_size: int,
    target_blocks: Sequence[int],
    target_block_size: int,
    token_start: int,
    first: int,
    last: int,
) -> Iterator[TokenRun]:
    """Yield the part of `runs` that covers tokens `first ... last - 1`, wherever these lie: a chunk may end in a block.
    Raises LayoutError if a list is too short."""
    if not token_start <= first <= last:
        raise LayoutError(f"tokens {first} to {last}: they do not follow one another from {token_start} on")
    for side, blocks, size, end in (
        ("prefill", source_blocks, source_block_size, last),
        ("decode", target_blocks, target_block_size, last - token_start),
    ):
        if first < last and len(blocks) * size < end:
            raise LayoutError(f"{len(blocks)} {side} blocks of {size} tokens do not cover tokens {first} to {last}")
    at = first
    while at < last:
        source_at, source_offset = divmod(at, source_block_size)
        target_at, target_offset = divmod(at - token_start, target_block_size)
        tokens = min(source_block_size - source_offset, target_block_size - target_offset, last - at)
        yield TokenRun(source_blocks[source_at], source_offset, target_blocks[target_at], target_offset, tokens)
        at += tokens
