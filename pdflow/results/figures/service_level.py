"""A service level: bounds on latencies, each for a percentile of all requests or tokens, and how far a run is from it.

    ttft=500ms@p99,itl=50ms@p99,attainment=95%

`@p99` is on the run: 99 % of requests have their first token within 500 ms, and 99 % of tokens follow the one before
within 50 ms, as `vllm bench serve` prints p99_ttft_ms and p99_itl_ms; `@mean` is on the mean. `attainment` is on
requests: 95 % of them meet all bounds, that on ITL with 99 % of their own tokens. A bound without `@` counts in
attainment only. A request that fails meets no bound.

The distance of a run from its service level is one number, the scale: by how much all bounds would have to be
multiplied for the run to be just within them (the "SLO scale" of DistServe, OSDI 2024, figure 8). At 1 or below the
run meets the service level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures.exact import nearest_rank
from pdflow.results.figures.metrics import completed
from pdflow.results.figures.slo import Served
from pdflow.results.figures.spread import NS_PER_MS, PS_PER_MS, step_percentile_ps
from pdflow.results.finished import FinishedRun
from pdflow.results.totals import PS_PER_NS

LatencyName: TypeAlias = Literal["ttft", "tpot", "itl", "e2e"]
LATENCY_NAMES: Final[tuple[LatencyName, ...]] = get_args(LatencyName)
ATTAINMENT: Final = "attainment"
DEFAULT_ATTAINMENT: Final = 95.0
"""The share of requests, in %, that must meet bounds which name no percentile."""
_ITL_PERCENTILE: Final = 99.0
_UNITS_MS: Final = {"ms": 1.0, "s": 1000.0, "us": 0.001}
_BOUND: Final = re.compile(
    r"(?P<value>[0-9.eE+-]+?)\s*(?P<unit>ms|us|s)\s*(?:@\s*(?:p(?P<percent>[0-9.]+)|(?P<mean>mean|avg)))?"
)


class ServiceLevelError(ValueError):
    """The text of a service level is wrong: says which piece of it, and what was expected."""


@attrs.frozen
class LatencyBound:
    """A bound on one latency. `percentile` is of all requests (ITL: of all tokens), None if it counts in attainment
    only; `mean` bounds the mean instead."""

    latency: LatencyName
    bound_ms: float
    percentile: float | None = None
    mean: bool = False

    def __str__(self) -> str:
        statistic = " mean" if self.mean else "" if self.percentile is None else f" p{self.percentile:g}"
        return f"{self.latency.upper()}{statistic} <= {self.bound_ms:g} ms"

    @property
    def text(self) -> str:
        """The bound as it is written on the command line."""
        statistic = "@mean" if self.mean else "" if self.percentile is None else f"@p{self.percentile:g}"
        return f"{self.latency}={self.bound_ms:g}ms{statistic}"


@attrs.frozen
class ServiceLevel:
    """Bounds on latencies, and the share of requests in % that must meet all of them; None if that is not demanded."""

    bounds: tuple[LatencyBound, ...]
    attainment: float | None

    @staticmethod
    def parse(text: str) -> ServiceLevel:
        """Read the text of `--slo`. Raises ServiceLevelError."""
        bounds: dict[str, LatencyBound] = {}
        attainment: float | None = None
        for piece in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = (side.strip() for side in piece.partition("="))
            if name == ATTAINMENT:
                if attainment is not None:
                    raise ServiceLevelError(f"{ATTAINMENT} is there twice")
                attainment = _attainment(value)
                continue
            known = next((latency for latency in LATENCY_NAMES if latency == name), None)
            if known is None:
                expected = f"{', '.join(LATENCY_NAMES)} or {ATTAINMENT}"
                raise ServiceLevelError(f"{piece!r} has no latency that is known, expected {expected}")
            if name in bounds:
                raise ServiceLevelError(f"{name} is there twice; a latency has one bound")
            bounds[name] = _bound(known, value, piece)
        if not bounds:
            raise ServiceLevelError("has no bound, expected one at least, as in ttft=500ms@p99,itl=50ms@p99")
        if attainment is None and any(bound.percentile is None and not bound.mean for bound in bounds.values()):
            attainment = DEFAULT_ATTAINMENT
        return ServiceLevel(tuple(bounds.values()), attainment)

    @staticmethod
    def of_table(slo: Any) -> ServiceLevel | None:
        """Return the service level of a scenario's [slo], which 95 % of requests must meet; None if it is empty."""
        named = [(latency, getattr(slo, f"{latency}_ms")) for latency in LATENCY_NAMES]
        bounds = tuple(LatencyBound(latency, bound) for latency, bound in named if bound is not None)
        return ServiceLevel(bounds, DEFAULT_ATTAINMENT) if bounds else None

    @property
    def table(self) -> dict[str, float]:
        """The bounds as keys of a scenario's [slo] table, which each request is held against."""
        keys: dict[str, float] = {}
        for bound in self.bounds:
            keys[f"{bound.latency}_ms"] = bound.bound_ms
            if bound.latency == "itl":
                keys["itl_percentile"] = _ITL_PERCENTILE if bound.percentile is None else bound.percentile
        return keys

    @property
    def longest_wait_ms(self) -> float:
        """The longest time that a request may wait before its first token, 0 if nothing bounds it."""
        return max((bound.bound_ms for bound in self.bounds if bound.latency in ("ttft", "e2e")), default=0.0)

    def __str__(self) -> str:
        terms = [str(bound) for bound in self.bounds]
        if self.attainment is not None:
            terms.append(f"all met by {self.attainment:g} % of requests")
        return ", ".join(terms)

    @property
    def text(self) -> str:
        """The service level as it is written on the command line."""
        share = [] if self.attainment is None else [f"{ATTAINMENT}={self.attainment:g}%"]
        return ",".join([*(bound.text for bound in self.bounds), *share])

    def scales(self, run: FinishedRun) -> Mapping[str, float]:
        """Return how many times its bound each term is in a run, infinite where too many requests failed.

        The run's scenario must have `table` as its [slo] if a bound is on ITL and attainment is demanded.
        """
        counted = run.records.arriving_from(run.header.warmup_ns)
        served = completed(counted)
        lost = sum(outcome is not None for outcome in counted.outcome) - len(served.arrival)
        found = {}
        for bound in self.bounds:
            if bound.mean:
                mean_ms = getattr(run.metrics, bound.latency).mean_ms
                found[str(bound)] = math.inf if lost or not len(served.arrival) else mean_ms / bound.bound_ms
            elif bound.percentile is not None:
                found[str(bound)] = _scale(bound, bound.percentile, run, served, lost)
        if self.attainment is not None:
            worst = np.maximum.reduce([_of_requests(bound.latency, served) / bound.bound_ms for bound in self.bounds])
            found[ATTAINMENT] = _ranked(np.asarray(worst), self.attainment, lost)
        return found


def _bound(latency: LatencyName, value: str, piece: str) -> LatencyBound:
    match = _BOUND.fullmatch(value)
    expected = f"expected a time, and a percentile or the mean, as in {latency}=500ms@p99 or {latency}=2s@mean"
    try:
        milliseconds = 0.0 if match is None else float(match["value"]) * _UNITS_MS[match["unit"]]
        percent = None if match is None or match["percent"] is None else float(match["percent"])
    except ValueError:
        milliseconds, percent = 0.0, None
    if match is None or not 0 < milliseconds < math.inf:
        raise ServiceLevelError(f"{piece!r}: {expected}")
    if percent is not None and not 0 < percent <= 100:
        raise ServiceLevelError(f"{piece!r}: p{percent:g} is no percentile, expected more than 0 and at most 100")
    return LatencyBound(latency, milliseconds, percent, match["mean"] is not None)


def _attainment(value: str) -> float:
    try:
        percent = float(value.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not value.endswith("%"):
        percent *= 100
    if not 0 < percent <= 100:
        raise ServiceLevelError(f"{ATTAINMENT}={value}: expected a share of requests, as in {ATTAINMENT}=95%")
    return percent


def _scale(bound: LatencyBound, percent: float, run: FinishedRun, served: Served, lost: int) -> float:
    if bound.latency != "itl":
        return _ranked(_of_requests(bound.latency, served) / bound.bound_ms, percent, lost)
    # Tokens of requests that fail are in the log as well; those that were never computed are nowhere.
    ended = len(served.arrival) + lost
    if ended and len(served.arrival) < percent / 100 * ended:
        return math.inf
    warmup_ps = run.header.warmup_ns * PS_PER_NS
    found = step_percentile_ps(
        [log.ending_from(warmup_ps) if warmup_ps else log for log in run.steps.values()], percent
    )
    return 0.0 if found is None else found / PS_PER_MS / bound.bound_ms


def _of_requests(latency: LatencyName, served: Served) -> npt.NDArray[np.float64]:
    """Return a latency of each completed request, in ms; 0 where it has none."""
    if latency == "ttft":
        values = served.first - served.arrival
    elif latency == "e2e":
        values = served.last - served.arrival
    elif latency == "itl":
        assert served.itl is not None, "inter-token latencies were not measured, though a service level bounds them"
        values = served.itl
    else:
        return (served.last - served.first) / np.maximum(served.output - 1, 1) / NS_PER_MS
    return values / NS_PER_MS


def _ranked(values: npt.NDArray[np.float64], percent: float, lost: int) -> float:
    """Return the percentile over the values and as many infinite ones as requests were lost; infinite of nothing."""
    if not len(values) + lost:
        return math.inf
    rank = nearest_rank(percent, len(values) + lost)
    return math.inf if rank >= len(values) else float(np.partition(values, rank)[rank])
