"""Aggregated vLLM on H100 and H200, one mean TTFT and TPOT per row: NVIDIA aiconfigurator's silicon data (Apache-2.0).

A row states model, GPU, tensor-parallel size, prompt and answer lengths and a number of concurrent clients. It does
not state how lengths vary, how many requests were sent, how they started, or whether figures are means. The
assumptions for these were chosen on the rows that are fitted on: up to ten of each engine, by their position. All
reported errors are of the other rows. benchmarks/results/validation_rows.csv has all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs

from benchmarks.validation.common import (
    Claim,
    Found,
    error,
    error_text,
    latencies,
    off,
    read_csv,
    scenario_of,
    table,
)
from pdflow.cost.scale import Factors, scaled
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow_sim.experiments.calibrate import nearest, ran

FILE = "aiconfigurator_silicon_agg_vllm_hopper.csv"
FITTED = 10
"""Rows of each engine that fits and choices may look at, or half of them if there are fewer than 20: evenly spread over
the engine's, by the order of their ids."""
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
    burst: bool = True
    """Whether the first request of each client counts: all of them arrive at once."""


def rows_of(folder: Path) -> dict[str, list[Row]]:
    """Rows of models that there is a preset for, by engine, where there are ten or more of it."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(read_csv(folder / FILE), key=lambda row: row["id"]):
        model = MODELS.get((row["model_path"], row["precision"]))
        if model is None or not row["silicon_concurrency"]:
            continue
        gpu = GPUS[row["system"]]
        model_name = f"{row['model_path'].split('/')[-1]} {row['precision'] or 'bf16'}".replace("-Instruct-FP8", "")
        group = f"{model_name}, {gpu}, TP {row['tp_size']}"
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
    # Of fewer there is nothing to hold out.
    return {group: rows for group, rows in groups.items() if len(rows) >= 10}


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Those that are fitted on."""
    count = min(FITTED, len(rows) // 2)
    return [rows[i * len(rows) // count] for i in range(count)]


@attrs.frozen
class Answer:
    """What a row comes to in simulation."""

    ttft_ms: float
    tpot_ms: float
    past: bool
    """Whether clients wait for a seat or for blocks, or prompts take nearly all of the time."""


def simulated(
    row: Row, setup: Setup | None = None, by: Factors | None = None, edit: tuple[str, str] = ("", "")
) -> Answer:
    """`edit`: a key of the pool ("gpu", "cost") or of the model, and the line that sets it."""
    setup = setup or Setup()
    text = row.text(setup)
    key, line = edit
    if key == "gpu":
        text = text.replace(f'gpu = "{row.gpu}"', line.replace("GPU", row.gpu))
    elif key == "cost":
        text = text.replace('role = "aggregated"', f'role = "aggregated"\n{line}')
    elif key:
        text = text.replace("[model]", f"[model]\n{line}")
    scenario = scenario_of(text)
    pool = scenario.pools[0]
    cost = step_cost(scenario.model, pool, scenario.base_dir)
    world = ran(scenario, {"vllm": cost if by is None else scaled(cost, by)})
    found = latencies(world)
    counted = found if setup.burst else found[row.clients :]
    middle = fmean if setup.means else median
    tokens = row.input_tokens + row.output_tokens
    starved = row.clients * tokens > kv_tokens_of(scenario.model, pool) or row.clients > pool.max_num_seqs
    # As if each prompt had its steps to itself: what share of the time prompts need.
    alone = cost.step_sums_ps(row.input_tokens, row.input_tokens * (row.input_tokens + 1) // 2, 0, 0) - cost.h0
    share = alone * len(found) / 1e3 / world.totals.duration_ns
    return Answer(
        middle([ttft for ttft, _ in counted]), middle([tpot for _, tpot in counted]), starved or share > NEARLY_FULL
    )


@attrs.frozen
class Held:
    """One engine's rows, held out and not: with presets, calibrated, and whether they were fitted on."""

    group: str
    factors: str
    rows: list[tuple[Row, Answer, Answer, bool]]

    def errors(self, past: bool) -> list[list[float]]:
        """Of rows held out, below saturation or past it: the presets' of TTFT and TPOT, and the calibrated ones."""
        rows = [row for row in self.rows if not row[3] and row[1].past is past]
        return [_errors(rows, (index, name)) for index in (1, 2) for name in ("ttft_ms", "tpot_ms")]


def held(group: str, rows: Sequence[Row]) -> Held:
    """An engine's rows, the factors fitted on some of them."""
    fit_on = chosen(rows)
    presets = {row.id: simulated(row) for row in rows}
    # Past saturation a row tells of queues and not of steps.
    below = [row for row in fit_on if not presets[row.id].past]
    best = _fitted(below)
    answers = [(row, presets[row.id], simulated(row, by=best), row in fit_on) for row in rows]
    return Held(group, f"{best}, on {len(below)} rows", answers)


def report(folder: Path) -> tuple[Found, list[tuple[Row, Answer, Answer, bool]]]:
    """What to say, and all rows as simulated with presets, calibrated, and whether they were fitted on."""
    groups = rows_of(folder)
    engines = [held(group, rows) for group, rows in groups.items()]
    found = Found([*_choices(groups.values()), "Below saturation, rows that were not fitted on:", ""])
    found.lines += table(
        ["rows", "held out", "TTFT, presets", "TPOT, presets", "TTFT, calibrated", "TPOT, calibrated"],
        [
            (each.group, len(cells[0]), *map(error_text, cells))
            for each in engines
            if (cells := each.errors(past=False))[0]
        ],
    )
    found.lines += [
        "Past saturation: clients hold more tokens than the KV cache, or prompts need more than 85 % of the time. The",
        "right side is whether mean TTFT is more than three times an undisturbed prompt's:",
        "",
    ]
    found.lines += table(
        ["rows", "held out", "right side", "TTFT, presets", "TPOT, presets"],
        [
            (each.group, len(cells[0]), _right_side(each), *map(error_text, cells[:2]))
            for each in engines
            if (cells := each.errors(past=True))[0]
        ],
    )
    found.lines += ["Fitted factors:", "", *(f"- {each.group}: {each.factors}" for each in engines), ""]
    found.lines += _effects(groups)
    found.summary += _claims(engines)
    return found, [row for each in engines for row in each.rows]


def _claims(engines: Iterable[Held]) -> Iterator[Claim]:
    """Of a model on a GPU, whatever its tensor-parallel size; each engine with its own factors."""
    families: dict[str, list[Held]] = {}
    for each in engines:
        families.setdefault(each.group.rpartition(", ")[0], []).append(each)
    for family, members in families.items():
        sizes = ", ".join(each.group.rpartition("TP ")[2] for each in members)
        columns = zip(*(each.errors(past=False) for each in members), strict=True)
        cells = [list(chain.from_iterable(column)) for column in columns]
        rows = f"{len(cells[0])} rows below saturation"
        for index, (label, metric, most) in enumerate(
            (
                ("presets alone", "TTFT", 0.25),
                ("presets alone", "TPOT", 0.25),
                ("calibrated", "TTFT", 0.05),
                ("calibrated", "TPOT", 0.05),
            )
        ):
            yield Claim(f"{family}, TP {sizes}, {label}, {rows}", metric, error(cells[index]), most)


def _right_side(each: Held) -> str:
    beyond = [(row, answer) for row, answer, _, fitted_on in each.rows if answer.past and not fitted_on]
    right = sum(_waits(row, row.ttft_ms) == _waits(row, answer.ttft_ms) for row, answer in beyond)
    return f"{right} of {len(beyond)}"


def _effects(groups: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """What the errors are made of: one thing changed, in a run of its own."""
    yield "Sensitivity, one change at a time from the presets (rows that were not fitted on):"
    yield ""
    lines = []
    # As if it did not grow with the ranks: 10 us at TP 8 too.
    quick = f'gpu = {{ preset = "GPU", allreduce_latency_s = {1e-5 / 3} }}'
    narrow = ("kv_dtype", 'kv_dtype = "fp8"')
    as_it_is, plain = ("", ""), Setup()
    for group, change, edit, setup in (
        ("Llama-3.1-70B fp8, h100-sxm, TP 8", "unchanged", as_it_is, plain),
        ("Llama-3.1-70B fp8, h100-sxm, TP 8", "all-reduces as fast as at TP 2", ("gpu", quick), plain),
        ("Qwen3-32B bf16, h100-sxm, TP 8", "unchanged", as_it_is, plain),
        ("Qwen3-32B bf16, h100-sxm, TP 8", "all-reduces as fast as at TP 2", ("gpu", quick), plain),
        ("Llama-3.1-70B fp8, h200, TP 1", "unchanged", as_it_is, plain),
        ("Llama-3.1-70B fp8, h200, TP 1", "8-bit KV, with twice the capacity", narrow, plain),
        ("Llama-3.1-8B fp8, h200, TP 1", "unchanged", as_it_is, plain),
        ("Llama-3.1-8B fp8, h200, TP 1", "8-bit KV", narrow, plain),
        ("Llama-3.1-8B fp8, h200, TP 1", "8-bit KV, opening burst left out", narrow, Setup(burst=False)),
    ):
        rows = [row for row in groups[group] if row not in chosen(groups[group])]
        answers = [(row, simulated(row, setup, edit=edit), None) for row in rows]
        lines.append(
            (f"{group}: {change}", *(error_text(_errors(answers, (1, name))) for name in ("ttft_ms", "tpot_ms")))
        )
    yield from table(["rows and change", "TTFT", "TPOT"], lines)


def _fitted(rows: Sequence[Row]) -> Factors:
    def miss(by: Factors) -> float:
        answers = [simulated(row, by=by) for row in rows]
        return fmean(
            abs(error)
            for row, answer in zip(rows, answers, strict=True)
            for error in off((answer.ttft_ms, answer.tpot_ms), (row.ttft_ms, row.tpot_ms))
        )

    return nearest(miss, 10**9)


def _errors(answers: Iterable[tuple[Any, ...]], which: tuple[int, str]) -> list[float]:
    index, name = which
    return [getattr(answer[index], name) / getattr(answer[0], name) - 1 for answer in answers]


def _waits(row: Row, ttft_ms: float) -> bool:
    scenario = scenario_of(row.text(Setup()))
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    prompt = cost.step_sums_ps(row.input_tokens, row.input_tokens * (row.input_tokens + 1) // 2, 0, 0)
    return ttft_ms > 3 * prompt / 1e9


def _choices(groups: Iterable[Sequence[Row]]) -> Iterator[str]:
    yield (
        "The assumptions were chosen on the rows that are fitted on, by these errors with presets alone (all groups):"
    )
    yield ""
    rows = [row for group in groups for row in chosen(group)]
    lines = []
    for label, setup in (
        ("lengths vary by 20 %, API server 30 ms, means: **taken**", Setup()),
        ("lengths fixed", Setup(lengths_vary=False)),
        ("API server 10 ms", Setup(api_server_s=0.01)),
        ("API server 100 ms", Setup(api_server_s=0.1)),
        ("medians", Setup(means=False)),
        ("opening burst left out", Setup(burst=False)),
    ):
        answers = [simulated(row, setup) for row in rows]
        pairs = list(zip(answers, rows, strict=True))
        lines.append(
            (
                label,
                error_text([answer.ttft_ms / row.ttft_ms - 1 for answer, row in pairs]),
                error_text([answer.tpot_ms / row.tpot_ms - 1 for answer, row in pairs]),
            )
        )
    yield from table(["assumption", "TTFT", "TPOT"], lines)
