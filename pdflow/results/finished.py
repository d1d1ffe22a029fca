"""The data of one finished run: its requests, its engines' steps, its totals, and the figures computed from them.

Tables, pages and plots are made from this; `result.Result` adds them as methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import attrs

from pdflow.results.figures.aftermath import Aftermath, aftermaths
from pdflow.results.figures.itls import bounds_itl, itls_ns, judge_itls
from pdflow.results.figures.metrics import Metrics, measure
from pdflow.results.files.bench_json import RunHeader
from pdflow.results.records import Records
from pdflow.results.steps import Steps
from pdflow.results.table import Report
from pdflow.results.totals import Totals

if TYPE_CHECKING:
    from pdflow.scenario.reading.editable import Scenario


@attrs.frozen(eq=False, repr=False)
class FinishedRun:
    """The measurements of one run. `scenario` is set where `pdflow.simulate` ran it."""

    header: RunHeader
    records: Records
    steps: Mapping[str, Steps]
    """Each engine's step log, under the engine's name."""
    totals: Totals
    metrics: Metrics
    aftermaths: tuple[Aftermath, ...] = ()
    """What each fault of an engine or a link did to the requests after it, in order."""
    scenario: Scenario | None = None

    @classmethod
    def of(cls, header: RunHeader, records: Records, steps: Mapping[str, Steps], totals: Totals) -> Self:
        """Make a finished run, computing its figures."""
        if bounds_itl(header.slo, header.class_slos):
            judge_itls(records, itls_ns(records, steps), header.slo, header.class_slos)
        metrics = measure(
            records, list(steps.values()), totals.duration_ns, header.slo, header.class_slos, header.warmup_ns
        )
        after = aftermaths(records, totals.faults, header.slo, header.warmup_ns)
        return cls(header, records, steps, totals, metrics, tuple(after))

    def made_by(self, scenario: Scenario) -> Self:
        """Return the same run with its scenario."""
        return attrs.evolve(self, scenario=scenario)

    def table(self) -> Report:
        """Return the report that a run prints: `print(result.table())`, or rich's `console.print(result.table())`."""
        return Report(self.header, self.metrics, self.totals, steps=self.steps, aftermaths=self.aftermaths)
