"""The places of a piece's tokens in D's blocks: the end of a block that was begun, whole blocks, a block's beginning.

A chunk of a prompt ends wherever the step's budget did, so a piece may begin and end within a block, or lie within one.
The source address is counted from the first token in the piece's part of memory, which need not be the prompt's first:
PR #18332 counted from the prompt's own block numbers, which is right for the first chunk only.

This module decides nothing about time: the shipment knows whether all pieces have landed.
"""

from __future__ import annotations

from pdflow.methods.guards import Guards
from pdflow.methods.shipment import Piece
from pdflow.protocol.values import Value


class PageRun(Value, frozen=True, gc=False):
    """Tokens that follow each other in memory, and go to blocks that follow each other in the request's table."""

    block: int
    """The first block's place in the table."""
    offset: int
    """The first token's place in that block."""
    source: int
    """The same in the part of memory, in tokens."""
    tokens: int


def runs(piece: Piece, first: int, block_tokens: int) -> tuple[PageRun, ...]:
    """Return the runs of a piece, at most three, in order: up to the next block's edge, whole blocks, what is left.

    Args:
        first: the token with which the piece's part of memory begins.
    """
    tokens = piece.stop - piece.start
    head = min(-piece.start % block_tokens, tokens)
    whole = (tokens - head) // block_tokens * block_tokens
    at, found = piece.start, []
    for stretch in (head, whole, tokens - head - whole):
        if stretch:
            found.append(PageRun(at // block_tokens, at % block_tokens, at - first, stretch))
            at += stretch
    return tuple(found)


def counted_from(piece: Piece, guards: Guards) -> int:
    """Return the token with which the piece's part of memory is taken to begin."""
    return 0 if guards.reserves_whole or not guards.indexes_by_piece else piece.start


def misplaced(piece: Piece, guards: Guards) -> bool:
    """Whether a piece gets the bytes of other tokens: its own part of memory begins with its first token, but the
    address may be counted from another token."""
    begins = 0 if guards.reserves_whole else piece.start
    return counted_from(piece, guards) != begins
