"""Fits published measurements into cost tables: python benchmarks/fit_costs.py [../shared/data]

Writes pdflow/scenario/presets/costs/fitted/SOURCE_MODEL_GPU_tpN.json, and prints how far each is from the rows that it
was not fitted on. Which rows those are is decided here, before any fit, and listed in each file. The sources' own files
are not in this repository: where the folder is missing this says so and writes nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np

from pdflow.cost.fit import Step, decode_step, fitted, misfit, prompt_step
from pdflow.cost.step import to_ps
from pdflow.scenario.costs.aiconfigurator import row_errors
from pdflow.scenario.costs.cost_file import CostFile, MadeFrom, MeasuredEngine, cost_file, written

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "pdflow/scenario/presets/costs/fitted"
DATA = ROOT.parent / "shared/data"

Rows = dict[str, list[Step]]
"""Steps by what they are of: "prefill", "decode", "mixed"."""


@attrs.frozen(kw_only=True)
class Source:
    """Whose measurements, and what a file must say of them."""

    name: str
    published: str
    licence: str
    software: str
    against: str = "held-out rows of the same engine; other versions differ more"
    notes: tuple[str, ...] = ()
    host_step_s: float = 0.0
    host_seq_s: float = 0.0


def table(
    source: Source, engine: MeasuredEngine, rows: Rows, other: Rows, knots: Sequence[int], fitted_on: str, held_out: str
) -> tuple[str, CostFile]:
    """A file from the rows to fit on and the others."""
    cost = fitted([step for steps in rows.values() for step in steps], knots)
    errors = tuple(row_errors(of, len(steps), misfit(cost, steps)) for of, steps in other.items())
    p95 = {row.of: f"±{max(row.p95, 0.01):.0%}".replace("%", " %") for row in errors}
    cost = attrs.evolve(
        cost,
        h0=to_ps(source.host_step_s),
        h1=to_ps(source.host_seq_s),
        provenance=(
            f"fitted to {source.name} ({source.licence}): {engine.model} on {engine.gpu}, tp {engine.tp}, "
            f"{source.software}"
        ),
        rel_error={
            "tpot": f"{p95['decode']} against {source.against}",
            "ttft": f"{p95['prefill']} of a prefill, likewise, and what queues make of it",
        },
    )
    made_from = MadeFrom(
        source=source.published,
        licence=source.licence,
        command="benchmarks/fit_costs.py",
        fitted_on=(fitted_on,),
        held_out=(held_out,),
        notes=source.notes,
    )
    slug = source.name.lower().replace(", ", "-").replace(" ", "-")
    name = f"{slug}_{engine.model}_{engine.gpu}_tp{engine.tp}"
    return name, cost_file(cost, attrs.evolve(engine, software=source.software), made_from, errors)


# DistServe: a formula of three coefficients each for prefill and for small and large decode batches.

DISTSERVE_FIT = {"prompts": (1, 128, 256, 512, 1024, 2048), "batches": (1, 2, 4, 8, 16, 32, 64, 94, 95, 128, 192)}
DISTSERVE_OTHER = {"prompts": (64, 384, 768, 1536), "batches": (3, 12, 48, 80, 112, 160)}
DISTSERVE_CONTEXTS = (128, 512, 1024, 2048)


def distserve(data: Path) -> Iterator[tuple[str, CostFile]]:
    capacity = {
        (row["model"], row["tp"]): int(row["max_num_tokens"])
        for row in read_csv(data / "cost_models/distserve_max_num_tokens.csv")
        if row["pp"] == "1"
    }
    for name, file, software in (
        ("DistServe", "distserve_profiler_a100_80g.json", "DistServe's own engine, 2024"),
        ("DistServe, vLLM", "distserve_profiler_a100_80g_vllm.json", "vLLM as DistServe profiled it, 2024"),
    ):
        source = Source(
            name=name,
            published=f"https://github.com/LLMServe/DistServe simdistserve/estimators/profile_data: {file}",
            licence="Apache-2.0",
            software=software,
            against="the source's own formula, of whose error it says nothing",
            notes=(
                "DistServe publishes the coefficients of its own fit and no measured row: the errors are those of this "
                "form against its formula, and how far that is from its GPUs is not known",
                "the formula has its host time in it, and nothing that prefill and decode share: a step that does both "
                "takes the sum",
                "its decode times have a step at batches of 95, which this form smooths",
            ),
        )
        profiles = json.loads((data / "published" / file).read_text())
        for model, sizes in profiles.items():
            for tp, profile in sizes.items():
                engine = MeasuredEngine(
                    gpu="a100-80g",
                    model=model.removeprefix("facebook/"),
                    tp=int(tp),
                    weight_bytes_per_param=2.0,
                    kv_bytes_per_value=2,
                    kv_tokens=capacity.get((model, tp)),
                )
                yield table(
                    source,
                    engine,
                    distserve_rows(profile, **DISTSERVE_FIT),
                    distserve_rows(profile, **DISTSERVE_OTHER),
                    (),
                    f"its formula at prompts of {listed(DISTSERVE_FIT['prompts'])} and batches of "
                    f"{listed(DISTSERVE_FIT['batches'])}, "
                    f"contexts of {listed(DISTSERVE_CONTEXTS)}",
                    f"its formula at prompts of {listed(DISTSERVE_OTHER['prompts'])} and batches of "
                    f"{listed(DISTSERVE_OTHER['batches'])}",
                )


def distserve_rows(profile: Any, prompts: Sequence[int], batches: Sequence[int]) -> Rows:
    """DistServe's time_estimator.py: a + b * tokens + c * (sum of squares, or sequences), in ms."""

    def prefill(n: int) -> float:
        a, b, c = profile["prefill"]
        return (a + b * n + c * n * n) / 1e3

    def decode(batch: int, context: int) -> float:
        small = batch < profile["decoding_large_small_bs_threshold"]
        a, b, c = profile["decoding_smallbs" if small else "decoding_largebs"]
        return (a + b * batch * context + c * batch) / 1e3

    return {
        "prefill": [prompt_step(1, n, prefill(n)) for n in prompts],
        "decode": [decode_step(d, c, decode(d, c)) for d, c in product(batches, DISTSERVE_CONTEXTS)],
    }


# Splitwise: times of whole prompts and mean times of a token.

SPLITWISE = Source(
    name="Splitwise",
    published="https://github.com/Mutinifni/splitwise-sim data/perf_model.csv (ISCA 2024), medians of repetitions",
    licence="MIT",
    software="as Splitwise profiled it, 2023",
    notes=(
        "measured on whole servers: the engine's host time is in the figures",
        "left out are batches whose prompts took less than those of half the batch: they did not run as one (64 x 512 "
        "tokens of Llama-2-70B with tp 2)",
    ),
)
SPLITWISE_OTHER = {"prompt_size": (256, 1024, 4096), "batch_size": (2, 8, 16), "token_size": (256, 1024, 4096)}
GPUS = {"a100-80gb": "a100-80g", "h100-80gb": "h100-sxm"}
MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}


def splitwise(data: Path) -> Iterator[tuple[str, CostFile]]:
    engines: dict[MeasuredEngine, dict[tuple[int, int, int], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in read_csv(data / "published/splitwise_perf_model.csv"):
        if row["hardware"] in GPUS:
            engine = MeasuredEngine(
                gpu=GPUS[row["hardware"]],
                model=MODELS[row["model"]],
                tp=int(row["tensor_parallel"]),
                weight_bytes_per_param=2.0,
                kv_bytes_per_value=2,
            )
            key = (int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"]))
            engines[engine][key].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    for engine, runs in engines.items():
        rows: Rows = {"prefill": [], "decode": []}
        other: Rows = {"prefill": [], "decode": []}
        for (prompt, batch, tokens), times in runs.items():
            half = runs.get((prompt, batch // 2, tokens))
            if half is not None and median(time for time, _ in times) < median(time for time, _ in half):
                continue
            left = {"prompt_size": prompt, "batch_size": batch, "token_size": tokens}
            into = other if any(left[key] in values for key, values in SPLITWISE_OTHER.items()) else rows
            into["prefill"].append(prompt_step(batch, prompt, median(time for time, _ in times)))
            into["decode"].append(decode_step(batch, prompt + tokens // 2, median(time for _, time in times)))
        yield table(
            SPLITWISE,
            engine,
            rows,
            other,
            (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192, 16384, 32768),
            "all other rows of this model, GPU and tp",
            "; ".join(f"rows with a {key} of {listed(values)}" for key, values in SPLITWISE_OTHER.items()),
        )


# LLMServingSim: kernels, layer by layer. A step is 32 layers of them, the embedding, the LM head and the sampler.

LAYERS = 32
LAYER_US = {
    "rtx-4090": {
        1: 475.557, 16: 491.722, 64: 542.702, 128: 614.768, 256: 747.622, 384: 1118.363, 512: 1432.992,
        1024: 2839.585, 1536: 4263.015, 2048: 5659.053,
    },
}  # fmt: skip
"""Sum of a layer's dense kernels (two norms) by tokens, in us: profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1/
dense.csv of the same repository, which is not among the shared data. 384 and 1536 are held out."""
HEAD_US = {
    "rtx-4090": {1: 1121.9, 16: 1157.1, 64: 1258.7, 128: 1382.8, 192: 1544.5, 256: 1982.1},
    "rtx-pro-6000": {1: 735.3, 16: 729.3, 64: 775.7, 128: 804.7, 192: 912.7, 256: 947.1},
}
"""LM head and sampler by sequences, in us: per_sequence.csv beside it."""
DENSE = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "layernorm", "layernorm")
FITTED_CHUNKS = (0, 16, 32, 128, 512, 2048)
FITTED_BATCHES = (0, 1, 2, 8, 16, 64, 128, 256)
FITTED_CONTEXTS = (0, 16, 64, 256, 1024, 2048, 4096, 16384)
SHORT_CHUNK, LONG_PREFIX = 128, 512
MIXED_CONTEXT = 65_536
LLMSERVINGSIM = Source(
    name="LLMServingSim",
    published="https://github.com/casys-kaist/LLMServingSim profiler/perf, (c) 2024 CASYS KAIST",
    licence="MIT",
    software="vLLM 0.19 kernels, bf16",
    notes=(
        "kernels alone: 1 ms of host time a step and 10 us a decode are pdflow's defaults and were not measured",
        "in the rows where prompts and decodes share a step, vLLM's attention reads the decodes' context several times "
        "slower than in steps of decodes alone; the form cannot say that, so such rows are only held out",
        "nor can it say that a few prompt tokens behind a long prefix take the time of many: 128 or fewer behind 512 "
        "or more are only held out",
    ),
    host_step_s=1e-3,
    host_seq_s=10e-6,
)


def llmservingsim(data: Path) -> Iterator[tuple[str, CostFile]]:
    for gpu, stem in (("rtx-pro-6000", "rtxpro6000"), ("rtx-4090", "rtx4090")):
        layer_us = LAYER_US.get(gpu) or summed(data / f"cost_models/llmservingsim_{stem}_llama31_8b_tp1_dense.csv")
        fit_us = {tokens: us for tokens, us in layer_us.items() if tokens not in (384, 1536)}
        rows: Rows = {"prefill": [], "decode": []}
        other: Rows = {"prefill": [], "decode": [], "mixed": [], "short prefill behind a long prefix": []}
        for row in read_csv(data / f"cost_models/llmservingsim_{stem}_llama31_8b_tp1_attention.csv"):
            chunk, prefix, decodes, context = (
                int(row[key]) for key in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            )
            fit = chunk in FITTED_CHUNKS and decodes in FITTED_BATCHES
            fit = fit and prefix in FITTED_CONTEXTS and context in FITTED_CONTEXTS
            of = "mixed" if chunk and decodes else "decode" if decodes else "prefill"
            if of == "prefill" and chunk <= SHORT_CHUNK and prefix >= LONG_PREFIX:
                of = "short prefill behind a long prefix"
            if of == "mixed" and decodes * context > MIXED_CONTEXT:
                continue
            fit = fit and of in rows
            into = rows if fit else other
            dense_us = np.interp(chunk + decodes, *zip(*(fit_us if fit else layer_us).items(), strict=True))
            head_us = np.interp(decodes + (chunk > 0), *zip(*HEAD_US[gpu].items(), strict=True))
            seconds = float(LAYERS * (dense_us + float(row["time_us"])) + head_us) / 1e6
            attended = chunk * prefix + chunk * (chunk + 1) // 2
            into[of].append(Step(chunk, attended, decodes, decodes * context, seconds))
        yield table(
            LLMSERVINGSIM,
            MeasuredEngine(gpu=gpu, model="llama-3.1-8b", tp=1, weight_bytes_per_param=2.0, kv_bytes_per_value=2),
            rows,
            other,
            (1, 16, 32, 64, 128, 256, 512, 1024, 2048),
            f"attention rows of a prompt or of decodes alone, chunks of {listed(FITTED_CHUNKS[1:])}, batches of "
            f"{listed(FITTED_BATCHES[1:])}, contexts of {listed(FITTED_CONTEXTS)}",
            f"all other attention rows; of those with both a prompt and decodes, where decodes read at most "
            f"{MIXED_CONTEXT:,} tokens",
        )


def summed(file: Path) -> dict[int, float]:
    """A layer's dense kernels by tokens, in us."""
    times = {(row["layer"], int(row["tokens"])): float(row["time_us"]) for row in read_csv(file)}
    tokens = sorted({tokens for _, tokens in times})
    return {count: sum(times[layer, count] for layer in DENSE) for count in tokens}


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


SOURCES: tuple[Callable[[Path], Iterator[tuple[str, CostFile]]], ...] = (distserve, splitwise, llmservingsim)


def main(data: Path) -> None:
    if not (data / "published").is_dir():
        sys.exit(f"{data} is not there: the measurements are not in this repository, give their folder")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        for name, file in source(data):
            (FOLDER / f"{name}.json").write_text(written(file), encoding="utf-8")
            rows = (f"{row.of} {row.median:.1%} (p95 {row.p95:.1%}, max {row.max:.1%})" for row in file.errors)
            print(f"{name:44} {'; '.join(rows)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
