"""`pdflow.plan`: the whole plan, from the search to what the best design survives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs

from pdflow.results.figures.intervals import of_mean
from pdflow.results.figures.service_level import ServiceLevel
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.executors import TaskExecutor
from pdflow_sim.experiments.workers import WorkerPool
from pdflow_sim.plan.comparison import RESOLUTION, DesignComparison, compare, step_error_of
from pdflow_sim.plan.designs import Design, DesignEditor
from pdflow_sim.plan.levers import LeverResult, pull_levers
from pdflow_sim.plan.max_rate import RateSearch, search_together
from pdflow_sim.plan.options import OPTIONS
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.probes import DesignProbe, OutOfTimeError, Prober
from pdflow_sim.plan.robustness import STEPS, StressResult, put_under_stress, step_times
from pdflow_sim.plan.search import DesignSearch, Goal, MeasuredDesign, Target, best_of_kinds
from pdflow_sim.plan.space import ShapeFinder, Space
from pdflow_sim.plan.traffic import Traffic

ROBUST_FINALISTS: Final = 3
_LOWER_RATES: Final = 6
HEADROOM: Final = 0.8
"""The share of its highest rate that a design is meant for, if it cannot serve the scenario's own."""
MOST_GPUS: Final = 1024
MOST_SEEDS: Final = 9
_SEEDS_AT_ONCE: Final = 2
_MOST_SIZES: Final = 6
_SIZE_TOLERANCE: Final = 0.03
_LEAST_GPUS: Final = 8
"""On fewer, there are too few ratios of P to D to compare."""
INTERRUPTED: Final = "interrupted"
OUT_OF_TIME: Final = "the time given with --budget is over"


@attrs.frozen(kw_only=True)
class PlanRequest:
    """What is asked. One of `gpus` and `rate` is given; `prices` are in $ per hour of one GPU."""

    level: ServiceLevel
    gpus: int | None = None
    rate: float | None = None
    gpu_types: tuple[str, ...] = ()
    prices: Mapping[str, float] = attrs.field(factory=dict)
    target: Target = "goodput-per-gpu"
    space: Space | None = None
    options: Sequence[str] = tuple(OPTIONS)
    values: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)
    """Values to search of an option, instead of its own list."""
    seeds: int = 3
    requests: int | None = None
    robust: bool = True


@attrs.define
class Planner:
    """Carries out a plan. `on_stage` hears of each stage, `on_run` of each run with the best design so far."""

    scenario: Scenario
    request: PlanRequest
    executor: TaskExecutor = attrs.field(factory=lambda: WorkerPool(1))
    cache: Path | None = None
    budget_s: float | None = None
    look: bool = True
    """Whether to look at what would help the best designs, and what they survive, when they are found."""
    on_stage: Callable[[str], object] = lambda stage: None
    on_run: Callable[[Planner], object] = lambda planner: None
    prober: Prober = attrs.field(init=False)
    search: DesignSearch = attrs.field(init=False)
    unfinished: str = attrs.field(init=False, default="")

    def run(self) -> PlanOutcome:
        """Search, then look at the best. An interruption, or the end of the time, leaves what was found by then.

        Raises ScenarioError if the traffic cannot be planned for.
        """
        request = self.request
        traffic = Traffic.of(self.scenario, request.requests)
        deadline = math.inf if self.budget_s is None else time.monotonic() + self.budget_s
        with ExitStack() as stack:
            executor = stack.enter_context(self.executor)
            self.prober = Prober(
                traffic,
                request.level,
                executor,
                cache=self.cache,
                deadline=deadline,
                on_run=lambda: self.on_run(self),
            )
            looked = Looked()
            try:
                self._search()
                self._decide()
                if self.look:
                    self._look(looked)
            except OutOfTimeError:
                self.unfinished = OUT_OF_TIME
            except KeyboardInterrupt:
                self.unfinished = INTERRUPTED
        return self._outcome(looked)

    def best_so_far(self) -> RateSearch | None:
        """Return the search of the design that has served the highest worth so far, at its longest runs."""
        search = self.search
        searches = search.finals or search.shapes
        met = [it for it in searches if it.met is not None]
        return max(met, key=lambda it: search.worth(it.design, it.rate), default=None)

    def _new_search(self, gpus: int) -> DesignSearch:
        space = self.request.space or Space(self.request.gpu_types or _own_gpus(self.scenario))
        return DesignSearch(
            prober=self.prober,
            finder=ShapeFinder(self.scenario, space),
            goal=Goal(self.request.target, self.request.prices, self.request.gpus),
            gpus=gpus,
            seeds=self.request.seeds,
            options={name: self.request.values.get(name, OPTIONS[name].values) for name in self.request.options},
            wanted=self.request.rate or 0.0,
            on_stage=self.on_stage,
        )

    def _search(self) -> None:
        gpus = self.request.gpus
        if gpus is not None:
            self.search = self._new_search(gpus)
            self.search.run()
            return
        assert self.request.rate is not None
        self._search_sizes(self.request.rate)

    def _search_sizes(self, wanted: float) -> None:
        """Search the fewest GPUs that serve a rate: from the rate that as many as the scenario has serve, about how
        many are needed; there, what is best; and that made larger or smaller until it just serves the rate."""
        own = DesignEditor(self.scenario).own
        few = _LEAST_GPUS if own is None else max(_LEAST_GPUS, own.gpus)
        self.search = self._new_search(few)
        self.search.search_shapes()
        rate = self.search.best_rate
        if rate == 0:
            self.search.finished = True
            return
        too_few, enough = 0, MOST_GPUS + 1
        gpus = min(math.ceil(few * wanted / rate), MOST_GPUS)
        searches: dict[int, DesignSearch] = {}
        likely: list[tuple[Design, float]] = []
        for _ in range(_MOST_SIZES):
            self.search = searches[gpus] = self._new_search(gpus)
            if likely:
                self.search.search_scaled([design for design, _ in likely], wanted)
                self.search.search_finals(list(self.search.near_best()))
            else:
                self.search.search_shapes(wanted)
                likely = list(self.search.finalists())
                self.search.search_finals(likely)
            rate = self._confirmed_rate(wanted)
            if rate >= wanted:
                enough = gpus
            else:
                too_few = max(too_few, gpus)
            rate = rate or wanted / 2
            gpus = min(max(math.ceil(gpus * wanted / rate), too_few + 1), enough - 1)
            if gpus in searches or gpus < 1 or enough - too_few <= max(1, round(_SIZE_TOLERANCE * gpus)):
                break
        self.search = searches.get(enough, self.search)
        self.search.finished = True

    def _confirmed_rate(self, wanted: float) -> float:
        """Return the highest rate of the best design on these GPUs; over more seeds if it serves the wanted rate by
        less than seeds differ. The size was chosen because of the first ones, and they may have been lucky."""
        rate = 0.0
        for _ in range(MOST_SEEDS):
            best = next(iter(self.search.measured()), None)
            rate = 0.0 if best is None else best.rate
            if best is None or rate < wanted or len(best.rates) >= MOST_SEEDS:
                break
            interval = of_mean(best.rates)
            if interval is not None and interval.low >= wanted:
                break
            self.on_stage("more seeds")
            self.search.add_seeds([best], _SEEDS_AT_ONCE)
        return rate

    def _decide(self) -> None:
        """Give the best design of each kind more seeds until it is clear which is better, or clear that they tie."""
        while True:
            best = best_of_kinds(self.search.measured())
            if len(best) < 2 or any(row.requests < self.prober.traffic.requests for row in best.values()):
                return
            if min(len(row.rates) for row in best.values()) >= MOST_SEEDS:
                return
            one, other = best.values()
            compared = compare(one, other, self.search.goal)
            if compared is None or not compared.tied_by_seeds or compared.ratio < 1 + RESOLUTION:
                return
            if compared.low is not None and compared.high is not None and compared.high < 1 + RESOLUTION:
                return
            self.on_stage("more seeds")
            self.search.add_seeds(list(best.values()), _SEEDS_AT_ONCE)

    def _look(self, looked: Looked) -> None:
        """Look at the best designs: what would help, what they survive, and whether the verdict holds with other step
        times."""
        rows = self.search.measured()
        if not rows:
            return
        best = rows[0]
        looked.rate = self.operating_rate(best)
        self.on_stage("what would help")
        looked.levers = pull_levers(self.prober, best.design, best.rate, self.search.middling)
        finals = [row for row in rows if row.requests == self.prober.traffic.requests and row.rate > 0]
        if not self.request.robust or not finals:
            return
        self.on_stage("robustness")
        kinds = best_of_kinds(finals)
        chosen = {row.design: row for row in (best, *kinds.values())}
        for row in finals[1:]:
            if len(chosen) < ROBUST_FINALISTS and row.design.pools not in {design.pools for design in chosen}:
                chosen[row.design] = row
        for row in chosen.values():
            looked.stress_rates[row.design] = looked.rate if row.rate >= looked.rate else HEADROOM * row.rate
        rows_at = {design: (rate, self._requests(chosen[design], rate)) for design, rate in looked.stress_rates.items()}
        looked.stresses = put_under_stress(self.prober, rows_at)
        if len(kinds) > 1 and all(row.rates[0] > 0 for row in kinds.values()):
            self.on_stage("other step times")
            looked.ratio_at = self._ratios(list(kinds.values()), best)

    def operating_rate(self, best: MeasuredDesign) -> float:
        """Return the rate that the recommended design is meant for: the one that is asked for, or the scenario's own,
        or else most of what it can serve, less until it meets the service level with every seed."""
        if self.request.rate is not None:
            return self.request.rate
        own = self.prober.traffic.rate
        if best.rate == 0:
            return own
        rate = own if best.rate >= own else HEADROOM * best.rate
        for _ in range(_LOWER_RATES):
            requests = self._requests(best, rate)
            probes = [DesignProbe(best.design, rate, requests, nth) for nth in range(self.request.seeds)]
            if all(outcome.meets for outcome in self.prober.run(probes)):
                break
            rate *= HEADROOM
        return rate

    def _requests(self, row: MeasuredDesign, rate: float) -> int:
        """Return the requests of a whole run of a design at a rate."""
        return self.prober.enough_requests(rate, self.prober.traffic.requests, row.answer_s)

    def _ratios(self, kinds: Sequence[MeasuredDesign], best: MeasuredDesign) -> dict[str, float]:
        """Return by how much the best of its kind is worth more than the other's, with slower and faster steps.

        Seeds move highest rates by more than that, so what is measured is the change with the first seed, whose rates
        as modelled are known; it is applied to the ratio over all seeds.
        """
        [other] = [row for row in kinds if row.design != best.design]
        compared = compare(best, other, self.search.goal)
        if compared is None or math.isinf(compared.ratio):
            return {}
        ratio = compared.ratio if compared.better is best else 1 / compared.ratio
        requests = self.prober.traffic.requests
        searches: dict[tuple[str, Design], RateSearch] = {}
        for row in (best, other):
            scenario = self.prober.scenario_of(DesignProbe(row.design, row.rate, requests)).resolved
            for name, factor in (("25 % slower", STEPS), ("25 % faster", 1 / STEPS)):
                change = step_times(scenario, factor)
                searches[name, row.design] = RateSearch(
                    row.design, requests, row.rates[0] / factor, 0.03, change=change, first_step=1.1
                )
        search_together(self.prober, list(searches.values()))
        ratios = {}
        for name in dict.fromkeys(name for name, _ in searches):
            mine, theirs = (searches[name, row.design].rate / row.rates[0] for row in (best, other))
            ratios[name] = ratio * mine / theirs if theirs > 0 else math.inf
        return ratios

    def _outcome(self, looked: Looked) -> PlanOutcome:
        search = self.search
        rows = search.measured()
        verdict, never = self._verdict(rows)
        rate = looked.rate or self.request.rate or self.prober.traffic.rate
        return PlanOutcome(
            scenario=self.scenario,
            traffic=self.prober.traffic,
            level=self.request.level,
            goal=search.goal,
            gpus=search.gpus,
            wanted_rate=self.request.rate,
            rows=rows,
            verdict=verdict,
            operating_rate=rate,
            levers=looked.levers,
            stresses=looked.stresses,
            stress_rates=looked.stress_rates,
            left_out=self.prober.editor.left_out,
            decided=search.finished,
            ratio_at=looked.ratio_at,
            never_compared=never,
            refused=search.finder.refused,
            probes=dict(self.prober.outcomes),
            prober=self.prober,
            simulated=self.prober.requests,
            runs=len(self.prober.outcomes),
            unfinished=self.unfinished,
        )

    def _verdict(self, rows: Sequence[MeasuredDesign]) -> tuple[DesignComparison | None, list[str]]:
        best = best_of_kinds(rows)
        scenarios = [
            self.prober.scenario_of(DesignProbe(row.design, self.prober.traffic.rate, 1)) for row in best.values()
        ]
        error, never = step_error_of(*(scenario.resolved for scenario in scenarios))
        if len(best) < 2 or not self.search.finished:
            return None, never
        one, other = best.values()
        return compare(one, other, self.search.goal, error), never


@attrs.define
class Looked:
    """What was found about the best designs so far."""

    rate: float = 0.0
    """The operating rate."""
    stress_rates: dict[Design, float] = attrs.field(factory=dict)
    levers: list[LeverResult] = attrs.field(factory=list)
    stresses: dict[Design, list[StressResult]] = attrs.field(factory=dict)
    ratio_at: dict[str, float] = attrs.field(factory=dict)


def _own_gpus(scenario: Scenario) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pool.gpu.name for pool in scenario.resolved.pools))
