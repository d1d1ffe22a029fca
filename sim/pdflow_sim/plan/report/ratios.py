"""Heat maps of the highest rate by numbers of P and D, one for each two sizes of engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from pdflow.results.page.heat_map import CellKey, HeatCell, HeatMap
from pdflow.results.page.picture import Picture
from pdflow_sim.plan.designs import EngineShape
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.search import MeasuredDesign
from pdflow_sim.plan.verdict import PER_S

MOST_PAIRS: Final = 4


class EnginePair(NamedTuple):
    """The engines of P and of D."""

    prefill: EngineShape
    decode: EngineShape

    def __str__(self) -> str:
        return f"P {self.prefill}, D {self.decode}"


def best_cells(outcome: PlanOutcome) -> dict[EnginePair, dict[CellKey, MeasuredDesign]]:
    """Return, for each two sizes of engines, the best design at each number of P and D; the best two sizes first."""
    found: dict[EnginePair, dict[CellKey, MeasuredDesign]] = {}
    for row in outcome.rows:
        prefill, decode = row.design.of_role("prefill"), row.design.of_role("decode")
        if prefill is not None and decode is not None:
            cells = found.setdefault(EnginePair(prefill.engine, decode.engine), {})
            cells.setdefault((prefill.replicas, decode.replicas), row)
    return found


def heat_maps(outcome: PlanOutcome) -> Iterator[tuple[str, Picture]]:
    """Yield the name and the heat map of the best pairs that meet the service level."""
    every = best_cells(outcome)
    most = max((row.rate for cells in every.values() for row in cells.values()), default=0.0)
    meeting = [(pair, rows) for pair, rows in every.items() if any(row.rate > 0 for row in rows.values())]
    for pair, rows in meeting[:MOST_PAIRS]:
        cells = {
            key: HeatCell(row.rate, row.rate_text, f"{row.design.text}: {row.rate_text} {PER_S}")
            for key, row in rows.items()
        }
        columns, lines = sorted({p for p, _ in cells}), sorted({d for _, d in cells})
        chart = HeatMap(columns, lines, cells, most, "number of P", "number of D", best=next(iter(rows)))
        name = str(pair)
        texts = ", ".join(f"{p}P {d}D {cell.text}" for (p, d), cell in sorted(cells.items()))
        yield name, chart.picture(f"Highest rate in {PER_S} by numbers of P and D, {name}: {texts}.")
