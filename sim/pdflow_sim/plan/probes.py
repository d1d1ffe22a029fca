"""One run of a plan: a design at a rate, and the figures that are kept of it.

A probe is a function of its scenario and seed as any run is, so it is run once however often it is asked for, and a
plan that was interrupted finds in its folder what it has run before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import attrs

from pdflow.results.figures.service_level import ServiceLevel
from pdflow.results.result import Result
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.experiments.executors import TaskExecutor
from pdflow_sim.experiments.rows import SweepRow, SweepTask, figures_of
from pdflow_sim.plan.designs import Design, DesignEditor
from pdflow_sim.plan.traffic import Traffic


@attrs.frozen
class Change:
    """Edits of a scenario that are made after all others, by dotted key. Two are equal if they are written alike."""

    edits: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    text: str = attrs.field(init=False, default=attrs.Factory(lambda self: repr(dict(self.edits)), takes_self=True))


UNCHANGED: Final = Change()


@attrs.frozen
class DesignProbe:
    """A design under `requests` requests at a rate, with the seed that is `nth` after the scenario's; `change` is made
    last, such as a fault or a faster link."""

    design: Design
    rate: float
    requests: int
    nth: int = 0
    change: Change = UNCHANGED


@attrs.frozen
class ProbeResult:
    """The figures of one probe. `scale` is by how much all bounds would have to be multiplied to be met; infinite if
    too many requests failed, or if the run did."""

    figures: Mapping[str, Any]
    scale: float
    error: str | None = None

    @property
    def answer_s(self) -> float:
        """How long an answer took from its first token on; 0 if nothing was answered."""
        e2e, ttft = (self.figures.get(f"{name}_mean_ms") for name in ("e2e", "ttft"))
        return 0.0 if e2e is None or ttft is None else (e2e - ttft) / 1000

    @property
    def meets(self) -> bool:
        """Whether the run met the service level."""
        return self.scale <= 1.0


ANSWERS: Final = 6
"""The least duration of a run, in times that an answer takes."""
QUEUES: Final = 10.0
"""And in the longest waits that the service level allows: with a tenth too much traffic a queue takes so long to get
there."""
_LONGEST_WAIT_S: Final = 30.0
"""Levels that allow longer waits are planned with runs as long as for this."""


@attrs.frozen
class PlanFigures:
    """What a plan keeps of a run: the figures of a sweep, the service level's, and how busy each resource was."""

    level: ServiceLevel

    def __call__(self, result: Result) -> Iterator[tuple[str, Any]]:
        yield from figures_of(result)
        scales = self.level.scales(result)
        for term, scale in scales.items():
            yield f"scale.{term}", scale if math.isfinite(scale) else None
        worst = max(scales.values())
        yield "scale", worst if math.isfinite(worst) else None
        totals = result.totals
        for role in totals.roles():
            yield f"kv_peak_share_{role}", totals.peak_kv_share(role)
        for link in totals.busiest_links(1):
            yield "busiest_link", link.name
            yield "busiest_link_share", link.utilisation(totals.duration_ns)
        for after in result.aftermaths[:1]:
            yield "ttft_p99_after_ms", after.ttft_after.p99_ms if after.ttft_after.count else None
            yield "ttft_p99_before_ms", after.ttft_before.p99_ms if after.ttft_before.count else None
            yield "failed_after", after.failed
            yield "recovered_s", None if after.recovered_ns is None else after.recovered_ns / 1e9


class OutOfTimeError(Exception):
    """The time that a plan may take is over."""


class Prober:
    """Runs probes, each once. `deadline` is an instant of `time.monotonic`."""

    def __init__(
        self,
        traffic: Traffic,
        level: ServiceLevel,
        executor: TaskExecutor,
        *,
        cache: Path | None = None,
        deadline: float = math.inf,
        on_run: Callable[[], object] = lambda: None,
    ) -> None:
        self.traffic = traffic
        self.level = level
        self.editor = DesignEditor(traffic.scenario)
        self._warmup_s = traffic.scenario.resolved.workload.warmup_s
        self._base = traffic.scenario.with_({"slo": level.table})
        self._measure = PlanFigures(level)
        self._executor = executor
        self._cache = cache
        self._deadline = deadline
        self._on_run = on_run
        self.outcomes: dict[DesignProbe, ProbeResult] = {}
        self.runs = 0
        self.requests = 0
        """Requests that were simulated, or found in the cache."""

    def point(self, probe: DesignProbe) -> dict[str, Any]:
        """Return the edits of the scenario that make a probe of it."""
        edits = self.editor.edits(probe.design) | self.traffic.edits(probe.rate, probe.requests)
        return {**edits, **probe.change.edits}

    def enough_requests(self, rate: float, requests: int, answer_s: float) -> int:
        """Return the requests of a run at a rate, `requests` or more: so many that they arrive during several answers
        and several of the longest waits that the level allows, after the warm-up.

        A thousand requests at once fit into batches, or wait for less than the bound, where a steady stream at that
        rate overflows.
        """
        wait_s = min(self.level.longest_wait_ms / 1000, _LONGEST_WAIT_S)
        span_s = self._warmup_s + max(QUEUES * wait_s, ANSWERS * answer_s)
        return max(requests, min(self.traffic.most_requests, math.ceil(rate * span_s)))

    def scenario_of(self, probe: DesignProbe) -> Scenario:
        """Return the scenario of a probe."""
        return self._base.with_(self.point(probe))

    def run(self, probes: Sequence[DesignProbe]) -> list[ProbeResult]:
        """Return the outcomes of probes, in their order. Raises OutOfTimeError."""
        new = [probe for probe in dict.fromkeys(probes) if probe not in self.outcomes]
        # The longest first, so that no process waits for another's last one.
        new.sort(key=lambda probe: -probe.requests)
        tasks = [SweepTask(self._base, self.point(p), p.nth, self._cache, self._measure) for p in new]
        if tasks:
            self._run_tasks(new, tasks)
        return [self.outcomes[probe] for probe in probes]

    def _run_tasks(self, probes: Sequence[DesignProbe], tasks: Sequence[SweepTask]) -> None:
        """Run tasks and keep their outcomes, in the order of the probes whichever ends first, also if not all end."""
        done: dict[int, ProbeResult] = {}
        self._check_time()
        try:
            with closing(self._executor.rows(tasks)) as rows:
                for position, row in rows:
                    done[position] = _outcome(row)
                    self.runs += 1
                    self._on_run()
                    self._check_time()
        finally:
            for position in sorted(done):
                self.outcomes[probes[position]] = done[position]
                self.requests += probes[position].requests

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTimeError


def _outcome(row: SweepRow) -> ProbeResult:
    if row.error is not None:
        return ProbeResult({}, math.inf, row.error)
    scale = row.figures["scale"]
    return ProbeResult(row.figures, math.inf if scale is None else scale)
