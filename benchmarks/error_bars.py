"""Writes the error bars of the roofline: python -m benchmarks.error_bars [--data FOLDER]

How far published measurements are from pdflow with presets alone, by GPU, kind of model, parallelism and load: the 10th
and the 90th percentile of measured / simulated - 1 over the rows of docs/validation.md (sections 1, 2, 3 and 7). Rows
of section 2 that the all-reduce may have been fitted on are left out. pdflow/scenario/presets/error_bars.json is what
results print; docs/costs.md has the same as a table (`python docs/generate.py`). Takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from benchmarks.validation import disagg, requests, rows
from benchmarks.validation.common import ROOT, latencies, scenario_of
from benchmarks.validation.unfitted import rows as unfitted
from pdflow.scenario.costs.error_bars import ErrorBarKey, key_of_engine
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow_sim.experiments.calibrate import ran

DATA: Final = ROOT.parent / "shared" / "data" / "published"
FILE: Final = ROOT / "pdflow" / "scenario" / "presets" / "error_bars.json"
PRESETS_HOST_S, PRESETS_API_SERVER_S = 0.001, 0.03
"""What section 3 varies, as the presets have it."""
FEW: Final = 5
"""Of fewer rows the least and the greatest are the bar."""


class Residual(NamedTuple):
    """How far one row is from its simulation: measured / simulated - 1."""

    key: ErrorBarKey
    busy: bool
    """Past 85 % load, or clients wait for slots or blocks."""
    seen: bool
    """True if constants of the presets were fitted on the row's run."""
    ttft: float | None
    tpot: float | None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the published measurements")
    folder = parser.parse_args(arguments).data
    found = [*_of_runs(folder), *_of_rows(folder), *_of_pairs(folder), *_of_unfitted()]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, _bars(found))) + "\n]\n", encoding="utf-8")
    print(f"{FILE}: {len(found)} rows")
    return 0


def _of_runs(folder: Path) -> Iterator[Residual]:
    """Section 1: by request."""
    with TemporaryDirectory() as scratch:
        for run in requests.RUNS:
            replay = requests.Replay(folder, run, Path(scratch))
            scenario = scenario_of(requests.text_of(run, replay.trace()))
            outcome = replay.simulated()
            for ttft, tpot, waited in zip(outcome.ttft, outcome.tpot, replay.waited, strict=True):
                yield Residual(_key(scenario), waited, True, 1 / (1 + ttft) - 1, 1 / (1 + tpot) - 1)


def _of_rows(folder: Path) -> Iterator[Residual]:
    """Section 2: rows that were held out."""
    for group in rows.rows_of(folder).values():
        for row in group:
            if row in rows.chosen(group):
                continue
            answer = rows.simulated(row)
            key = _key(scenario_of(row.text(rows.Setup())))
            yield Residual(key, answer.past, False, row.ttft_ms / answer.ttft_ms - 1, row.tpot_ms / answer.tpot_ms - 1)


def _of_pairs(folder: Path) -> Iterator[Residual]:
    """Section 3: TPOT, by the decode engine. TTFT is a band there."""
    for row in disagg.rows_of(folder):
        scenario = scenario_of(row.text(min(disagg.WAVES), PRESETS_HOST_S, PRESETS_API_SERVER_S))
        tpot_ms = fmean(tpot for _, tpot in latencies(ran(scenario, {})))
        yield Residual(_key(scenario), False, False, None, row.tpot_ms / tpot_ms - 1)


def _of_unfitted() -> Iterator[Residual]:
    """Section 7."""
    for row in unfitted.rows():
        answer = unfitted.simulated(row)
        published, figures = row.published, answer.figures
        ttft = None if published.ttft_ms is None else published.ttft_ms / figures.ttft_ms - 1
        tpot = None if published.tpot_ms is None else published.tpot_ms / figures.tpot_ms - 1
        yield Residual(_key(scenario_of(row.text(unfitted.AS_STATED))), answer.past, False, ttft, tpot)


def _key(scenario: ResolvedScenario) -> ErrorBarKey:
    """Return the class of the engine that decodes."""
    decoding: Pool = next(pool for pool in scenario.pools if pool.role != "prefill")
    return key_of_engine(scenario.model, decoding)


def _bars(found: Sequence[Residual]) -> Iterator[dict[str, Any]]:
    for key in sorted({each.key for each in found}):
        bar: dict[str, Any] = key._asdict() | {"seen": any(each.seen for each in found if each.key == key)}
        for load, busy in (("below", False), ("above", True)):
            those = [each for each in found if each.key == key and each.busy is busy]
            for metric in ("tpot", "ttft"):
                values = [value for each in those if (value := getattr(each, metric)) is not None]
                bar[f"{metric}_{load}"] = None if not values else [len(values), *_interval(values)]
        yield bar


def _interval(values: Iterable[float]) -> tuple[float, float]:
    values = sorted(values)
    if len(values) < FEW:
        return round(values[0], 3), round(values[-1], 3)
    tenths = quantiles(values, n=10, method="inclusive")
    return round(tenths[0], 3), round(tenths[-1], 3)


if __name__ == "__main__":
    sys.exit(main())
