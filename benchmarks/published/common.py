"""What the tables share: errors, Markdown, the folder of the measurements, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs

import pdflow
from pdflow.results.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs/img"
HEADING = "## 6. Each method compared with its source"
"""Of docs/validation.md."""
MEASURED = "#444444"
FITTED = "#d08770"
HELD_OUT = "#3b6ea5"


@attrs.define
class Section:
    """What one table says: lines of Markdown, and its plot's name if it has one."""

    title: str
    lines: list[str] = attrs.field(factory=list)
    figure: Figure | None = None
    image: str = ""
    caption: str = ""


@attrs.frozen
class Cell:
    """One published figure beside the simulator's."""

    name: str
    published: float
    simulated: float
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def run(tables: Mapping[str, Any]) -> Result:
    return pdflow.simulate(pdflow.Scenario.from_dict(tables))


def percent(value: float, sign: bool = False) -> str:
    return f"{value:+.0%}".replace("%", " %") if sign else f"{value:.0%}".replace("%", " %")


def verdict(cells: Sequence[Cell]) -> str:
    """Of those that were not fitted: the median absolute error, and the worst."""
    held = [cell for cell in cells if not cell.fitted]
    worst = max(held, key=lambda cell: abs(cell.error))
    return (
        f"{len(cells) - len(held)} of {len(cells)} fitted; of the other {len(held)} the median error is "
        f"{percent(median(abs(cell.error) for cell in held))}, the worst {percent(worst.error, True)} ({worst.name})."
    )


def axes_of(title: str, size: tuple[float, float] = (7.0, 3.4)) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, no part of pyplot's state."""
    from matplotlib.figure import Figure as New

    figure = New(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes
