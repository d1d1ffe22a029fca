"""The rows of section 2 that were not fitted on and are below saturation, once with the roofline and once with NVIDIA's
kernel tables (`cost = { model = "aiconfigurator" }`), which measured single kernels of the same GPUs.

The roofline stays the default where both exist: the tables are no nearer to these engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.validation.common import Found, error_text, off, table
from benchmarks.validation.rows import Answer, Row, chosen, rows_of, simulated

KERNELS = ("cost", 'cost = { model = "aiconfigurator" }')


def report(folder: Path) -> Found:
    found = Found()
    lines: list[Sequence[object]] = []
    every: list[list[float]] = [[], [], [], []]
    for group, rows in rows_of(folder).items():
        fitted_on = chosen(rows)
        held_out = [(row, simulated(row)) for row in rows if row not in fitted_on]
        below = [(row, answer, simulated(row, edit=KERNELS)) for row, answer in held_out if not answer.past]
        cells = [_errors(below, which, name) for name in ("ttft_ms", "tpot_ms") for which in (1, 2)]
        for all_errors, errors in zip(every, cells, strict=True):
            all_errors += errors
        lines.append((group, len(below), *map(error_text, cells)))
    lines.append(("all", len(every[0]), *map(error_text, every)))
    found.lines += table(
        ["rows", "held out", "TTFT, roofline", "TTFT, tables", "TPOT, roofline", "TPOT, tables"], lines
    )
    means = [f"{fmean(map(abs, errors)):.1%}".replace("%", " %") for errors in every]
    found.lines += [
        f"Mean absolute errors of all rows: TTFT {means[0]} with the roofline and {means[1]} with the tables; TPOT "
        f"{means[2]} and {means[3]}.",
        "",
    ]
    return found


def _errors(rows: Sequence[tuple[Row, Answer, Answer]], which: int, name: str) -> list[float]:
    return off([getattr(row[which], name) for row in rows], [getattr(row[0], name) for row in rows])
