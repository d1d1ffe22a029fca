"""Choose where each pair of faults is searched: python benchmarks/pair_table.py CHECKED [--most SECONDS]

CHECKED is what `pdflow check scopes --large --json` printed. Writes sim/pdflow_sim/check/scopes/pair_table.py: which
searches are truncated, and the selection of CI. A pair that CHECKED lacks keeps its letter.

The selection is greedy: as long as a pair has no scope of CI in its dialect and direction, or a fault none in a shape,
the scope that covers the most of these for its CPU time is added. Hand-made scopes of CI count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdflow_sim.check.scopes import pair_table
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.pair_cells import FAULTS, SETTINGS, SHAPES, PairCell, cells_of
from pdflow_sim.check.scopes.pairs import IN_CI, LETTERS, NEVER, NIGHTLY, PAIRS, TRUNCATED, WITHOUT_SCOPE

LEAST_S = 0.05
"""The cost of a scope, however small: its world is made, and its protocol's steps are run once."""


def covers(cell: PairCell) -> set[tuple[object, ...]]:
    """What a scope of CI for this pair does for the selection."""
    pair = (cell.setting, cell.first, cell.second)
    return {pair, (cell.setting, cell.shape, cell.first), (cell.setting, cell.shape, cell.second)}


def selected(seconds: Mapping[PairCell, float]) -> set[PairCell]:
    """The pairs of CI, of those that may be in it with their CPU seconds."""
    of_ci = set(SCOPES) - set(PAIRS)
    by_hand = {cell for named in of_ci if not named.nightly for cell in cells_of(named.scope)}
    missing = {each for cell in LETTERS if cell not in WITHOUT_SCOPE for each in covers(cell)}
    missing -= {each for cell in by_hand for each in covers(cell)}
    found = set()
    while missing:
        best = max(seconds, key=lambda cell: len(covers(cell) & missing) / max(seconds[cell], LEAST_S))
        if not covers(best) & missing:
            break
        found.add(best)
        missing -= covers(best)
    for each in sorted(" ".join(map(str, each)) for each in missing):
        print(f"no scope of CI: {each}")
    print(f"CI: {len(found)} pairs, {sum(seconds[cell] for cell in found):.1f} CPU s")
    return found


def letters(rows: Mapping[str, Mapping[str, Any]], most_s: float) -> dict[PairCell, str]:
    found, seconds = dict(LETTERS), {}
    for cell in LETTERS:
        row = rows.get(str(cell))
        if row is not None and cell not in WITHOUT_SCOPE:
            if row["stopped_by"] or row["missed"] or row["counterexample"]:
                raise SystemExit(f"{cell}: its search did not end as it must")
            found[cell] = TRUNCATED if row["truncated"] else NIGHTLY
            if not row["truncated"] and row["seconds"] <= most_s:
                seconds[cell] = row["seconds"]
    return found | dict.fromkeys(selected(seconds), IN_CI)


def lines(found: Mapping[PairCell, str]) -> Iterator[str]:
    yield f'"""{pair_table.__doc__}"""\n'
    yield "from __future__ import annotations\n"
    yield "PAIR_TABLE = {"
    for setting in SETTINGS:
        yield f'    "{setting}": """'
        for i, second in enumerate(FAULTS):
            cells = ([PairCell(setting, shape, first, second) for shape in SHAPES] for first in FAULTS[: i + 1])
            yield " ".join((f"{second:9}", *("".join(found.get(cell, NEVER) for cell in row) for row in cells)))
        yield '""",'
    yield "}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose where each pair of faults is searched.")
    parser.add_argument("checked", type=Path, help="what `pdflow check scopes --large --json` printed")
    parser.add_argument("--most", type=float, default=2.0, help="CPU seconds of the most expensive scope of CI")
    given = parser.parse_args()
    rows = {row["scope"]: row for row in json.loads(given.checked.read_text(encoding="utf-8"))["scopes"]}
    table = "\n".join(lines(letters(rows, given.most))) + "\n"
    Path(str(pair_table.__file__)).write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
