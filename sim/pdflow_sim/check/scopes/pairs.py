"""A named scope for each pair of faults that can occur together, in each dialect, direction and shape (pair_cells.py).

PAIR_TABLE says for each where it is searched. CI has a covering selection of the cheap ones: each pair in each dialect
and direction, and each kind of fault in each shape, except for pairs of a strict push that have too many states. The
others are nightly, and their searches stop at MAX_STATES. Each search must reach a run with both faults, and a
delivery, even if it is truncated. Their states are not counted, but for a few (tests/check/test_pairs.py), so that a
change of the protocol changes few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdflow_sim.check.scopes.named import DELIVERED, Named
from pdflow_sim.check.scopes.pair_cells import FAULTS, SETTINGS, SHAPES, PairCell, cells
from pdflow_sim.check.scopes.pair_table import PAIR_TABLE
from pdflow_sim.check.state.space import EVERY_FAULT

MAX_STATES = 400_000
"""With this limit, the nightly searches of pairs take less than an hour of CPU time."""
IN_CI, NIGHTLY, TRUNCATED, NEVER, UNTOLERATED = "C", "N", "n", ".", "x"
"""The letters of PAIR_TABLE: searched completely in CI; completely at night; at night, up to MAX_STATES. Without a
scope: no run has both faults; the dialect does not tolerate one of them (swarm.py, UNBORNE)."""


def _letters() -> Iterator[tuple[PairCell, str]]:
    found = {}
    for setting in SETTINGS:
        rows = PAIR_TABLE[str(setting)].split("\n")[1:-1]
        for second, row in zip(FAULTS, rows, strict=True):
            name, *columns = row.split()
            assert name == second
            for first, letters in zip(FAULTS, columns, strict=False):
                for shape, letter in zip(SHAPES, letters, strict=True):
                    found[PairCell(setting, shape, first, second)] = letter
    for cell in cells():
        yield cell, found[cell]


def _named(cell: PairCell, letter: str) -> Named:
    goals = DELIVERED | {EVERY_FAULT}
    return Named(
        str(cell), cell.scope, goals, nightly=letter != IN_CI, max_states=MAX_STATES, truncated=letter == TRUNCATED
    )


LETTERS = dict(_letters())
WITHOUT_SCOPE = {cell: letter for cell, letter in LETTERS.items() if letter in (NEVER, UNTOLERATED)}
PAIRS = tuple(_named(cell, letter) for cell, letter in LETTERS.items() if cell not in WITHOUT_SCOPE)
