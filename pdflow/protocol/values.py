"""The base class of cells, events, effects and messages, and the few types that all of them share.

Cells, events, effects and messages are frozen msgspec structs: an illegal event then leaves the state unchanged for
free, and the same structs are the wire format (measured in a trial: attrs' frozen constructor alone costs more than
all protocol logic together).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

import msgspec

Instant: TypeAlias = int
"""Nanoseconds on one node's monotonic clock. Only durations cross a process boundary, never instants."""

Address: TypeAlias = str
"""The name of one endpoint: an engine's scheduler ("prefill-0"), one of its ranks ("prefill-0.r1"), or "router"."""

EngineId: TypeAlias = str
RequestId: TypeAlias = str
"""One engine's internal id of one attempt of one request."""

Xid: TypeAlias = str
"""The name of one prefill product: a transfer id and the prefill attempt, minted by the router."""

MS = 1_000_000
S = 1_000_000_000

NEVER: Instant = 1 << 62
"""A deadline that does not exist; later than any instant, and still an int of 64 bits."""

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The block table of each KV cache group of a model: its blocks by token position."""

NO_BLOCK: Final = -1
"""In a block table, the entry of a position whose KV is not kept: vLLM's null block, outside of a sliding window."""


class Value(msgspec.Struct, frozen=True, gc=False):
    """Base of cells, events, effects and messages. gc=False: values are trees, reference counting frees them."""


class Allocation(Value, frozen=True, gc=False, omit_defaults=True):
    """KV blocks that one request holds in one engine's pool, named once for as long as their content is valid.

    `generation` is unique within its pool, so a late write into a later allocation of the same blocks can be
    told apart. One generation per allocation, not per block.
    """

    generation: int
    blocks: tuple[int, ...]
    """All its blocks. Of one KV cache group without holes, this is the block table: in order of token position."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The block table of each KV cache group, with NO_BLOCK for what is not kept; empty if `blocks` says it all. One
    pool serves all groups, so `blocks` has those of all tables, one after the other."""

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each KV cache group, of one at least."""
        return self.groups or (self.blocks,)


def in_order(items: Collection[Any]) -> tuple[Any, ...]:
    """Return these items sorted, for a fingerprint. Most collections of an endpoint are empty."""
    return tuple(sorted(items)) if items else ()


def allocation_of(generation: int, tables: BlockTables) -> Allocation:
    """Return what the block tables of all KV cache groups hold."""
    blocks = blocks_of(tables)
    if len(tables) == 1 and len(blocks) == len(tables[0]):
        return Allocation(generation, blocks)
    return Allocation(generation, blocks, tuple([tuple(table) for table in tables]))


def blocks_of(tables: BlockTables) -> tuple[int, ...]:
    """Return the blocks that block tables name, table by table."""
    return tuple([block for table in tables for block in table if block != NO_BLOCK])
