"""Aggregated and disaggregated serving on eight MI300X with MORI-IO: vLLM's blog of 7 April 2026.

Qwen3-235B-A22B in 8 bits, 2,000 tokens in and 1,000 out, 100 requests at 8 per second; published is how many of them
had TTFT below 1 s and inter-token latencies below 50 ms. The blog gives latencies as pictures: without disaggregation
they are about 30 or about 150 ms. It does not state which percentile of a request's latencies counts; here it is the
99th, which `vllm bench serve` prints. That benchmark stretches Poisson arrivals so that the last request arrives at its
time, and so does this one: seeds differ in which requests arrive together.

*Calibrated* are two constants of the GPU, `ec` and `em` (shares of its FLOP/s and of its memory bandwidth), on the row
with two engines of TP4 alone: to 30 ms for the median latency, and to 150 ms for the median 99th percentile of those
requests that miss the bound. The published counts are not fitted. At 8 requests per second P is at its capacity, so
that a few per cent of a prompt's time decide how many requests wait for more than a second; the other columns show it.
"""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import attrs

from benchmarks.validation.common import Found, read_csv, scenario_of, table
from pdflow.results.result import Result
from pdflow_sim.run import simulate

FILE = "other_pd_published.csv"
REQUESTS, RATE_RPS = 100, 8.0
SEEDS = range(1, 21)
TYPICAL_MS, STALLED_MS = 30.0, 150.0
"""What the blog's pictures show of aggregated engines."""
ITL_MS = 50.0


@attrs.frozen
class Gpu:
    """The two constants that are calibrated."""

    ec: float
    em: float

    def faster(self, factor: float) -> Gpu:
        return Gpu(self.ec * factor, self.em * factor)


PRESET = Gpu(0.45, 0.70)


@attrs.frozen
class Design:
    """One row of the blog."""

    row_id: str
    name: str
    pools: tuple[tuple[str, int, int], ...]
    """(role, tp, replicas)"""
    method: str = "nixl-push"
    dispatch: str = "concurrent"


DESIGNS = (
    Design("moriio_tp8", "aggregated, TP8", (("aggregated", 8, 1),)),
    Design("moriio_2tp4", "aggregated, 2 x TP4", (("aggregated", 4, 2),)),
    Design("moriio_read", "1P TP4 + 1D TP4, pull", (("prefill", 4, 1), ("decode", 4, 1)), "nixl-pull", "sequential"),
    Design("moriio_write", "1P TP4 + 1D TP4, push", (("prefill", 4, 1), ("decode", 4, 1))),
)
CALIBRATED_ON = DESIGNS[1]


def arrivals_s(seed: int) -> list[float]:
    """As `vllm bench serve` spaces them: exponential gaps, stretched so that their sum is what the rate says."""
    numbers = random.Random(seed)
    times, now = [], 0.0
    for _ in range(REQUESTS):
        now += numbers.expovariate(1.0)
        times.append(now)
    return [time * REQUESTS / RATE_RPS / now for time in times]


def simulated(design: Design, gpu: Gpu, seed: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "arrivals.csv")
        with trace.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["t", "in", "out"])
            writer.writerows((f"{time:.6f}", 2000, 1000) for time in arrivals_s(seed))
        pools = "".join(
            f"""
[[pool]]
name = "{role}"
role = "{role}"
replicas = {replicas}
gpu = {{ preset = "mi300x", ec = {gpu.ec}, em = {gpu.em} }}
tp = {tp}
"""
            for role, tp, replicas in design.pools
        )
        scenario = scenario_of(
            f"""
[workload.trace]
path = "{trace}"
format = "csv"
columns = {{ arrival_s = "t", input_tokens = "in", output_tokens = "out" }}
[model]
preset = "qwen3-235b-a22b"
weight_dtype = "fp8"
activation_dtype = "fp8"
[slo]
ttft_ms = 1000
itl_ms = {ITL_MS}
itl_percentile = 99
[transfer]
method = "{design.method}"
connector = "moriio"
[router]
policy = "round-robin"
dispatch = "{design.dispatch}"
[network]
preset = "rdma-400g"
{pools}"""
        )
        return simulate(scenario, quiet=True).result


def stalled_ms(results: Sequence[Result]) -> float:
    """The median of requests' own 99th percentiles, of those beyond the bound."""
    beyond = [
        itl_ns / 1e6 for result in results for itl_ns in result.records.itl_ns if itl_ns and itl_ns / 1e6 > ITL_MS
    ]
    return median(beyond) if beyond else 0.0


def solved(wrong: Callable[[float], float], low: float, high: float) -> float:
    """Return where `wrong`, which falls, passes 0."""
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if wrong(middle) > 0 else (low, middle)
    return (low * high) ** 0.5


@cache
def calibrated() -> Gpu:
    """Fit the two constants in turn, on one design and four seeds."""
    gpu = PRESET
    for _ in range(3):
        em = solved(lambda em, ec=gpu.ec: _typical_ms(Gpu(ec, em)) - TYPICAL_MS, 0.1, 1.0)  # type: ignore[misc]
        ec = solved(lambda ec, em=em: stalled_ms(_sample(Gpu(ec, em))) - STALLED_MS, 0.02, 1.0)  # type: ignore[misc]
        gpu = Gpu(round(ec, 3), round(em, 3))
    return gpu


def _sample(gpu: Gpu) -> list[Result]:
    return [simulated(CALIBRATED_ON, gpu, seed) for seed in SEEDS[:4]]


def _typical_ms(gpu: Gpu) -> float:
    return median(result.metrics.itl.p50_ms for result in _sample(gpu))


def report(folder: Path) -> Found:
    found = Found()
    published = {row["row_id"]: row for row in read_csv(folder / FILE)}
    gpu = calibrated()
    found.lines += [
        f"Calibrated: `ec` {gpu.ec:g} (preset {PRESET.ec:g}), `em` {gpu.em:g} (preset {PRESET.em:g}). Requests of 100 "
        f"within both bounds, median of {len(SEEDS)} seeds, in brackets the lowest and highest:",
        "",
    ]
    columns = (PRESET, gpu, gpu.faster(1.05), gpu.faster(1.1), gpu.faster(1 / 1.05))
    runs = {(design, each): [simulated(design, each, seed) for seed in SEEDS] for design in DESIGNS for each in columns}
    good = {key: [result.metrics.slo.good for result in results] for key, results in runs.items()}
    found.lines += table(
        ["design", "published", "presets", "calibrated", "5 % faster", "10 % faster", "5 % slower"],
        [
            (
                design.name + (" *" if design is CALIBRATED_ON else ""),
                _published(published[design.row_id]),
                *(f"{median(values):.0f} ({min(values)} – {max(values)})" for values in _of(design, columns, good)),
            )
            for design in DESIGNS
        ],
    )
    found.lines += _latencies(runs, gpu)
    return found


def _published(row: dict[str, str]) -> str:
    return row["other"].split('"slo_ok_of_100": ')[1].split(",")[0]


def _of(design: Design, columns: Sequence[Gpu], good: dict[tuple[Design, Gpu], list[int]]) -> Iterator[list[int]]:
    for each in columns:
        yield good[design, each]


def _latencies(runs: dict[tuple[Design, Gpu], list[Result]], gpu: Gpu) -> Iterator[str]:
    yield "Latencies with the calibrated constants, medians over the seeds, in ms:"
    yield ""
    lines: list[Sequence[object]] = []
    for design in DESIGNS:
        results = runs[design, gpu]
        metrics = [result.metrics for result in results]
        lines.append(
            (
                design.name,
                f"{median(each.ttft.p50_ms for each in metrics):,.0f}",
                f"{median(each.ttft.max_ms for each in metrics):,.0f}",
                f"{median(each.itl.p50_ms for each in metrics):.1f}",
                f"{stalled_ms(results):.0f}" if stalled_ms(results) else "–",
            )
        )
    yield from table(["design", "TTFT p50", "longest TTFT", "ITL p50", "ITL p99 of requests beyond 50 ms"], lines)
