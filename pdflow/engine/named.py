"""The decode batch of an engine that really computes: the blocks of its sequences have ids.

A real attention reads and writes KV at the blocks of a block table, so a block that decoding needs has to have an id
before the step that fills it, where simulation counts it afterwards. All else is `walk.py`: every step is a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdflow.cost.step import StepCost
from pdflow.engine.walk import WalkedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdflow.engine.sequence import Sequence
    from pdflow.memory.paged import PagedPool


class NamedBatch(WalkedBatch):
    """A walked decode batch that names blocks. `name_blocks` is to be called between a step's composition and its
    start."""

    __slots__ = ()

    def __init__(self, block_size: int) -> None:
        # What a step takes is seen, not reckoned.
        super().__init__(StepCost(), block_size)

    def contexts(self) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence that decodes in the next step, in order of joining, and the tokens it reads, its own
        included."""
        return ((seq, row.context) for seq, row in self._rows.items())

    def name_blocks(self, pool: PagedPool) -> None:
        """Give a block to every sequence that lacks one. Composition has ensured that there are enough."""
        for seq, row in self._rows.items():
            if not self._lacks(row):
                continue
            assert seq.allocation is not None, f"sequence {seq.index} decodes without blocks"
            longer = pool.extend(seq.allocation, 1)
            assert longer is not None, f"sequence {seq.index} should decode, but no block is free for it"
            seq.allocation = longer
            seq.blocks += 1
            row.blocks += 1
