"""What `pdflow.plan` returns: the verdict to print, the designs as a table, and the best of them as a scenario."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from rich.console import Console

from pdflow.errors import PdflowError
from pdflow.results.extra import notebook_extra
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.executors import executor_of
from pdflow_sim.plan.files import candidates, pareto, write_plan
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.planner import Planner
from pdflow_sim.plan.report.page import plan_cell
from pdflow_sim.plan.report.plots import ATTAINMENT, FRONTIER, GAINS, HEAT_MAP, Plot, plots
from pdflow_sim.plan.request import PlanOptions, request_of
from pdflow_sim.plan.search import MeasuredDesign
from pdflow_sim.plan.verdict import WIDEST, PlanVerdict

if TYPE_CHECKING:
    import pandas as pd


@attrs.frozen(repr=False)
class PlannedDesign:
    """One design of a plan."""

    outcome: PlanOutcome = attrs.field(repr=False)
    measured: MeasuredDesign

    @property
    def text(self) -> str:
        """The cluster and its options in words."""
        return self.measured.design.text

    @property
    def max_rate(self) -> float:
        """The highest rate within the service level, in requests per second; the mean over seeds."""
        return self.measured.rate

    def to_scenario(self, rate: float | None = None) -> Scenario:
        """Return the design as a scenario, under the rate that the plan is for or another one."""
        return self.outcome.to_scenario(self.measured.design, rate)

    def __repr__(self) -> str:
        return f"<PlannedDesign {self.text}: {self.max_rate:.4g} requests/s>"


@attrs.frozen(repr=False)
class Plan:
    """The result of a plan: `print(plan)` shows the verdict, `plan.designs` is a table, `plan.best` the best design."""

    outcome: PlanOutcome

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        return PlanVerdict(self.outcome).headline

    @property
    def meets(self) -> bool:
        """Whether any design meets the service level, at the rate that was asked for if one was."""
        return self.outcome.meets

    @property
    def best(self) -> PlannedDesign | None:
        """The best design; None if no cluster of these GPUs can run the model."""
        return None if self.outcome.best is None else PlannedDesign(self.outcome, self.outcome.best)

    @property
    def designs(self) -> pd.DataFrame:
        """All designs that were simulated, the best first: the columns of candidates.csv."""
        return _frame(list(candidates(self.outcome)))

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run of the search: the columns of pareto.csv."""
        return _frame(list(pareto(self.outcome)))

    def plot_frontier(self) -> Plot:
        """Plot tokens per second of a GPU against those of a user, a mark for each run.

        Raises PdflowError if the plan has no such run; so do the other plots.
        """
        return self._plot(FRONTIER)

    def plot_attainment(self) -> Plot:
        """Plot the share of requests that meet all bounds against the rate, for the best design of each kind."""
        return self._plot(ATTAINMENT)

    def plot_heat_map(self, number: int = 1) -> Plot:
        """Plot the highest rate by numbers of P and D: for the best two sizes of engines, or the second best..."""
        return self._plot(HEAT_MAP.format(number))

    def plot_levers(self) -> Plot:
        """Plot the gain in the highest rate with one resource enlarged."""
        return self._plot(GAINS)

    def _plot(self, name: str) -> Plot:
        drawn = plots(self.outcome)
        if name not in drawn:
            raise PdflowError(f"the plan has nothing to draw for {name}; it has {', '.join(drawn) or 'no chart'}")
        return drawn[name]

    def save(self, directory: str | Path) -> None:
        """Write the files of `pdflow plan --out`. Raises OutputError."""
        write_plan(Path(directory), self.outcome)

    def __str__(self) -> str:
        """Return the verdict as `pdflow plan` prints it, without colours."""
        console = Console(width=WIDEST, color_system=None, force_terminal=False, force_jupyter=False)
        lines = console.render_lines(PlanVerdict(self.outcome), console.options, pad=False)
        return "".join("".join(segment.text for segment in line) + "\n" for line in lines)

    def _repr_html_(self) -> str:
        return plan_cell(self.outcome)

    def __repr__(self) -> str:
        return f"<Plan for {self.outcome.scenario.name!r}: {self.verdict}>"


def planned(
    scenario: Scenario,
    options: PlanOptions,
    *,
    jobs: int,
    executor: str,
    budget_s: float | None,
    cache: str | PathLike[str] | None,
) -> Plan:
    """Return the plan of these options. Raises ScenarioError, MissingBackendError."""
    request = request_of(scenario, options)
    folder = None if cache is None else Path(cache)
    return Plan(Planner(scenario, request, executor_of(executor, jobs), cache=folder, budget_s=budget_s).run())


def _frame(rows: list[dict[str, object]]) -> pd.DataFrame:
    with notebook_extra():
        import pandas
    return pandas.DataFrame(rows)
