"""Prefill and decode on different GPUs, one TTFT and TPOT per row: NVIDIA aiconfigurator's silicon data (Apache-2.0).

The rows that state all engines: DeepSeek-R1 fp8 on H200 and Qwen3-32B NVFP4 on B200 and GB200, TensorRT-LLM. They do
not state how the clients start, how many requests there were, the engines' host time, or which routers and servers a
request passes. So they give TTFT only to within a factor of 2 to 4; here it is a band over those. Nothing is fitted.
TensorRT-LLM gathers each transfer in one buffer (`connector = "trtllm"`). Rows with tensor parallelism (TP8)
use the table of NVIDIA's kernels, of which there is none for data-parallel attention: rows with that (DP8) use the
roofline, with `dp_attention` and `ep`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import attrs

from benchmarks.validation.common import Claim, Found, error, error_text, latencies, read_csv, scenario_of, table
from pdflow_sim.experiments.calibrate import ran

FILE = "aiconfigurator_silicon_disagg.csv"
BEST, WORST = (0.0, 0.01), (0.003, 0.25)
"""Host time of a step, and what a request passes in front of each engine, in seconds: a server at its best; routers and
servers at their worst."""
WAVES = (3, 10)
"""Requests per client: the fewer, the more of the mean is the opening burst."""


@attrs.frozen(kw_only=True)
class Engines:
    """One side of a row."""

    replicas: int
    tp: int
    dp: int
    ep: int


@attrs.frozen(kw_only=True)
class Row:
    """One measurement."""

    id: str
    kind: str
    model: str
    gpu: str
    cost: str
    clients: int
    input_tokens: int
    output_tokens: int
    prefill: Engines
    decode: Engines
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        sides = "+".join(
            f"{side.replicas}{letter} {f'DP{side.dp}' if side.dp > 1 else f'TP{side.tp}'}"
            for side, letter in ((self.prefill, "P"), (self.decode, "D"))
        )
        return f"{self.kind} {self.input_tokens}/{self.output_tokens}, {self.clients} clients, {sides}"

    def text(self, waves: int, host_s: float, api_server_s: float) -> str:
        pools = "".join(
            f"""
[[pool]]
name = "{role}"
role = "{role}"
replicas = {side.replicas}
gpu = {self.gpu.replace("HOST", f"{host_s}")}
tp = {side.tp}
dp_attention = {side.dp}
ep = {side.ep if side.dp > 1 else 1}
api_server_s = {api_server_s}
{self.cost.replace("HOST", f"{host_s}") if side.dp == 1 else ""}
"""
            for role, side in (("prefill", self.prefill), ("decode", self.decode))
        )
        return f"""
[workload]
requests = {waves * self.clients}
arrival = {{ process = "closed", concurrency = {self.clients} }}
input_tokens = {{ dist = "uniform", low = {self.input_tokens * 4 // 5}, high = {self.input_tokens} }}
output_tokens = {{ dist = "uniform", low = {self.output_tokens * 4 // 5}, high = {self.output_tokens} }}
[model]
{self.model}
[transfer]
method = "nixl-pull"
connector = "trtllm"
[network]
preset = "rdma-400g"
[router]
policy = "least-loaded"
{pools}"""


def rows_of(folder: Path) -> list[Row]:
    found = []
    for row in read_csv(folder / FILE):
        if not row["prefill_num_workers"] or not row["silicon_concurrency"] or row["backend"] != "trtllm":
            continue
        if row["model_path"] == "deepseek-ai/DeepSeek-V3" and row["system"] == "h200_sxm":
            kind = "DeepSeek-R1"
            model = 'preset = "deepseek-v3"'
            gpu = '{ preset = "h200", host_step_s = HOST, host_seq_s = 0 }'
            cost = 'cost = { model = "aiconfigurator", host_step_s = HOST, host_seq_s = 0 }'
        elif row["model_path"] == "nvidia/Qwen3-32B-NVFP4":
            kind = "Qwen3-32B"
            model = 'preset = "qwen3-32b"\nweight_dtype = "fp4"\nkv_dtype = "fp8"'
            gpu = '{ preset = "b200", host_step_s = HOST, host_seq_s = 0 }'
            cost = ""
        else:
            continue
        sides = [
            Engines(
                replicas=int(float(row[f"{side}_num_workers"])),
                tp=int(float(row[f"{side}_tp_size"])),
                dp=int(float(row[f"{side}_attention_dp_size"])),
                ep=int(float(row[f"{side}_moe_ep_size"])),
            )
            for side in ("prefill", "decode")
        ]
        found.append(
            Row(
                id=row["id"],
                kind=kind,
                model=model,
                gpu=gpu,
                cost=cost,
                clients=int(float(row["silicon_concurrency"])),
                input_tokens=int(row["isl"]),
                output_tokens=int(row["osl"]),
                prefill=sides[0],
                decode=sides[1],
                ttft_ms=float(row["silicon_ttft_ms"]),
                tpot_ms=float(row["silicon_tpot_ms"]),
            )
        )
    return found


@attrs.frozen
class Answer:
    """What a row comes to: TPOT by host time, and TTFT over everything that is not stated."""

    tpot_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]


def simulated(row: Row) -> Answer:
    ttfts: list[float] = []
    tpots: list[float] = []
    for host_s, api_server_s in (BEST, WORST):
        for waves in WAVES:
            found = latencies(ran(scenario_of(row.text(waves, host_s, api_server_s)), {}))
            ttfts.append(fmean(ttft for ttft, _ in found))
            ttfts.append(fmean(ttft for ttft, _ in found[row.clients :]))
        tpots.append(fmean(tpot for _, tpot in found))
    return Answer(tuple(tpots), tuple(ttfts))


def report(folder: Path, answers: Sequence[tuple[Row, Answer]] | None = None) -> Found:
    found = Found()
    answers = answers or [(row, simulated(row)) for row in rows_of(folder)]
    lines: list[Sequence[object]] = []
    inside = 0
    widths = []
    for row, answer in answers:
        low, high = min(answer.ttft_ms), max(answer.ttft_ms)
        inside += low <= row.ttft_ms <= high
        widths.append(log(high / low))
        lines.append(
            (
                row.name,
                f"{row.tpot_ms:.1f}",
                *(f"{tpot:.1f} ({tpot / row.tpot_ms - 1:+.0%})".replace("%", " %") for tpot in answer.tpot_ms),
                f"{row.ttft_ms:,.0f}",
                f"{low:,.0f} – {high:,.0f}{'' if low <= row.ttft_ms <= high else ' **no**'}",
            )
        )
    found.lines += table(["row", "TPOT ms", "host 0", "host 3 ms", "TTFT ms", "TTFT band"], lines)
    found.lines += _statements(answers, inside, widths, found)
    return found


def _statements(
    answers: Sequence[tuple[Row, Answer]], inside: int, widths: Sequence[float], found: Found
) -> Iterator[str]:
    for which, host_s in enumerate((BEST[0], WORST[0])):
        errors = [answer.tpot_ms[which] / row.tpot_ms - 1 for row, answer in answers]
        within = sum(abs(value) <= 0.25 for value in errors)
        yield (
            f"- TPOT with host time {host_s * 1e3:g} ms: {error_text(errors)}, "
            f"{within} of {len(errors)} rows within 25 %."
        )
        found.summary.append(
            Claim(f"P/D rows, host time {host_s * 1e3:g} ms, {len(errors)} rows", "TPOT", error(errors), 0.25)
        )
    yield (
        f"- TTFT: {inside} of {len(answers)} measured values fall inside the band over opening burst (in or left out, "
        f"3 or 10 requests a client), host time (0 to 3 ms) and servers ({BEST[1] * 1e3:g} to {WORST[1] * 1e3:g} ms in "
        f"front of each engine). The band's upper end is {exp(median(widths)):.1f} times its lower one in the median "
        f"row, {exp(min(widths)):.1f} to {exp(max(widths)):.1f} times in all."
    )
    yield ""
