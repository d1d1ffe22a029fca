"""Holds the simulator against published measurements: python benchmarks/validate.py [../shared/data]

Writes docs/validation.md, but for section 6 (`python -m benchmarks.published`), and
benchmarks/results/validation_rows.csv. The measurements themselves are not in this repository, but for those of section
7: where the folder is missing this says so and writes nothing. Takes some minutes on two cores. `--only PART` prints
one part and writes nothing; `--only unfitted` writes section 7.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what is installed comes first, and may be compiled
from benchmarks.published.common import HEADING
from benchmarks.validation import directions, disagg, mori, requests, rows, tables
from benchmarks.validation.common import Claim, Found, table, with_section
from benchmarks.validation.unfitted import report as unfitted

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/validation.md"
ROWS = ROOT / "benchmarks/results/validation_rows.csv"
PEERS = ROOT / "benchmarks/results/peers.md"
METHODS = ROOT / "benchmarks/results/published.md"
SECTIONS: dict[str, Callable[[Path], Any]] = {
    "requests": requests.report,
    "rows": rows.report,
    "tables": tables.report,
    "disagg": disagg.report,
    "mori": mori.report,
    "directions": directions.report,
    "unfitted": lambda _: unfitted.report(),
}
UNFITTED = "## 7. Rows that nothing was fitted on"

INTRODUCTION = """\
# How right is it?

`python benchmarks/validate.py` writes this page, with all its figures; only the sentences are written by hand. It
replays published measurements of real systems and reports the error of pdflow. The measurements were made by others;
each section names its source. Those of sections 1 to 4 and 6 are not part of this repository.

An error is a median of |simulated / measured - 1|. The median signed error is in brackets: -10 % means that the
simulation is too fast. In rows that begin with *Not fitted*, the error of TTFT is the factor between the two, less 1:
100 % is a factor of 2. *Presets alone* needs no measurement: it uses data sheets with the factors of the presets. The
factors of the two RTX cards come from two of the runs of section 1, as their presets say, so for these cards section
1 is not a test on unseen data. The factors of H100, H200 and B200 come from kernel tables and not from rows of
sections 2 and 3. The one exception is how the latency of a small all-reduce grows with the ranks, which comes from
rows that may be fitted on. *Calibrated* is `pdflow calibrate`: three factors from 10 requests of a run, or from up to
10 rows of an engine, chosen by their position before the fit; errors are of the other requests or rows.
"""

PLAINLY = """\
## Where it is wrong

- **TTFT of a single request at low load** cannot be predicted to 5 %: it depends on the step in which the request
  arrives (section 1). The mean over many requests can.
- **Mean TTFT of rows whose traffic is not described** (Qwen3-32B on H100) has a large error even when calibrated: TTFT
  there depends on which requests arrive together, which the rows do not state.
- **Llama-3.1-8B fp8 on H200** is measured much faster than the presets predict, and the factors that correct this are
  implausible for any engine. KV in 8 bits, which the rows do not state, explains most of the error of TPOT and none of
  that of TTFT; neither does an opening burst that was not counted (section 2 has the runs). The cause of the rest is
  unknown.
- **Near prefill capacity** an error of a few per cent in service time becomes a factor in TTFT. For such rows the
  simulation predicts saturation correctly, but TTFT is off by a factor (sections 2 and 3).
- **TTFT of disaggregated systems** is given as a band, because the published rows do not state how clients start and
  which servers are in front of the engines. Such a wide band is not a prediction.
- **MI300X** has been compared with four runs of one model (section 3). With the preset, a step with a prompt takes less
  than half as long as measured. With two constants calibrated, disaggregated serving is above aggregated serving in the
  median of the seeds, as measured, but by less; with steps 5 % slower still it is not. P is at its capacity there: a
  few per cent of a prompt's time decide how many requests meet the bound.
- **The number of batch slots and KV tokens of an engine** has the largest effect: copy `kv_tokens` from vLLM's log.
- **vLLM V0's swapping and its watermark of free blocks** (section 6) are not modelled, so that TPOT past saturation
  differs.
- **Attention by windows, linear and sparse attention** have not been compared with a measurement by themselves.
  gpt-oss-120b (section 7) has windows in half of its layers. Products in 4 bits are only in three rows of section 3.
- Only section 6 is about the time of one transfer: no source publishes it per request.
- **Rows that nothing was fitted on** (section 7) have their own list of causes. The largest is the engine's version:
  steps of 2024 and 2025 take up to five times as long as those of 2026, which the presets describe.
"""


def claims(found: Sequence[Claim]) -> Iterator[str]:
    """What was asked for, and whether it holds."""
    yield "## In short"
    yield ""
    lines = [
        (
            claim.what,
            claim.metric,
            f"{claim.error:.1%}".replace("%", " %"),
            f"{claim.most:.0%}".replace("%", " %"),
            "yes" if claim.holds else "**no**",
        )
        for claim in found
    ]
    yield from table(["what", "metric", "error", "at most", "holds"], lines)
    yield f"{sum(claim.holds for claim in found)} of {len(found)} hold."
    yield ""


def page(results: dict[str, Found]) -> str:
    """The whole document."""
    lines = [INTRODUCTION, *claims([claim for found in results.values() for claim in found.summary]), PLAINLY]
    for title, section, module in (
        ("## 1. Real vLLM, request by request", "requests", requests),
        ("## 2. Aggregated vLLM on H100 and H200", "rows", rows),
        ("### Data sheets and kernel tables", "tables", tables),
        ("## 3. Prefill and decode apart", "disagg", disagg),
        ("### Is it worth it? MI300X", "mori", mori),
        ("## 4. Push against pull", "directions", directions),
    ):
        lines += [title, "", str(module.__doc__).strip(), "", *results[section].lines]
    if PEERS.exists():
        lines += ["## 5. Comparison with other simulators", "", PEERS.read_text(encoding="utf-8").strip(), ""]
    if METHODS.exists():
        lines += [HEADING, "", METHODS.read_text(encoding="utf-8").strip(), ""]
    lines += [UNFITTED, "", section_7(results["unfitted"])]
    return "\n".join(lines).rstrip() + "\n"


def section_7(found: Found) -> str:
    return "\n".join([str(unfitted.__doc__).strip(), "", *found.lines])


def rows_csv(everything: Sequence[tuple[rows.Row, rows.Answer, rows.Answer, bool]]) -> str:
    """Section 2 row by row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "id",
            "ttft_ms",
            "tpot_ms",
            "presets_ttft_ms",
            "presets_tpot_ms",
            "calibrated_ttft_ms",
            "calibrated_tpot_ms",
            "past_saturation",
            "fitted_on",
        ]
    )
    for row, preset, calibrated, fitted_on in everything:
        figures = (row.ttft_ms, row.tpot_ms, preset.ttft_ms, preset.tpot_ms, calibrated.ttft_ms, calibrated.tpot_ms)
        writer.writerow([row.id, *(f"{value:.2f}" for value in figures), int(preset.past), int(fitted_on)])
    return out.getvalue()


def _section(name: str, folder: Path) -> Any:
    return SECTIONS[name](folder)


def main(arguments: Sequence[str]) -> int:
    only = arguments[1] if arguments[:1] == ["--only"] else None
    given = list(arguments[2 if only else 0 :])
    folder = (Path(given[0]) if given else ROOT.parent / "shared/data") / "published"
    if only == "unfitted":
        text = with_section(PAGE.read_text(encoding="utf-8"), UNFITTED, section_7(unfitted.report()))
        PAGE.write_text(text, encoding="utf-8")
        print(f"section 7 of {PAGE} written")
        return 0
    if not folder.is_dir():
        print(f"{folder} is not there: nothing to hold anything against")
        return 0
    if only is not None:
        found = _section(only, folder)
        print("\n".join((found[0] if isinstance(found, tuple) else found).lines))
        return 0
    with ProcessPoolExecutor(min(len(SECTIONS), os.cpu_count() or 1)) as pool:
        # The longest first.
        order = ("disagg", "rows", "mori", "unfitted", "tables", "directions", "requests")
        running = {name: pool.submit(_section, name, folder) for name in order}
        results = {name: running[name].result() for name in SECTIONS}
    results["rows"], everything = results["rows"]
    text = page(results)
    PAGE.write_text(text, encoding="utf-8")
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(rows_csv(everything), encoding="utf-8")
    print(f"{PAGE} and {ROWS} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
