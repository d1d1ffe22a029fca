"""Aggregated vLLM on H100 and H200, one mean TTFT and TPOT per row: NVIDIA aiconfigurator's silicon data (Apache-2.0).

A row states model, GPU, tensor-parallel size, prompt and answer lengths and a number of concurrent clients. It does not
state how lengths vary, how many requests were sent, how they started, or whether figures are means. What is taken for
them was chosen on `FITTED_ON` alone; everything reported is of the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

import attrs

from benchmarks.validation.common import (
    Claim,
    Found,
    error,
    latencies,
    off,
    read_csv,
    said,
    scenario_of,
    table,
    world_of,
)
from pdflow.cost.scale import Factors, scaled
from pdflow.scenario.costs import step_cost
from pdflow.scenario.fit import kv_tokens_of
from sim.calibrate import nearest

FILE = "aiconfigurator_silicon_agg_vllm_hopper.csv"
FITTED = 10
"""Rows of each group that fits and choices may look at: evenly spread over the group, by the order of their ids."""
REQUESTS = 10
"""Requests per client, as InferenceMAX sends them."""
NEARLY_FULL = 0.85
"""Share of the time in steps that prefill, in simulation, from which on a row counts as past saturation."""

MODELS = {
    ("Qwen/Qwen3-32B", ""): 'preset = "qwen3-32b"',
    (
        "meta-llama/Llama-3.1-70B",
        "fp8",
    ): 'preset = "llama-3.1-70b"\nweight_dtype = "fp8"\nactivation_dtype = "fp8"',
    (
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        "fp8",
    ): 'preset = "llama-3.1-8b"\nweight_dtype = "fp8"\nactivation_dtype = "fp8"',
}
GPUS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200"}


@attrs.frozen(kw_only=True)
class Row:
    """One measurement."""

    id: str
    group: str
    model: str
    gpu: str
    tp: int
    clients: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float

    def text(self, setup: Setup) -> str:
        spread = '{{ dist = "uniform", low = {}, high = {} }}' if setup.lengths_vary else "{1}"
        lengths = [spread.format(tokens * 4 // 5, tokens) for tokens in (self.input_tokens, self.output_tokens)]
        return f"""
[workload]
requests = {REQUESTS * self.clients}
arrival = {{ process = "closed", concurrency = {self.clients} }}
input_tokens = {lengths[0]}
output_tokens = {lengths[1]}
[model]
{self.model}
[[pool]]
name = "vllm"
role = "aggregated"
gpu = "{self.gpu}"
tp = {self.tp}
api_server_s = {setup.api_server_s}
[network]
preset = "ideal"
"""


@attrs.frozen(kw_only=True)
class Setup:
    """What rows do not state."""

    lengths_vary: bool = True
    """Uniform between 80 % and all of what is stated, as InferenceMAX draws them."""
    api_server_s: float = 0.03
    means: bool = True


def rows_of(folder: Path) -> dict[str, list[Row]]:
    """Rows of models that there is a preset for, by model and GPU."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(read_csv(folder / FILE), key=lambda row: row["id"]):
        model = MODELS.get((row["model_path"], row["precision"]))
        if model is None or not row["silicon_concurrency"]:
            continue
        gpu = GPUS[row["system"]]
        group = f"{row['model_path'].split('/')[-1]} {row['precision'] or 'bf16'}, {gpu}".replace("-FP8 fp8", " fp8")
        groups.setdefault(group, []).append(
            Row(
                id=row["id"],
                group=group,
                model=model,
                gpu=gpu,
                tp=int(row["tp_size"]),
                clients=int(float(row["silicon_concurrency"])),
                input_tokens=int(row["isl"]),
                output_tokens=int(row["osl"]),
                ttft_ms=float(row["silicon_ttft_ms"]),
                tpot_ms=float(row["silicon_tpot_ms"]),
            )
        )
    return groups


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Those that are fitted on."""
    return [rows[i * len(rows) // FITTED] for i in range(FITTED)]


@attrs.frozen
class Answer:
    """What a row comes to in simulation."""

    ttft_ms: float
    tpot_ms: float
    past: bool
    """Whether clients wait for a seat or for blocks, or prompts take nearly all of the time."""


def simulated(row: Row, setup: Setup | None = None, by: Factors | None = None) -> Answer:
    setup = setup or Setup()
    text = row.text(setup)
    scenario = scenario_of(text)
    pool = scenario.pools[0]
    cost = step_cost(scenario.model, pool, scenario.base_dir)
    world = world_of(text, {} if by is None else {"vllm": scaled(cost, by)})
    found = latencies(world)
    middle = fmean if setup.means else median
    tokens = row.input_tokens + row.output_tokens
    starved = row.clients * tokens > kv_tokens_of(scenario.model, pool) or row.clients > pool.max_num_seqs
    # As if each prompt had its steps to itself: what share of the time prompts need.
    alone = cost.step_sums_ps(row.input_tokens, row.input_tokens * (row.input_tokens + 1) // 2, 0, 0) - cost.h0
    share = alone * len(found) / 1e3 / world.totals.duration_ns
    return Answer(
        middle([ttft for ttft, _ in found]), middle([tpot for _, tpot in found]), starved or share > NEARLY_FULL
    )


def report(folder: Path) -> tuple[Found, list[tuple[Row, Answer, Answer]]]:
    """What to say, and all rows as simulated with presets and calibrated."""
    found = Found()
    lines: list[Sequence[object]] = []
    past: list[Sequence[object]] = []
    everything: list[tuple[Row, Answer, Answer]] = []
    groups = rows_of(folder)
    factors: list[str] = []
    for group, rows in groups.items():
        fit_on = chosen(rows)
        best = _fitted(fit_on)
        factors.append(f"- {group}: {best}; on {', '.join(row.id for row in fit_on)}")
        answers = [(row, simulated(row), simulated(row, by=best)) for row in rows]
        everything += answers
        held = [answer for answer in answers if answer[0] not in fit_on]
        below = [answer for answer in held if not answer[1].past]
        beyond = [answer for answer in held if answer[1].past]
        if below:
            cells = [
                _errors(below, which) for which in ((1, "ttft_ms"), (1, "tpot_ms"), (2, "ttft_ms"), (2, "tpot_ms"))
            ]
            lines.append((group, len(below), *map(said, cells)))
            for metric, errors in (("TTFT", cells[0]), ("TPOT", cells[1])):
                found.summary.append(
                    Claim(f"{group}, presets alone, {len(below)} rows below saturation", metric, error(errors), 0.25)
                )
            for metric, errors in (("TTFT", cells[2]), ("TPOT", cells[3])):
                found.summary.append(
                    Claim(f"{group}, calibrated on 10 rows, {len(below)} others", metric, error(errors), 0.05)
                )
        if beyond:
            right = sum(_waits(row, row.ttft_ms) == _waits(row, answer.ttft_ms) for row, answer, _ in beyond)
            cells = [_errors(beyond, which) for which in ((1, "ttft_ms"), (1, "tpot_ms"))]
            past.append((group, len(beyond), f"{right} of {len(beyond)}", *map(said, cells)))
    found.lines += _choices(groups.values())
    found.lines += ["Below saturation, rows that were not fitted on:", ""]
    found.lines += table(
        ["rows", "held out", "TTFT, presets", "TPOT, presets", "TTFT, calibrated", "TPOT, calibrated"], lines
    )
    found.lines += [
        "Past saturation: clients hold more tokens than the KV cache, or prompts need more than 85 % of the time. The",
        "right side is whether mean TTFT is more than three times an undisturbed prompt's:",
        "",
    ]
    found.lines += table(["rows", "held out", "right side", "TTFT, presets", "TPOT, presets"], past)
    found.lines += ["Fitted factors, and the rows that they were fitted on:", "", *factors, ""]
    return found, everything


def _fitted(rows: Sequence[Row]) -> Factors:
    def miss(by: Factors) -> float:
        answers = [simulated(row, by=by) for row in rows]
        return fmean(
            abs(error)
            for row, answer in zip(rows, answers, strict=True)
            for error in off((answer.ttft_ms, answer.tpot_ms), (row.ttft_ms, row.tpot_ms))
        )

    return nearest(miss, 10**9)


def _errors(answers: Iterable[tuple[Row, Answer, Answer]], which: tuple[int, str]) -> list[float]:
    place, name = which
    return [getattr(answer[place], name) / getattr(answer[0], name) - 1 for answer in answers]


def _waits(row: Row, ttft_ms: float) -> bool:
    scenario = scenario_of(row.text(Setup()))
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    prompt = cost.step_sums_ps(row.input_tokens, row.input_tokens * (row.input_tokens + 1) // 2, 0, 0)
    return ttft_ms > 3 * prompt / 1e9


def _choices(groups: Iterable[Sequence[Row]]) -> Iterator[str]:
    yield (
        "What the rows do not state was chosen on the rows that are fitted on, by these errors of the presets alone "
        "(all groups):"
    )
    yield ""
    rows = [row for group in groups for row in chosen(group)]
    lines = []
    for word, setup in (
        ("lengths vary by 20 %, API server 30 ms, means: **taken**", Setup()),
        ("lengths fixed", Setup(lengths_vary=False)),
        ("API server 10 ms", Setup(api_server_s=0.01)),
        ("API server 100 ms", Setup(api_server_s=0.1)),
        ("medians", Setup(means=False)),
    ):
        answers = [simulated(row, setup) for row in rows]
        pairs = list(zip(answers, rows, strict=True))
        lines.append(
            (
                word,
                said([answer.ttft_ms / row.ttft_ms - 1 for answer, row in pairs]),
                said([answer.tpot_ms / row.tpot_ms - 1 for answer, row in pairs]),
            )
        )
    yield from table(["what is taken for it", "TTFT", "TPOT"], lines)
