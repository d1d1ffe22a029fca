"""The data of one run, or of several that differ in their seed alone, that a comparison needs.

Made from a finished run here, from its files in `read`. Figures of requests are worked out from their records by the
same rules as during a run, so that they can be resampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.comparison.seeds import SeedsReport
from pdflow.results.figures.metrics import completed
from pdflow.results.figures.slo import Classes, Served, SloTargets, attained_by_metric
from pdflow.results.files.bench_json import statements
from pdflow.results.records import Records
from pdflow.results.result import Result


@attrs.frozen(kw_only=True, eq=False)
class OneRun:
    """One run to compare. `path` is the folder of its files, or the scenario's file."""

    path: Path
    name: str
    seed: int
    interrupted: bool
    requests_per_s: float
    output_tokens_per_s: float
    goodput_rps: float | None
    records: Records
    done: npt.NDArray[np.bool_]
    """Which requests were completed."""
    served: Served
    """The completed requests."""
    good: npt.NDArray[np.bool_] | None
    """Which completed requests met every bound of the SLO; None if the scenario has none."""
    costs: Sequence[str] = ()
    """Where step times come from, and how wrong they may be, in words."""

    @staticmethod
    def of(result: Result, path: Path) -> OneRun:
        """Return the data of a run that has just ended."""
        header, metrics = result.header, result.metrics
        records = result.records.arriving_from(header.warmup_ns)
        done, served = done_of(records)
        of_class = {name: None if row.slo is None else row.bounds for name, row in metrics.classes.items()}
        return OneRun(
            path=path,
            name=header.scenario_name,
            seed=header.seed,
            interrupted=header.interrupted,
            requests_per_s=metrics.per_second(metrics.completed),
            output_tokens_per_s=metrics.per_second(metrics.output_tokens),
            goodput_rps=None if metrics.slo is None else metrics.slo.goodput_rps,
            records=records,
            done=done,
            served=served,
            good=good_of(header.slo, of_class, records),
            costs=statements(header.costs),
        )


@attrs.frozen(kw_only=True, eq=False)
class SeedRuns:
    """Several runs of one scenario, to compare as one."""

    path: Path
    report: SeedsReport


Runs: TypeAlias = OneRun | SeedRuns


def done_of(records: Records) -> tuple[npt.NDArray[np.bool_], Served]:
    """Return which requests were completed, and the completed requests."""
    return np.array([outcome == "completed" for outcome in records.outcome], dtype=np.bool_), completed(records)


def good_of(
    slo: SloTargets | None, of_class: Mapping[str, SloTargets | None], records: Records
) -> npt.NDArray[np.bool_] | None:
    """Return which completed requests met every bound, of `slo` or of their class; None if there are no bounds."""
    done, served = done_of(records)
    bounds, codes = [], None
    if records.classes:
        classes = Classes.of(records.classes, len(records))
        bounds = [of_class.get(name, slo) for name in classes.names]
        codes = classes.codes[done]
    attained = attained_by_metric(slo, served, bounds, codes)
    return np.logical_and.reduce(list(attained.values())) if attained else None
