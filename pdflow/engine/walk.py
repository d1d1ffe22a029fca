"""The decode batch as a plain list that is walked in every step: `--exact`.

It has the same interface and results as `batch.DecodeBatch` and shares no formula with it: contexts, blocks and tokens
are counted one by one, the time of every step comes from the cost model with all its requests, and a segment is always
one step. Slow on purpose; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import attrs

from pdflow.cost.step import StepCost
from pdflow.engine.sequence import Sequence

if TYPE_CHECKING:
    from pdflow.memory.paged import PagedPool


@attrs.define
class _Row:
    context: int
    blocks: int
    grown: int = 0


class WalkedBatch:
    __slots__ = ("_block_size", "_cost", "_counted", "_replicas", "_rows", "logged", "step")

    def __init__(self, cost: StepCost, block_size: int, replicas: int = 1) -> None:
        self.step = 0
        self.logged = 0
        self._replicas = replicas
        self._cost = cost
        self._block_size = block_size
        self._counted = 0
        self._rows: dict[Sequence, _Row] = {}

    @property
    def size(self) -> int:
        return len(self._rows)

    def join(self, seq: Sequence, context: int) -> None:
        self._rows[seq] = _Row(context=context, blocks=seq.blocks)

    def leave(self, seq: Sequence) -> int:
        return self._rows.pop(seq).grown

    def growth(self) -> int:
        return sum(self._lacks(row) for row in self._rows.values())

    def growth_over(self, steps: int) -> int:
        return self.growth() - self._counted if steps else 0

    def segment(self, chunks: Seq[tuple[Sequence, int]], pool: PagedPool) -> tuple[int, int, int]:
        del pool
        if self._replicas > 1:
            return self._lockstep_ps(chunks), 0, 1
        prefill = [(new, seq.computed) for seq, new in chunks]
        return self._cost.step_ps(prefill, [row.context for row in self._rows.values()]), 0, 1

    def prompts_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        return self._cost.step_ps([(new, seq.computed) for seq, new in chunks], [])

    def pass_by(self) -> None:
        self.logged += 1

    def _lockstep_ps(self, chunks: Seq[tuple[Sequence, int]]) -> int:
        replicas = [
            (
                [(new, seq.computed) for seq, new in chunks if seq.replica == replica],
                [row.context for seq, row in self._rows.items() if seq.replica == replica],
            )
            for replica in range(self._replicas)
        ]
        return self._cost.lockstep_ps(replicas)

    def count_growth(self, steps: int, pool: PagedPool) -> None:
        grown = self.growth_over(steps)
        if not pool.grow(grown):
            raise AssertionError(f"{grown} blocks were planned but are not available")
        self._counted += grown

    def ran(self, steps: int, pool: PagedPool) -> list[Sequence]:
        if steps != 1:
            raise ValueError(f"a walked batch takes one step at a time, not {steps}")
        self.count_growth(steps, pool)
        self._counted = 0
        self.step += 1
        self.logged += 1
        finished = []
        for seq, row in self._rows.items():
            if self._lacks(row):
                row.grown += 1
            row.context += 1
            seq.generated += 1
            if seq.generated == seq.output_tokens:
                finished.append(seq)
        return finished

    def _lacks(self, row: _Row) -> bool:
        return row.context > (row.blocks + row.grown) * self._block_size
