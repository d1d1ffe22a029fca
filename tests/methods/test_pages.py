"""Where tokens go in blocks, against one token at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.pages import PageRun, runs
from pdflow.methods.shipment import Piece

Token = tuple[int, int, int]
"""Block, offset in it, and where it lies in the part."""


def one_by_one(start: int, stop: int, first: int, block_tokens: int) -> list[Token]:
    return [(token // block_tokens, token % block_tokens, token - first) for token in range(start, stop)]


def spread(found: tuple[PageRun, ...], block_tokens: int) -> list[Token]:
    return [
        (run.block + (run.offset + k) // block_tokens, (run.offset + k) % block_tokens, run.source + k)
        for run in found
        for k in range(run.tokens)
    ]


@st.composite
def boundaries(draw: st.DrawFn) -> list[int]:
    """A prompt in chunks that end anywhere."""
    edges = draw(st.lists(st.integers(1, 99), unique=True, max_size=5).map(sorted))
    return [0, *edges, draw(st.integers(100, 120))]


@given(boundaries(), st.integers(1, 40), st.booleans())
def test_every_token_goes_where_it_goes_alone(edges: list[int], block_tokens: int, own_blocks: bool) -> None:
    everywhere: list[Token] = []
    for start, stop in pairwise(edges):
        first = start if own_blocks else 0
        found = runs(Piece(0, start, stop), first, block_tokens)
        assert spread(found, block_tokens) == one_by_one(start, stop, first, block_tokens)
        assert len(found) <= 3
        everywhere += spread(found, block_tokens)
    cells = [(block, offset) for block, offset, _ in everywhere]
    assert cells == [divmod(token, block_tokens) for token in range(edges[-1])], "each cell once, and none is left out"


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 40))
def test_what_is_more_than_a_block_is_whole_blocks(start: int, tokens: int, block_tokens: int) -> None:
    for run in runs(Piece(0, start, start + tokens), start, block_tokens):
        if run.offset + run.tokens > block_tokens:
            assert (run.offset, run.tokens % block_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("start", "stop", "first", "found"),
    [
        # PR #18332: steps of 8192 tokens and two prompts of 8200, so that the second one's first chunk is 8184.
        (0, 8184, 0, (PageRun(0, 0, 0, 8176), PageRun(511, 0, 8176, 8))),
        (8184, 8200, 8184, (PageRun(511, 8, 0, 8), PageRun(512, 0, 8, 8))),
        (8184, 8200, 0, (PageRun(511, 8, 8184, 8), PageRun(512, 0, 8192, 8))),
        # Within a block, from its first token or not, and up to its edge.
        (16, 20, 16, (PageRun(1, 0, 0, 4),)),
        (18, 20, 18, (PageRun(1, 2, 0, 2),)),
        (18, 32, 18, (PageRun(1, 2, 0, 14),)),
        (5, 5, 5, ()),
    ],
)
def test_by_hand_with_blocks_of_16(start: int, stop: int, first: int, found: tuple[PageRun, ...]) -> None:
    assert runs(Piece(0, start, stop), first, 16) == found
