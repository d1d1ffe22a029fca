"""Mooncake's V0 pipe on A10: three tables, 33 rows (vLLM PR #10884; Qwen2.5-7B-Instruct-GPTQ-Int4, 1P1D).

The tables state lengths, rates and TP, and an issue states the model. They do not state the workload, the NICs or the
flags of the servers. Six tokens out, 200 prompts and rates of 2, 4, 6 and 8 are those of vLLM's script for
disaggregated prefill of that time (benchmarks/disagg_benchmarks/disagg_performance_benchmark.sh). It uses the dataset
sonnet: poems cut to nearly the same length, 1,010 tokens of 1,024, which agrees with the tables' totals. So here all
prompts of a row have its mean length, and arrivals are Poisson. TTFT is printed as a band over the unknown arrivals
(two seeds) and the unknown time of the API servers (2 or 30 ms).

Why TPOT grows strongly while median ITL does not: D blocks in `drop_select` while the KV of another prompt is
transferred. This takes as long as P's host pickles the KV and P's GPU copies it; the copies wait for the step that P
computes. Most gaps between tokens are not affected. The affected ones last as long as a transfer, and past saturation
as long as the queue of transfers, since V0 decodes only if no prompt waits. `mooncake-v0` with
`dialect = "as-published"` models all of this.

Fitted on every third row: the pickle rate of a thread, the share of the A10's data sheet that prompts reach, and the
host's time per step. Earlier attempts, with V1's scheduling and on rows of two NICs: prompts of lognormal lengths; no
wait for P's step and 0.15 GB/s in total, with which D falls behind as much and TTFT at low rates doubles; one wait per
prompt instead of three, with which TTFT at low rates is closer but D does not fall behind with long prompts. Two waits
are nearly as good as three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs

from benchmarks.published.common import (
    FITTED,
    HELD_OUT,
    MEASURED,
    Cell,
    Section,
    axes_of,
    percent,
    run,
)
from benchmarks.validation.common import read_csv, table

FILE = "mooncake_a10_v02.csv"
REQUESTS = 200
SEEDS = (0, 1)
API_SERVERS_S = (0.002, 0.03)
NETWORKS: dict[str, dict[str, Any]] = {
    "2 NICs": {"preset": "rdma-400g", "bandwidth_bytes_per_s": 11.5e9, "nics_per_rank": 2},
    "1 NIC": {"preset": "rdma-400g", "bandwidth_bytes_per_s": 11.5e9},
    "TCP": {"preset": "tcp-25g"},
}
"""Whose speeds are nowhere stated: 100 Gb/s a NIC, as the preset of the A10 supposes, and TCP over 25 Gb/s."""
PUBLISHED_AS = {
    f"{what}_{ours}": f"{what}_{theirs}"
    for what in ("ttft", "tpot", "itl")
    for ours, theirs in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))
}
FIGURES = ("ttft_mean", "ttft_p50", "tpot_mean", "tpot_p50", "itl_p50")
STARVED_MS = 500.0
"""Past saturation D goes from transfer to transfer: mean TPOT is of seconds, else below 0.2."""


@attrs.frozen
class Row:
    """One row of the tables, in ms."""

    number: int
    table: str
    tp: int
    rate_rps: float
    input_len: int
    tokens: int
    network: str
    published: dict[str, float]

    @property
    def name(self) -> str:
        return f"TP{self.tp}, {self.rate_rps:g}/s, {self.input_len:,} tokens, {self.network}"

    @property
    def fitted(self) -> bool:
        return self.number % 3 == 0


@attrs.frozen
class Fit:
    """What is not stated."""

    pickle_bytes_per_s: float = 1.2e9
    ec: float = 0.6
    host_step_s: float = 7e-3


GRID = tuple(Fit(rate * 1e9, ec, host) for rate, ec, host in product((0.7, 1.0, 1.4), (0.5, 0.6, 0.7), (5e-3, 7e-3)))


def rows_of(folder: Path) -> list[Row]:
    found = []
    for number, line in enumerate(read_csv(folder / FILE)):
        medium = line["interconnect"]
        found.append(
            Row(
                number,
                line["notes"].split('"')[-1],
                int(line["prefill_parallel"][2:]),
                float(line["request_rate_rps"]),
                int(line["input_len"]),
                round(int(line["total_input_tokens"]) / REQUESTS),
                next(name for name in NETWORKS if name in medium),
                {ours: float(line[f"{theirs}_ms"]) for ours, theirs in PUBLISHED_AS.items()},
            )
        )
    return found


def simulated(row: Row, fit: Fit, seed: int = 0, api_server_s: float = 0.01) -> dict[str, float]:
    """The same figures, in ms."""
    return _simulated(row.tp, row.rate_rps, row.tokens, row.network, fit, seed, api_server_s)


@cache
def _simulated(
    tp: int, rate_rps: float, tokens: int, network: str, fit: Fit, seed: int, api_server_s: float
) -> dict[str, float]:
    """Some points stand in two tables."""
    engine = {
        "gpu": {"preset": "a10", "ec": fit.ec, "host_step_s": fit.host_step_s},
        "tp": tp,
        "async_scheduling": False,
        "api_server_s": api_server_s,
        "max_num_batched_tokens": 10_000,
    }
    result = run(
        {
            "scenario": {"seed": seed},
            "workload": {
                "requests": REQUESTS,
                "arrival": {"process": "poisson", "rate_rps": rate_rps},
                "input_tokens": tokens,
                "output_tokens": 6,
            },
            "model": {"preset": "qwen2.5-7b-gptq-int4"},
            "pool": [{"name": "p", "role": "prefill", **engine}, {"name": "d", "role": "decode", **engine}],
            "transfer": {
                "method": "mooncake-v0",
                "dialect": "as-published",
                "kv_buffer_size": 5_000_000_000,
                "pickle_bytes_per_s": int(fit.pickle_bytes_per_s),
            },
            "network": NETWORKS[network],
        }
    ).summary
    return {name: float(result[f"{name}_ms"]) for name in PUBLISHED_AS}


def mean_of(results: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(result[name] for result in results) for name in results[0]}


def miss(rows: Iterable[Row], fit: Fit) -> float:
    """How far off the rows are that may be fitted on, by the logarithms of three figures each."""
    found = []
    for row in rows:
        ours = simulated(row, fit)
        found += [abs(log(ours[name] / row.published[name])) for name in ("ttft_mean", "tpot_mean", "itl_p50")]
    return fmean(found)


def fitted(rows: Sequence[Row]) -> Fit:
    return min(GRID, key=lambda fit: miss([row for row in rows if row.fitted], fit))


def report(folder: Path) -> Section:
    rows = rows_of(folder)
    fit = fitted(rows)
    section = Section("Mooncake's V0 pipe on A10", image="published-mooncake-a10.png")
    section.caption = "Mean TPOT against mean TTFT, published and simulated"
    bands = {row.number: [simulated(row, fit, *each) for each in product(SEEDS, API_SERVERS_S)] for row in rows}
    means = {number: mean_of(results) for number, results in bands.items()}
    count = sum(row.fitted for row in rows)
    section.lines += [
        f"Fitted: {fit.pickle_bytes_per_s / 1e9:.1f} GB/s through pickle, {percent(fit.ec)} of the data sheet's "
        f"FLOP/s, {fit.host_step_s * 1e3:.0f} ms of host time a step, on {count} of {len(rows)} rows "
        "(*). Milliseconds, published → simulated:",
        "",
    ]
    section.lines += table(
        ["row", "mean TTFT", "band", "median TTFT", "mean TPOT", "median TPOT", "median ITL", "p99 ITL"],
        (_line(row, means[row.number], bands[row.number]) for row in rows),
    )
    section.lines += [*_accuracy(rows, means), *_bands(rows, bands), *_order(rows, means), *_left(rows, means)]
    section.figure = _plot(rows, means)
    return section


def _line(row: Row, mean: dict[str, float], band: list[dict[str, float]]) -> Sequence[object]:
    low, high = (take(result["ttft_mean"] for result in band) for take in (min, max))
    pairs = [f"{row.published[name]:,.0f} → {mean[name]:,.0f}" for name in (*FIGURES, "itl_p99")]
    inside = "" if low <= row.published["ttft_mean"] <= high else " **no**"
    return (f"{row.name}{' *' if row.fitted else ''}", pairs[0], f"{low:,.0f} – {high:,.0f}{inside}", *pairs[1:])


def _saturated(figures: dict[str, float]) -> bool:
    return figures["tpot_mean"] > STARVED_MS


def _accuracy(rows: Sequence[Row], means: dict[int, dict[str, float]]) -> Iterator[str]:
    sides = [_saturated(row.published) == _saturated(means[row.number]) for row in rows]
    where = f"mean TPOT above or below {STARVED_MS:g} ms"
    yield f"- The side of saturation ({where}) is right in {sum(sides)} of {len(rows)} rows."
    for side, past in (("below", False), ("past", True)):
        held = [row for row in rows if not row.fitted and _saturated(row.published) is past]
        summaries = []
        for name in FIGURES:
            cells = [Cell(row.name, row.published[name], means[row.number][name]) for row in held]
            worst = max(cells, key=lambda cell: abs(cell.error))
            label = name.replace("_", " ").replace("p50", "median").replace("ttft", "TTFT").replace("tpot", "TPOT")
            summaries.append(
                f"{label.replace('itl', 'ITL')} {percent(median(abs(cell.error) for cell in cells))} "
                f"(worst {percent(worst.error, True)}, {worst.name})"
            )
        yield f"- Median errors {side} saturation, {len(held)} rows that were not fitted on: {'; '.join(summaries)}."


def _bands(rows: Sequence[Row], bands: dict[int, list[dict[str, float]]]) -> Iterator[str]:
    inside, widths = 0, []
    for row in rows:
        values = [result["ttft_mean"] for result in bands[row.number]]
        inside += min(values) <= row.published["ttft_mean"] <= max(values)
        widths.append(max(values) / min(values))
    yield (
        f"- {inside} of {len(rows)} mean TTFTs fall inside the band, whose upper end is {median(widths):.1f} times its "
        f"lower one in the median row, {min(widths):.1f} to {max(widths):.1f} times in all."
    )


def _order(rows: Sequence[Row], means: dict[int, dict[str, float]]) -> Iterator[str]:
    """Rows of one table and one NIC that differ in one thing: is the slower one the slower one?"""
    for name in ("ttft_mean", "tpot_mean"):
        right = total = 0
        for one, other in _neighbours(rows):
            total += 1
            ours = means[one.number][name] < means[other.number][name]
            right += ours == (one.published[name] < other.published[name])
        label = "TTFT" if name.startswith("ttft") else "TPOT"
        yield f"- Order of mean {label} between rows of one table: right in {right} of {total} pairs."


def _neighbours(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    for index, one in enumerate(rows):
        for other in rows[index + 1 :]:
            same = [one.tp == other.tp, one.rate_rps == other.rate_rps, one.input_len == other.input_len]
            if one.table == other.table and one.network == other.network and sum(same) == 2:
                yield one, other


def _left(rows: Sequence[Row], means: dict[int, dict[str, float]]) -> Iterator[str]:
    past = [row for row in rows if _saturated(row.published)]
    ours = median(means[row.number]["itl_p50"] for row in past)
    theirs = median(row.published["itl_p50"] for row in past)
    yield (
        "- TTFT is too long, most of all with 8,192 tokens. The most likely reason, not verified: in pdflow each of a "
        "prompt's three tensors waits for the whole step that P computes, with all the prompts in it."
    )
    tails = [(row.published["itl_p99"], means[row.number]["itl_p99"]) for row in past]
    off = percent(median(abs(ours_ms / theirs_ms - 1) for theirs_ms, ours_ms in tails))
    yield (
        f"- Past saturation the published median ITL is {theirs:.0f} ms, here {ours:,.0f} ms; the median error of p99 "
        f"ITL is {off}. vLLM V0 runs prompts before decodes (`scheduling`, v0 as published): a request with its first "
        "token waits until D's queue is empty, in one gap, and then gets the other four tokens at once."
    )
    yield ""


def _plot(rows: Sequence[Row], means: dict[int, dict[str, float]]) -> Any:
    figure, axes = axes_of("Mooncake V0 on A10: mean TPOT against mean TTFT, 33 rows")
    for row in rows:
        ours = means[row.number]
        axes.plot(
            [row.published["ttft_mean"], ours["ttft_mean"]],
            [row.published["tpot_mean"], ours["tpot_mean"]],
            color="0.8",
            linewidth=1,
            zorder=1,
        )
    axes.scatter(
        [row.published["ttft_mean"] for row in rows],
        [row.published["tpot_mean"] for row in rows],
        color=MEASURED,
        s=22,
        zorder=3,
        label="published",
    )
    for fitted_on, colour, label in ((True, FITTED, "simulated, fitted on"), (False, HELD_OUT, "simulated")):
        some = [means[row.number] for row in rows if row.fitted is fitted_on]
        axes.scatter(
            [one["ttft_mean"] for one in some],
            [one["tpot_mean"] for one in some],
            color=colour,
            s=22,
            zorder=2,
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlabel="mean TTFT in ms", ylabel="mean TPOT in ms")
    axes.legend(frameon=False, fontsize=8)
    return figure
