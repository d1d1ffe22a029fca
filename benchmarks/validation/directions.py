"""Push against pull, with a router that waits for the prefill and with one that does not: vLLM PR #35264.

The PR's table (six readable rows; AWS P5en, H200, TP 4 on each side, sonnet 512/64 and 512/128 at 4 and 8 requests per
second) names no model and no router, so only directions are compared: which method is faster, and in which stage. The
four runs differ only in `method` and `dispatch`; they use vLLM unchanged (`vllm-stock`). A pull always waits for the
prefill's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.validation.common import Found, read_csv, scenario_of, table
from pdflow.results.result import Result
from pdflow_sim.run import simulate

FILE = "seed_systems_measurements.csv"
RUNS = (
    ("nixl-pull", "sequential"),
    ("nixl-push", "sequential"),
    ("nixl-pull", "concurrent"),
    ("nixl-push", "concurrent"),
)


def text_of(method: str, dispatch: str, rate_rps: float, output_tokens: int) -> str:
    pools = "".join(
        f"""
[[pool]]
name = "{role}"
role = "{role}"
gpu = "h200"
tp = 4
"""
        for role in ("prefill", "decode")
    )
    return f"""
[workload]
requests = 1000
arrival = {{ process = "poisson", rate_rps = {rate_rps} }}
input_tokens = 512
output_tokens = {output_tokens}
[model]
preset = "llama-3.1-70b"
[transfer]
method = "{method}"
dialect = "vllm-stock"
[router]
dispatch = "{dispatch}"
[network]
preset = "rdma-400g"
{pools}"""


def report(folder: Path) -> Found:
    found = Found()
    found.lines += ["Published (PR #35264), mean and median TTFT in ms:", ""]
    rows = {row["row_id"]: row for row in read_csv(folder / FILE) if row["row_id"].startswith("nixl_")}
    pairs = [(row, rows[name.replace("pull", "push")]) for name, row in rows.items() if "pull" in name]
    found.lines += table(
        ["512 tokens in", "pull", "push", "push / pull"],
        [
            (
                f"{pull['output_len']} out, {pull['request_rate_rps']} requests/s",
                f"{float(pull['ttft_mean_ms']):.0f}, {float(pull['ttft_median_ms']):.0f}",
                f"{float(push['ttft_mean_ms']):.0f}, {float(push['ttft_median_ms']):.0f}",
                f"{float(push['ttft_mean_ms']) / float(pull['ttft_mean_ms']):.2f}, "
                f"{float(push['ttft_median_ms']) / float(pull['ttft_median_ms']):.2f}",
            )
            for pull, push in pairs
        ],
    )
    for rate in (4.0, 8.0):
        results = [simulate(scenario_of(text_of(*run, rate, 128)), quiet=True).result for run in RUNS]
        found.lines += _simulated(rate, results)
    return found


def _simulated(rate: float, results: Sequence[Result]) -> Iterator[str]:
    yield f"Simulated, llama-3.1-70b, 512 in, 128 out, {rate:g} requests/s; ms, stages as means:"
    yield ""
    names = [f"{method.removeprefix('nixl-')}, {dispatch}" for method, dispatch in RUNS]
    lines: list[Sequence[object]] = [
        (label, *(f"{result.summary[key]:.1f}" for result in results))
        for label, key in (("TTFT mean", "ttft_mean_ms"), ("TTFT p50", "ttft_p50_ms"), ("TTFT p99", "ttft_p99_ms"))
    ]
    for stage in results[0].metrics.stages:
        values = [result.metrics.stages[stage].mean_ms for result in results]
        if max(values) >= 0.05:
            lines.append((stage, *(f"{value:.1f}" for value in values)))
    yield from table(["", *names], lines)
