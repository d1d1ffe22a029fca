"""All charts of a plan, by the name of the file that each has in DIR/plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from pdflow.results.files.write import write_text
from pdflow.results.page.picture import Picture
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.report.attainment import attainment_chart
from pdflow_sim.plan.report.frontier import frontier_chart
from pdflow_sim.plan.report.gains import gains_chart
from pdflow_sim.plan.report.ratios import MOST_PAIRS, heat_maps

FRONTIER: Final = "frontier"
ATTAINMENT: Final = "attainment"
GAINS: Final = "levers"
HEAT_MAP: Final = "heat-map-{}"
HEAT_MAPS: Final = tuple(HEAT_MAP.format(number) for number in range(1, MOST_PAIRS + 1))
PLOT_NAMES: Final = (FRONTIER, ATTAINMENT, *HEAT_MAPS, GAINS)


@attrs.frozen
class Plot:
    """A chart and its title. A notebook shows it if it is the last expression of a cell."""

    title: str
    picture: Picture = attrs.field(repr=False)

    @property
    def alt(self) -> str:
        """The description of the picture in words."""
        return self.picture.description

    @property
    def svg(self) -> str:
        """The text of an SVG file."""
        return self.picture.file(self.title)

    def save(self, path: str | Path) -> None:
        """Write the SVG file. Raises OutputError."""
        write_text(Path(path), self.svg)

    def _repr_svg_(self) -> str:
        return self.svg


def plots(outcome: PlanOutcome) -> Mapping[str, Plot]:
    """Return the charts of a plan by name, those alone that it has something to draw for."""
    return dict(_plots(outcome))


def svg_files(outcome: PlanOutcome) -> Mapping[str, str]:
    """Return the text of an SVG file for each chart, by name."""
    return {name: plot.svg for name, plot in plots(outcome).items()}


def _plots(outcome: PlanOutcome) -> Iterator[tuple[str, Plot]]:
    frontier = frontier_chart(outcome)
    if frontier is not None:
        yield FRONTIER, Plot("Throughput and speed", frontier)
    attainment = attainment_chart(outcome)
    if attainment is not None:
        yield ATTAINMENT, Plot("Requests that meet all bounds", attainment)
    for name, (title, picture) in zip(HEAT_MAPS, heat_maps(outcome), strict=False):
        yield name, Plot(title, picture)
    gains = gains_chart(outcome)
    if gains is not None:
        yield GAINS, Plot("What one change gains", gains)
