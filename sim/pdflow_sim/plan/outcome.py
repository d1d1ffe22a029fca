"""The outcome of a plan: the designs by worth, what binds the best one, and what it survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.plan.comparison import DesignComparison, compare
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.levers import LeverResult
from pdflow_sim.plan.options import Kind
from pdflow_sim.plan.probes import DesignProbe, Prober, ProbeResult
from pdflow_sim.plan.robustness import StressResult
from pdflow_sim.plan.search import Goal, MeasuredDesign, best_of_kinds
from pdflow_sim.plan.traffic import Traffic


@attrs.frozen
class Duplicates:
    """A design, and others of the same engines that do as well: one row of the table."""

    row: MeasuredDesign
    also: tuple[MeasuredDesign, ...]


@attrs.frozen(kw_only=True)
class PlanOutcome:
    """Everything that a plan found."""

    scenario: Scenario
    traffic: Traffic
    level: ServiceLevel
    goal: Goal
    gpus: int
    wanted_rate: float | None
    rows: Sequence[MeasuredDesign]
    """The best first."""
    verdict: DesignComparison | None
    """The best of one kind against the best of the other; None if there is one kind only, or nothing meets."""
    operating_rate: float
    """The rate that the recommended design is put under stress at."""
    levers: Sequence[LeverResult]
    stresses: Mapping[Design, Sequence[StressResult]]
    stress_rates: Mapping[Design, float]
    """The rate of each design under stress: the operating one, or most of what it can serve."""
    ratio_at: Mapping[str, float]
    """The verdict's ratio with all steps slower and faster by a quarter."""
    never_compared: Sequence[str]
    refused: Mapping[str, str]
    probes: Mapping[DesignProbe, ProbeResult]
    prober: Prober = attrs.field(repr=False)
    left_out: str
    """What of the scenario no design has, such as faults; "" if nothing."""
    decided: bool
    """Whether the search came to its end."""
    simulated: int
    runs: int
    unfinished: str = ""
    """Why the search ended early; "" if it did not."""

    @property
    def best(self) -> MeasuredDesign | None:
        """The design that is worth most; None if there is no design."""
        return self.rows[0] if self.rows else None

    @property
    def meets(self) -> bool:
        """Whether any design meets the service level, at the wanted rate if there is one."""
        return self.best is not None and self.best.rate > 0 and self.best.rate >= (self.wanted_rate or 0.0)

    def to_scenario(self, design: Design, rate: float | None = None) -> Scenario:
        """Return a design under a rate, by default the operating one, to be simulated and served as it is."""
        row = next((row for row in self.rows if row.design == design), None)
        rate = rate or self.operating_rate
        answer_s = 0.0 if row is None else row.answer_s
        requests = self.prober.enough_requests(rate, self.traffic.requests, answer_s)
        probe = DesignProbe(design, rate, requests)
        return self.prober.scenario_of(probe).with_({"scenario.name": f"{self.scenario.name}-plan"})

    def stress_rate(self, design: Design) -> float:
        """Return the rate that a design was put under stress at."""
        return self.stress_rates.get(design, self.operating_rate)

    def best_of(self, kind: Kind) -> MeasuredDesign | None:
        """Return the best design of a kind."""
        return best_of_kinds(self.rows).get(kind)

    def table(self, most: int) -> list[Duplicates]:
        """Return the best rows, those of the same engines that no seed tells apart merged into one. Of engines that
        were measured on whole runs, other options on shorter runs are left out."""
        found: list[Duplicates] = []
        for row in self.rows:
            same = [n for n, each in enumerate(found) if each.row.design.pools == row.design.pools]
            if any(found[n].row.requests > row.requests for n in same):
                continue
            twin = next((n for n in same if self._tied(found[n].row, row)), None)
            if twin is not None:
                found[twin] = attrs.evolve(found[twin], also=(*found[twin].also, row))
            elif len(found) < most:
                found.append(Duplicates(row, ()))
        return found

    def _tied(self, better: MeasuredDesign, row: MeasuredDesign) -> bool:
        compared = compare(better, row, self.goal)
        return compared is None or compared.tied_by_seeds

    def dollars_per_million(self, row: MeasuredDesign, figure: str = "output_tokens_per_s") -> float | None:
        """Return the price of a million tokens of a kind at the design's highest rate; None without prices."""
        tokens, dollars = row.per_second(figure), self.goal.dollars_per_hour(row.design)
        return None if not tokens or dollars is None else dollars / 3600 / tokens * 1e6
