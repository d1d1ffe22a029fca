"""Holds the simulator against published measurements: python benchmarks/validate.py [../shared/data]

Writes docs/validation.md, but for section 6 (`python -m benchmarks.published`), and
benchmarks/results/validation_rows.csv. The measurements themselves are not in this repository: where the folder is
missing this says so and writes nothing. Takes some minutes on two cores. `--only PART` prints one part and writes
nothing.
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
from benchmarks.validation import directions, disagg, requests, rows
from benchmarks.validation.common import Claim, Found, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/validation.md"
ROWS = ROOT / "benchmarks/results/validation_rows.csv"
PEERS = ROOT / "benchmarks/results/peers.md"
METHODS = ROOT / "benchmarks/results/published.md"
SECTIONS: dict[str, Callable[[Path], Any]] = {
    "requests": requests.report,
    "rows": rows.report,
    "disagg": disagg.report,
    "directions": directions.report,
}

INTRODUCTION = """\
# How right is it?

Written by `python benchmarks/validate.py`; nothing below is typed in by hand but the sentences. It replays published
measurements of real systems and says how far pdflow is from them. The measurements are other people's and not part of
this repository; their sources are named with each section.

An error is a median of |simulated / measured - 1|; in brackets the median signed one, so that -10 % means "simulated
too fast". *Presets alone* is what a user gets without measuring anything: data sheets with the presets' factors. The
factors of the two RTX cards come from two of the runs of section 1, as their presets say, so there they are no test of
a card that nobody has run; those of H100, H200 and B200 come from kernel tables and have never seen a row of sections 2
and 3, but for how the latency of a small all-reduce grows with the ranks, which is from rows that may be fitted on.
*Calibrated* is `pdflow calibrate`: three factors from 10 requests of a run, or from up to 10 rows of an engine, chosen
before the fit by their position; errors are of the others.
"""

PLAINLY = """\
## Where it is wrong

- **TTFT of a single request at low load** cannot be had to 5 %: it depends on which step an arrival catches
  (section 1). Its mean over many requests can.
- **Mean TTFT of rows whose traffic is not described** (Qwen3-32B on H100) stays off even when calibrated: TTFT there is
  made of how arrivals fall together, which the rows do not say.
- **Llama-3.1-8B fp8 on H200** is measured much faster than the presets say, and the factors that make up for it are no
  engine's. KV kept in 8 bits, which the rows do not state, explains most of TPOT's error and none of TTFT's; nor does
  an opening burst that was not counted (section 2 has the runs). What is left has no name yet.
- **Near prefill capacity** a few per cent of service time become a factor in TTFT. Rows there are on the right side,
  and off by a factor (sections 2 and 3).
- **TTFT of disaggregated systems** is a band, because the published rows leave out how clients start and what stands
  in front of the engines. A band that wide is no prediction.
- **How many seats and KV tokens an engine has** decides more than anything else: paste `kv_tokens` from vLLM's log.
- **Past saturation of vLLM V0** (section 6) mean TPOT is near, TTFT too long, and ITL's quantiles are not V0's: it runs
  prompts before decodes, which no engine here does.
- **Time that vLLM takes per prompt token outside the GPU** (section 6, CPU connector without P/D) is not modelled.
- Nothing but section 6 is about the time of one transfer: no source publishes it per request.
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
    for number, (title, section) in enumerate(
        (
            ("Real vLLM, request by request", "requests"),
            ("Aggregated vLLM on H100 and H200", "rows"),
            ("Prefill and decode apart", "disagg"),
            ("Push against pull", "directions"),
        ),
        1,
    ):
        module = {"requests": requests, "rows": rows, "disagg": disagg, "directions": directions}[section]
        lines += [f"## {number}. {title}", "", str(module.__doc__).strip(), "", *results[section].lines]
    if PEERS.exists():
        lines += ["## 5. Beside a peer", "", PEERS.read_text(encoding="utf-8").strip(), ""]
    if METHODS.exists():
        lines += [HEADING, "", METHODS.read_text(encoding="utf-8").strip(), ""]
    return "\n".join(lines).rstrip() + "\n"


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
    if not folder.is_dir():
        print(f"{folder} is not there: nothing to hold anything against")
        return 0
    if only is not None:
        found = _section(only, folder)
        print("\n".join((found[0] if isinstance(found, tuple) else found).lines))
        return 0
    with ProcessPoolExecutor(min(len(SECTIONS), os.cpu_count() or 1)) as pool:
        # The longest first.
        order = ("disagg", "rows", "directions", "requests")
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
