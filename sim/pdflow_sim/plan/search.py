"""The search for the best cluster: many designs on short runs, then fewer on longer ones, with paired seeds at the end.

1. Shapes: every size of engine in every ratio of P to D, by its highest rate on short runs; designs far below the best
   of their kind are dropped on the way.
2. Options: on the best shape of each kind, each option's other values, one option after the other; a value is kept if
   it serves a higher rate.
3. Finals: the best few of each kind at full length with several seeds, the same seeds for all.

Both kinds, aggregated and disaggregated, stay in to the end: that one of them is better is the answer, not a premise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs

from pdflow.results import formatting
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.plan.designs import Design, PoolShape
from pdflow_sim.plan.max_rate import RateSearch, search_together
from pdflow_sim.plan.options import KINDS, OPTIONS, Kind
from pdflow_sim.plan.probes import DesignProbe, Prober, ProbeResult
from pdflow_sim.plan.space import ShapeFinder

Target: TypeAlias = Literal["goodput-per-gpu", "cost", "min-gpus"]

SHORT_SHARE: Final = 8
"""Short runs have one request in so many."""
SHORT_LEAST: Final = 200
OPTION_SHARE: Final = 3
_SHORT_TOLERANCE: Final = 0.08
_FINAL_TOLERANCE: Final = 0.02
_DROP_BELOW: Final = 0.7
_DROP_SCALED: Final = 0.85
"""Highest rates on short runs are up to 40 % above those on whole runs, but much the same for all designs."""
_WORTH_KEEPING: Final = 1.02
"""An option's value must serve so much more to be kept."""
_NEAR: Final = 0.9
"""Seeds move the highest rate by up to a tenth."""
_FIRST_CHUNKS: Final = (512, 2048, 8192)
FINALISTS: Final = 3
"""Of each kind."""


@attrs.frozen
class Goal:
    """What designs are compared by. `prices`: $ per hour of one GPU, by its type."""

    target: Target
    prices: Mapping[str, float]
    gpus: int | None = None
    """The GPUs that there are: those that a design leaves idle count as well."""

    def worth(self, design: Design, rate: float) -> float:
        """Return how much a design that serves this rate is worth, the higher the better."""
        if self.target == "cost":
            return rate / (self.dollars_per_hour(design) or 1.0)
        return rate / (self.gpus or design.gpus)

    def dollars_per_hour(self, design: Design) -> float | None:
        """Return the price of the design's GPUs; None if that of one is not known."""
        counts = design.gpu_counts
        if any(gpu not in self.prices for gpu in counts):
            return None
        return math.fsum(self.prices[gpu] * count for gpu, count in counts.items())


@attrs.frozen
class MeasuredDesign:
    """A design and its highest rates: one for each seed that it was measured with, in the order of the seeds."""

    design: Design
    rates: tuple[float, ...]
    requests: int
    outcomes: tuple[ProbeResult, ...]
    """At the highest rate that met the service level with each seed; at the lowest rate tried where none met."""

    @property
    def rate(self) -> float:
        """The mean of the highest rates."""
        return math.fsum(self.rates) / len(self.rates) if self.rates else 0.0

    @property
    def rate_text(self) -> str:
        """The highest rate as tables have it: with ~ if it is of one seed."""
        return formatting.number(self.rate) + ("" if len(self.rates) > 1 else "~")

    def figure(self, name: str) -> float | None:
        """Return the mean of a figure over the seeds; None if any run lacks it."""
        values = [value for outcome in self.outcomes if (value := outcome.figures.get(name)) is not None]
        return math.fsum(values) / len(values) if values and len(values) == len(self.outcomes) else None

    def per_second(self, name: str) -> float | None:
        """Return a rate of tokens at the highest rate of requests. That of a run is less: its last answers take time in
        which no request arrives."""
        tokens, requests = self.figure(name), self.figure("requests_per_s")
        return None if tokens is None or not requests else tokens / requests * (self.rate or requests)

    @property
    def answer_s(self) -> float:
        """How long an answer takes from its first token on."""
        return max((outcome.answer_s for outcome in self.outcomes), default=0.0)

    @property
    def scale(self) -> float:
        """The smallest factor on all bounds by which they would have been met, at the rate of `outcomes`."""
        return min((outcome.scale for outcome in self.outcomes), default=math.inf)


def best_of_kinds(rows: Sequence[MeasuredDesign]) -> dict[Kind, MeasuredDesign]:
    """Return the first design of each kind; rows have the best first."""
    found: dict[Kind, MeasuredDesign] = {}
    for row in rows:
        found.setdefault(row.design.kind, row)
    return found


@attrs.define
class DesignSearch:
    """The state of a search; what was found is there at any time, also if it is interrupted."""

    prober: Prober
    finder: ShapeFinder
    goal: Goal
    gpus: int
    seeds: int
    options: Mapping[str, Sequence[Any]]
    """The values to search of each option."""
    wanted: float = 0.0
    """A rate that the best design must serve, if any does."""
    on_stage: Callable[[str], object] = lambda stage: None
    shapes: list[RateSearch] = attrs.field(factory=list)
    tried: list[RateSearch] = attrs.field(factory=list)
    """Searches of options and of neighbours."""
    finals: list[RateSearch] = attrs.field(factory=list)
    finished: bool = False

    def run(self) -> None:
        """Search to the end. Raises OutOfTimeError and KeyboardInterrupt, which leave what was found."""
        self.search_shapes()
        self.refine()

    def refine(self) -> None:
        """Search options of the best shapes, and compare the finalists."""
        self.on_stage("options")
        finalists = list(self.finalists())
        self.on_stage("finals")
        self.search_finals(finalists)
        self.finished = True

    @property
    def short(self) -> int:
        """The requests of a short run."""
        return min(self.prober.traffic.requests, max(SHORT_LEAST, self.prober.traffic.requests // SHORT_SHARE))

    @property
    def middling(self) -> int:
        """The requests of runs that compare options."""
        return max(self.short, self.prober.traffic.requests // OPTION_SHARE)

    def worth(self, design: Design, rate: float) -> float:
        """Return `Goal.worth`."""
        return self.goal.worth(design, rate)

    def search_shapes(self, rate: float | None = None) -> None:
        """Find the highest rate of every cluster on short runs, then of those next to the best ratios. `rate` is what
        to expect of the best, if that is known."""
        self.on_stage(f"sizes and ratios on {self.gpus} GPUs")
        first_rate, first_step = (self.prober.traffic.rate, 2.0) if rate is None else (rate, 1.3)
        self.shapes = [
            RateSearch(design, self.short, first_rate, _SHORT_TOLERANCE, first_step=first_step)
            for design in self._begin_with()
        ]
        search_together(self.prober, self.shapes, worth=self.worth, drop_below=_DROP_BELOW)
        best = self._best_of("disaggregated", self.shapes)
        while best is not None and best.rate > 0:
            known = {search.design for search in self.shapes}
            more = [
                RateSearch(design, self.short, best.rate, _SHORT_TOLERANCE, first_step=1.2)
                for design in self.finder.neighbours(best.design, self.gpus)
                if design not in known
            ]
            if not more:
                return
            self.shapes += more
            search_together(self.prober, more, worth=self.worth, drop_below=_DROP_BELOW)
            best = self._best_of("disaggregated", self.shapes)

    def _begin_with(self) -> Iterator[Design]:
        """Yield the clusters that a search begins with. What a step may have decides which size of aggregated engines
        is best, for it decides how long tokens wait for prompts: so each has several chunks from the start."""
        chunks = [chunk for chunk in self.options.get("chunk", ()) if chunk in _FIRST_CHUNKS]
        for design in self.finder.designs(self.gpus):
            yield design
            if design.kind == "aggregated":
                own = OPTIONS["chunk"].own(self._scenario_of(design))
                yield from (design.with_option("chunk", chunk) for chunk in chunks if chunk != own)

    @property
    def best_rate(self) -> float:
        """The highest rate of any shape."""
        return max((search.rate for search in self.shapes), default=0.0)

    def search_scaled(self, likely: Sequence[Design], rate: float) -> None:
        """Find the highest rates of designs that were best on another number of GPUs; `rate` is what to expect."""
        self.on_stage(f"ratios on {self.gpus} GPUs")
        designs = dict.fromkeys(found for design in likely for found in self.finder.scaled(design, self.gpus))
        self.shapes = [RateSearch(design, self.middling, rate, 0.05, first_step=1.15) for design in designs]
        search_together(self.prober, self.shapes, worth=self.worth, drop_below=_DROP_SCALED)

    def near_best(self) -> Iterator[tuple[Design, float]]:
        """Yield the best shapes of each kind, and their rates."""
        for kind in KINDS:
            mine = self._ranked(kind, self.shapes)
            for search in mine[:FINALISTS]:
                if self._close(search, mine[0]):
                    yield search.design, search.rate

    def _best_of(self, kind: Kind, searches: Sequence[RateSearch]) -> RateSearch | None:
        return next(iter(self._ranked(kind, searches)), None)

    def _ranked(self, kind: Kind, searches: Sequence[RateSearch]) -> list[RateSearch]:
        """Return the searches of a kind that did not fail, the best first."""
        mine = [search for search in searches if search.design.kind == kind and search.error is None]
        return sorted(mine, key=self._rank, reverse=True)

    def _rank(self, search: RateSearch) -> tuple[float, float]:
        """Return the key that sorts searches by worth; those that never met, by how far they are from it."""
        scale = search.missed.scale if search.met is None and search.missed is not None else 0.0
        return self.worth(search.design, search.rate), -scale

    def finalists(self) -> Iterator[tuple[Design, float]]:
        """Yield the designs of the finals, each with the rate that short runs promise."""
        for kind in KINDS:
            ranked = self._best_of_each_cluster(kind)
            if not ranked:
                continue
            best = self.with_options(ranked[0].design, ranked[0].rate)
            gain = best.rate / ranked[0].rate if ranked[0].rate > 0 else 1.0
            yield best.design, best.rate
            if best.design != ranked[0].design:
                yield ranked[0].design, ranked[0].rate
            least = _DROP_BELOW * self.worth(ranked[0].design, ranked[0].rate)
            for search in ranked[1:FINALISTS]:
                if self.worth(search.design, search.rate) > least:
                    options = {**dict(best.design.options), **dict(search.design.options)}
                    yield attrs.evolve(search.design, options=tuple(sorted(options.items()))), search.rate * gain

    def _best_of_each_cluster(self, kind: Kind) -> list[RateSearch]:
        """Return the search that is worth most of each cluster of a kind, the best first."""
        found: dict[tuple[PoolShape, ...], RateSearch] = {}
        for search in self._ranked(kind, self.shapes):
            found.setdefault(search.design.pools, search)
        return list(found.values())

    def with_options(self, base: Design, rate: float) -> RateSearch:
        """Return the search of the best options of a cluster, one option after the other."""
        best = RateSearch(base, self.middling, rate or self.prober.traffic.rate, 0.04, first_step=1.1)
        search_together(self.prober, [best])
        self.tried.append(best)
        for name, values in self.options.items():
            option = OPTIONS[name]
            if base.kind in option.kinds and best.error is None:
                own = dict(best.design.options).get(name, option.own(self._scenario_of(best.design)))
                best = self._better(best, [best.design.with_option(name, value) for value in values if value != own])
        return best

    def _scenario_of(self, design: Design) -> ResolvedScenario:
        return self.prober.scenario_of(DesignProbe(design, self.prober.traffic.rate, self.short)).resolved

    def _better(self, best: RateSearch, others: Sequence[Design]) -> RateSearch:
        """Return the search of the best of other designs, or `best` if none serves a higher rate. If it serves none:
        of the one that is nearest to the service level at the lowest rate that was tried."""
        rate = best.rate * _WORTH_KEEPING
        if rate > 0:
            searches = [RateSearch(design, self.middling, rate, 0.03, first_step=1.08, above=True) for design in others]
            search_together(self.prober, searches)
            self.tried += searches
            better = max(searches, key=lambda search: search.rate, default=best)
            return better if better.rate > best.rate else best
        assert best.missed is not None
        probe = best.missed.probe
        scales = [it.scale for it in self.prober.run([attrs.evolve(probe, design=design) for design in others])]
        if not others or min(scales) * _WORTH_KEEPING > best.missed.scale:
            return best
        found = RateSearch(others[scales.index(min(scales))], self.middling, probe.rate, 0.04)
        search_together(self.prober, [found])
        self.tried.append(found)
        return found

    def search_finals(self, finalists: Sequence[tuple[Design, float]]) -> None:
        """Find the highest rates of the finalists on whole runs: with one seed, then with the others those near the
        best of their kind."""
        first = [self._final(design, rate, 0) for design, rate in dict(finalists).items()]
        self.finals = first
        search_together(self.prober, first)
        near = []
        for kind in KINDS:
            mine = self._ranked(kind, first)
            near += [search for search in mine if self._close(search, mine[0])]
        more = [self._final(search.design, search.rate, nth) for search in near for nth in range(1, self.seeds)]
        self.finals = [*first, *more]
        search_together(self.prober, more)

    def add_seeds(self, rows: Sequence[MeasuredDesign], more: int) -> None:
        """Find the highest rates of these designs with more seeds, after those that they all have."""
        have = min(len(row.rates) for row in rows)
        searches = [
            self._final(row.design, row.rate, nth)
            for row in rows
            for nth in range(have, have + more)
            if nth >= len(row.rates)
        ]
        self.finals += searches
        search_together(self.prober, searches)

    def _final(self, design: Design, rate: float, nth: int) -> RateSearch:
        whole = self.prober.traffic.requests
        return RateSearch(design, whole, rate or self.prober.traffic.rate, _FINAL_TOLERANCE, nth, first_step=1.06)

    def _close(self, search: RateSearch, best: RateSearch) -> bool:
        return self.worth(search.design, search.rate) >= _NEAR * self.worth(best.design, best.rate)

    def measured(self) -> list[MeasuredDesign]:
        """Return what is known of each design: those of the finals first, with all seeds before those with one, of each
        those that serve the wanted rate, the best first."""
        groups: dict[Design, list[RateSearch]] = {}
        for search in (*self.shapes, *self.tried, *self.finals):
            if search.met is None and (search.missed is None or search.above):
                continue  # Not run, or known only to be no better than another.
            found = groups.setdefault(search.design, [])
            if found and found[0].requests < search.requests:
                found.clear()
            if not found or found[0].requests == search.requests:
                found.append(search)
        rows = [self._measured(design, searches) for design, searches in groups.items()]
        final = {search.design for search in self.finals}

        def key(row: MeasuredDesign) -> tuple[bool, bool, bool, float, float]:
            # One seed may be a lucky one.
            few = len(row.rates) < self.seeds
            return row.design not in final, few, row.rate < self.wanted, -self.worth(row.design, row.rate), row.scale

        return sorted(rows, key=key)

    def _measured(self, design: Design, searches: Sequence[RateSearch]) -> MeasuredDesign:
        outcomes = []
        for search in searches:
            at = search.met or search.missed
            assert at is not None
            outcomes.append(self.prober.outcomes[at.probe])
        return MeasuredDesign(design, tuple(s.rate for s in searches), searches[0].requests, tuple(outcomes))
