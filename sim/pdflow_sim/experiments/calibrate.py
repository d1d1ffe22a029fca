"""`pdflow calibrate`: a pool's step times, corrected by the latencies of some requests on a real engine.

The scenario has the traffic that the engine served; a file has the latencies of some of its requests. The factors are
those with which the simulated run comes nearest to them: queueing, batching and preemption are simulated, not fitted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, inf, log
from pathlib import Path
from statistics import fmean, median

import attrs

from pdflow.cost.scale import Factors, scaled
from pdflow.cost.step import StepCost
from pdflow.errors import Problem, ScenarioError
from pdflow.results.command_line import command_line
from pdflow.scenario.costs.cost_file import CostFile, MadeFrom, MeasuredEngine, cost_file, written
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.schema.noise import NO_NOISE
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.workload.build import requests
from pdflow_sim.experiments.seen import MeasuredRequest, read_seen
from pdflow_sim.run import RunOptions, prepare
from pdflow_sim.world import World

BARS = {
    "tpot": (0.03, "±3 % (±6 % per request with preemption)"),
    "e2e": (0.03, "±3 %"),
    "ttft": (0.20, "mean ±5 %, per request ±20 % at low load"),
}
"""The error bars of a fit whose median miss is at most the first number, for the same engine
and load regime; docs/validation.md has ours.
"""
STARTS = [Factors(linear=exp(tenths / 10), attention=exp(half / 2)) for tenths in range(-6, 7) for half in (0, -1, 1)]
"""The points from the best of which the search begins: runs with queues have many local minima."""
FIRST_STEP = (0.05, 0.25, 5e8)
"""The first steps of the search: in the logarithm of `linear` and of `attention`, in picoseconds of host time."""
HALVINGS = 6
FARTHEST = 4.0
"""The bound of factors: one beyond it, or below its inverse, is no correction any more."""


@attrs.frozen
class Misses:
    """The misses on the requests that the factors were fitted on: the median of |simulated / measured - 1|; None if
    nothing was measured.
    """

    ttft: float | None
    tpot: float | None


@attrs.frozen
class Calibration:
    """The result of a calibration: the factors, the cost, and the misses before and after."""

    factors: Factors
    cost: StepCost
    before: Misses
    after: Misses
    runs: int


def calibrate(scenario: ResolvedScenario, pool: Pool, seen: Sequence[MeasuredRequest]) -> Calibration:
    """Return the factors for a pool's cost, by the mean of |log(simulated / measured)|: a few wild requests count
    little.
    """
    base = step_cost(scenario.model, pool, scenario.base_dir)
    scenario = attrs.evolve(scenario, noise=NO_NOISE)  # a fit is to means
    tried: dict[Factors, Misses] = {}

    def miss(factors: Factors) -> float:
        far, tried[factors] = _miss(scenario, {pool.name: scaled(base, factors)}, seen)
        return far

    best = nearest(miss, base.h0)
    cost = attrs.evolve(
        scaled(base, best),
        provenance=f"calibrated on {len(seen)} requests: {best}; of {base.provenance}",
        rel_error=dict(_bars(tried[best])),
    )
    return Calibration(best, cost, tried[Factors()], tried[best], len(tried))


def _bars(after: Misses) -> Iterator[tuple[str, str]]:
    """Yield the error bars for other requests: nothing better than the misses of those fitted on."""
    for name, missed in (("tpot", after.tpot), ("e2e", after.tpot), ("ttft", after.ttft)):
        most, bar = BARS[name]
        if missed is None:
            yield name, "unknown: no measured request"
        else:
            yield name, bar if missed <= most else f"unknown; the fitted requests differ by {missed:.0%}"


def nearest(miss: Callable[[Factors], float], h0: int) -> Factors:
    """Return the factors with the least miss, for a cost with that h0; the miss of each is computed once.

    A coarse look everywhere, then a pattern search: each factor in turn a step up and a step down, steps halved when
    nothing gains.
    """
    asked = functools.cache(miss)
    asked(Factors())
    best = min(STARTS, key=asked)
    for halving in range(HALVINGS):
        gained = True
        while gained:
            gained = False
            for other in _around(best, h0, 0.5**halving):
                if asked(other) < asked(best):
                    best, gained = other, True
    return best


def _around(factors: Factors, h0: int, share: float) -> Iterator[Factors]:
    linear, attention, host = (step * share for step in FIRST_STEP)
    for sign in (1, -1):
        yield attrs.evolve(factors, linear=_bounded(factors.linear * exp(sign * linear)))
        yield attrs.evolve(factors, attention=_bounded(factors.attention * exp(sign * attention)))
        yield attrs.evolve(factors, host_ps=max(-h0, factors.host_ps + sign * round(host)))


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / FARTHEST), FARTHEST)


def _miss(
    scenario: ResolvedScenario, costs: Mapping[str, StepCost], seen: Sequence[MeasuredRequest]
) -> tuple[float, Misses]:
    world = ran(scenario, costs)
    ratios: dict[str, list[float]] = {"TTFT": [], "TPOT": []}
    for one in seen:
        ttft_ms, tpot_ms = latencies_ms(world, one.request)
        for name, simulated, measured in (("TTFT", ttft_ms, one.ttft_ms), ("TPOT", tpot_ms, one.tpot_ms)):
            if simulated is not None and measured is not None:
                ratios[name].append(simulated / measured)
    misses = [median(abs(ratio - 1) for ratio in found) if found else None for found in ratios.values()]
    every = [abs(log(ratio)) if ratio > 0 else inf for found in ratios.values() for ratio in found]
    return fmean(every) if every else inf, Misses(*misses)


def ran(scenario: ResolvedScenario, costs: Mapping[str, StepCost]) -> World:
    """Return the world after the scenario's run. `costs` replace those of the pools that they name."""
    world, _ = prepare(scenario, RunOptions(), [], costs)
    world.clock.run()
    return world


def latencies_ms(world: World, request: int) -> tuple[float | None, float | None]:
    """Return TTFT and TPOT of one request; None where it has none."""
    known = world.records.latencies_ms(request) if request < len(world.records) else None
    return known or (None, None)


def calibrated(scenario: ResolvedScenario, seen: Path, name: str | None, command: Sequence[str]) -> tuple[str, str]:
    """Run the command, and return what to print and the text of the cost file. Raises ScenarioError."""
    pool = _chosen(scenario, name)
    if not pool.tp_alone:
        problem = "has ep or dp_attention, whose step times no cost file can hold; calibrate a pool without them"
        raise ScenarioError([Problem(scenario.path, f"pool.{pool.name}", problem)])
    built = list(requests(scenario.workload, scenario.seed, scenario.base_dir))
    found = calibrate(scenario, pool, read_seen(seen, len(built)))
    lines = [f"{pool.name}: {found.factors} ({found.runs} simulated runs)"]
    for label, before, after in (
        ("TTFT", found.before.ttft, found.after.ttft),
        ("TPOT", found.before.tpot, found.after.tpot),
    ):
        if before is not None and after is not None:
            lines.append(f"{label}: median error of these requests {before:.1%} before, {after:.1%} now")
    source = f"requests measured on a real engine: {seen.name}"
    file = as_file(scenario, pool, found, source, command_line(command))
    return "\n".join(lines), written(file)


def _chosen(scenario: ResolvedScenario, name: str | None) -> Pool:
    names = [pool.name for pool in scenario.pools]
    if name is None and len(names) == 1:
        return scenario.pools[0]
    if name not in names:
        problem = "--pool is missing" if name is None else f"--pool {name}: no pool has this name"
        raise ScenarioError([Problem("", "", f"{problem}; this scenario has {', '.join(names)}")])
    return scenario.pool(name)


def as_file(scenario: ResolvedScenario, pool: Pool, found: Calibration, source: str, command: str) -> CostFile:
    """Return the cost file that `cost = { model = "measured", path = ... }` takes."""
    model = scenario.model
    engine = MeasuredEngine(
        model=model.name,
        gpu=pool.gpu.name,
        tp=pool.tp,
        weight_bytes_per_param=model.weight_bytes_per_param,
        kv_bytes_per_value=model.kv_bytes_per_value,
    )
    return cost_file(found.cost, engine, MadeFrom(source=source, command=command))
