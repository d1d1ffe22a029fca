"""Which scopes cover which pairs of faults, as text and as rows. Computed from the budgets of all scopes, hand-made and
generated: a scope covers a pair in its dialect, direction and shape if both faults may occur in one run of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.pair_cells import FAULTS, SETTINGS, SHAPES, PairCell, cells, cells_of
from pdflow_sim.check.scopes.pairs import (
    IN_CI,
    MAX_STATES,
    NEVER,
    NIGHTLY,
    TRUNCATED,
    UNTOLERATED,
    WITHOUT_SCOPE,
)

OPEN = "-"
"""The letter of a pair that no scope covers."""
BEST_FIRST = (IN_CI, NIGHTLY, TRUNCATED)
ALL = (*BEST_FIRST, OPEN, NEVER, UNTOLERATED)
COVERED = {IN_CI: ("complete", "CI"), NIGHTLY: ("complete", "nightly"), TRUNCATED: ("truncated", "nightly")}
LEGEND = f"""\
Pairs of faults. The four letters of a pair, ranks of P x ranks of D:
  {", ".join(SHAPES)}
  {IN_CI}  complete, in CI          {NIGHTLY}  complete, nightly
  {TRUNCATED}  nightly, truncated at {MAX_STATES:,} states
  {OPEN}  not covered              {NEVER}  no run has both faults
  {UNTOLERATED}  the dialect does not tolerate one of them"""


def letter_of(named: Named) -> str:
    """Return how a scope of the catalogue is searched."""
    return TRUNCATED if named.truncated else NIGHTLY if named.nightly else IN_CI


def covered(scopes: Iterable[Named], letters: Mapping[str, str]) -> dict[PairCell, tuple[str, str]]:
    """Return for each covered pair the best letter, and the name of the first scope that has it.

    Args:
        letters: by the name of a scope, the letter of its search, or OPEN for one that proves nothing; of others,
            what the catalogue says.
    """
    best: dict[PairCell, tuple[str, str]] = {}
    for named in scopes:
        letter = letters.get(named.name, letter_of(named))
        if letter != OPEN:
            for cell in cells_of(named.scope):
                if cell not in best or BEST_FIRST.index(letter) < BEST_FIRST.index(best[cell][0]):
                    best[cell] = (letter, named.name)
    return best


def pair_rows(best: Mapping[PairCell, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a row for each pair that can occur, for --json."""
    rows = []
    for cell in cells():
        if cell in WITHOUT_SCOPE:
            continue
        letter, scope = best.get(cell, (OPEN, None))
        coverage, where = COVERED.get(letter, (None, None))
        rows.append(
            {
                "faults": [cell.first, cell.second],
                "shape": cell.shape,
                "direction": "pull" if cell.setting.pulls else "push",
                "dialect": cell.setting.dialect.name,
                "coverage": coverage,
                "in": where,
                "scope": scope,
            }
        )
    return rows


def pair_lines(best: Mapping[PairCell, tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table for each dialect and direction. They fit 80 columns."""
    yield from LEGEND.splitlines()
    for setting in SETTINGS:
        letters = {cell: _letter(cell, best) for cell in cells() if cell.setting == setting}
        counted = [f"{list(letters.values()).count(letter)} {letter}" for letter in ALL]
        yield ""
        yield f"{setting}: {', '.join(counted)}"
        yield " ".join((" " * 9, *(f"{fault[:4]:4}" for fault in FAULTS))).rstrip()
        for i, second in enumerate(FAULTS):
            row = (
                "".join(letters.get(PairCell(setting, shape, first, second), NEVER) for shape in SHAPES)
                for first in FAULTS[: i + 1]
            )
            yield " ".join((f"{second:9}", *row))


def _letter(cell: PairCell, best: Mapping[PairCell, tuple[str, str]]) -> str:
    return WITHOUT_SCOPE.get(cell) or best.get(cell, (OPEN, ""))[0]
