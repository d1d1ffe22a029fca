"""NVIDIA's measured kernel times, queried through aiconfigurator-core and tabulated into the canonical form.

aiconfigurator-core (PyPI, Apache-2.0, (c) NVIDIA) is an extra: 114 MB and heavy dependencies. The tables that come
with pdflow were made here (`benchmarks/bake_costs.py`), so most scenarios never import it. It gives GPU time only; who
uses a table adds host time.

Its traps, and what is done about each: missing data fails only at the first query, with
any of several exceptions, so everything is asked once here and what comes is one sentence; unknown models are looked
for on the network, so only models are asked for whose configuration is in the package; some measured all-reduces are so
slow that more GPUs make prefill slower, and some steps of one decode slower than of 64: such a table is refused; its
higher layers add fudge to TTFT and are not used.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any, Final

import attrs

from pdflow.cost.fit import Misfit, Step, decode_step, fitted, misfit, prompt_step
from pdflow.scenario.costs.cost_file import CostFile, MadeFrom, MeasuredEngine, RowErrors, cost_file

INSTALL: Final = "pip install 'pdflow[aiconfigurator]'"
GPUS: Final = {
    "a100-80g": "a100_sxm",
    "b200": "b200_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
"""The GPUs of pdflow that aiconfigurator has data of, with its names for them."""
MODELS: Final = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
WEIGHT_BYTES: Final = {"deepseek-v3": 1.0}
"""Bytes per parameter of published checkpoints; 2 for the others, of which there are 8-bit tables too."""
WITH_EXPERTS: Final = frozenset(("deepseek-v3", "qwen3-235b-a22b", "qwen3-30b-a3b"))
"""Models whose experts are split over tp GPUs like everything else, as vLLM does by default. In 8 bits their weights
have a scale for each block of 128 x 128, as their published checkpoints have; others have one for each tensor."""
VLLM: Final = {"a100-80g": "vLLM 0.14.0"}
"""The version whose kernels were measured, where it is not 0.24.0: systems/query_versions.yaml of the package."""
ON_PCIE: Final = frozenset(("l40s", "rtx-pro-6000"))

KNOTS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
PROMPTS: Final = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
PREFIXES: Final = (0, 2048, 8192, 16384)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS: Final = (128, 512, 1024, 2048, 4096, 8192, 16384)
MIXED: Final = ((1, 8), (1, 64), (1, 192), (4, 8), (4, 64), (4, 192))
"""Prompts of 512 tokens beside so many decodes."""

OTHER_PROMPTS: Final = (48, 200, 640, 1280, 3072, 6144, 12288)
OTHER_PREFIXES: Final = (0, 1024, 4096, 12288)
OTHER_BATCHES: Final = (3, 12, 24, 40, 80, 160, 224)
OTHER_CONTEXTS: Final = (256, 768, 1536, 3072, 6144, 12288)
OTHER_MIXED: Final = ((2, 16), (2, 128), (3, 32), (3, 96))
MOST_CONTEXT: Final = 1 << 20
"""Tokens that all decodes of a step read together: few engines hold more."""
PREFILLS_COMPARED: Final = (2048, 8192)

ERROR_BARS: Final = {
    False: {"tpot": "±10 % (−20 % at high N)", "e2e": "±15 %", "ttft": "±35 % below 70 % load, factor 2+ above 85 %"},
    True: {"tpot": "−30…+10 %", "e2e": "−30…+10 %", "ttft": "−30…+10 % below 70 % load, factor 2+ above 85 %"},
}
"""Judged from replays of published runs (docs/validation.md); True: tensor-parallel over PCIe."""


@functools.cache
def tabulated(gpu: str, model: str, tp: int, weight_bytes_per_param: float | None = None) -> CostFile:
    """Return the table of one combination, by vLLM's kernels; weights are as published if nothing is said, or of one
    byte, with 8-bit products. Raises ValueError, with a sentence for a person."""
    if gpu not in GPUS or model not in MODELS:
        what = f"gpu {gpu}" if gpu not in GPUS else f"model {model}"
        raise ValueError(
            f"aiconfigurator has no data for {what} (it has {', '.join(GPUS if gpu not in GPUS else MODELS)})"
        )
    published = WEIGHT_BYTES.get(model, 2.0)
    weight_bytes = published if weight_bytes_per_param is None else weight_bytes_per_param
    if weight_bytes not in (published, 1.0):
        raise ValueError(f"pdflow has no table of {model} with {weight_bytes:g} bytes per parameter, and computes none")
    fp8 = weight_bytes != published
    what = _named(gpu, model, tp, fp8)
    try:
        sdk = importlib.import_module("aiconfigurator_core.sdk")
    except ImportError:
        raise ValueError(f"pdflow has no table of {what}; {INSTALL} computes one") from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        asked = _Asked.of(sdk, gpu, model, tp, fp8)
        halved = _Asked.of(sdk, gpu, model, tp // 2, fp8) if tp > 1 else None
        if halved is not None:
            _refuse_slower(asked, halved)
        _refuse_crowds_that_are_faster(asked)
        return _table(asked)
    except _RefusedError:
        raise
    except Exception as error:  # Whatever it raises for data that it lacks; its classes share no base of their own.
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ValueError(f"aiconfigurator has no table of {what}: {reason}") from None


def _named(gpu: str, model: str, tp: int, fp8: bool) -> str:
    return f"{model}{' in 8 bits' if fp8 else ''} on {gpu}, tp {tp}"


class _RefusedError(ValueError):
    """aiconfigurator has data, but its table is refused as implausible."""


@attrs.frozen
class _Asked:
    """The step times of one combination of GPU, model and TP size, queried from aiconfigurator's tables."""

    gpu: str
    model: str
    tp: int
    fp8: bool
    software: str
    handle: Any

    @classmethod
    def of(cls, sdk: Any, gpu: str, model: str, tp: int, fp8: bool) -> _Asked:
        options: dict[str, Any] = {"moe_tp_size": tp, "moe_ep_size": 1} if model in WITH_EXPERTS else {}
        if fp8:
            products = "fp8_block" if model in WITH_EXPERTS else "fp8"
            options |= {"gemm_quant_mode": products, "moe_quant_mode": products}
        handle = sdk.EngineHandle.compile(
            MODELS[model],
            GPUS[gpu],
            "vllm",
            backend_version="current",
            tp_size=tp,
            kvcache_quant_mode="bfloat16",
            **options,
        )
        return cls(gpu, model, tp, fp8, VLLM.get(gpu, "vLLM 0.24.0"), handle)

    def __str__(self) -> str:
        return _named(self.gpu, self.model, self.tp, self.fp8)

    def prompt(self, prompts: int, new: int, prefix: int = 0) -> Step:
        return prompt_step(
            prompts, new, self.handle.predict_prefill_latency(prompts, new + prefix, prefix) / 1e3, prefix
        )

    def decode(self, decodes: int, context: int) -> Step:
        return decode_step(decodes, context, self.handle.predict_decode_latency(decodes, context) / 1e3)

    def mixed(self, prompts: int, decodes: int, length: int = 512) -> Step:
        seconds = self.handle.mixed_step_latency(prompts * length, decodes, length, 2) / 1e3
        alone = prompt_step(prompts, length, seconds)
        return attrs.evolve(alone, decodes=decodes, context=decodes * length)

    def prompts(self, lengths: tuple[int, ...], prefixes: tuple[int, ...]) -> list[Step]:
        return [self.prompt(1, new, prefix) for new in lengths for prefix in prefixes]

    def decodes(self, batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[Step]:
        return [self.decode(d, c) for d in batches for c in contexts if d * c <= MOST_CONTEXT]


def _refuse_slower(asked: _Asked, halved: _Asked) -> None:
    for length in PREFILLS_COMPARED:
        slow, fast = (one.prompt(1, length).seconds * 1e3 for one in (asked, halved))
        if slow >= fast:
            raise _RefusedError(
                f"pdflow rejects aiconfigurator's table of {asked}: a prompt of "
                f"{length} tokens takes {slow:.0f} ms, but {fast:.0f} ms with tp {halved.tp}: its all-reduces are wrong"
            )


def _refuse_crowds_that_are_faster(asked: _Asked) -> None:
    alone, crowd = (asked.decode(decodes, 1024).seconds * 1e3 for decodes in (1, 64))
    if alone > crowd:
        raise _RefusedError(
            f"pdflow rejects aiconfigurator's table of {asked}: a step of one "
            f"decode takes {alone:.0f} ms, but one of 64 decodes only {crowd:.0f} ms"
        )


def _table(asked: _Asked) -> CostFile:
    steps = [
        *asked.prompts(PROMPTS, PREFIXES),
        *asked.decodes(BATCHES, CONTEXTS),
        *(asked.mixed(*pair) for pair in MIXED),
    ]
    cost = attrs.evolve(
        fitted(steps, KNOTS),
        provenance=f"aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0): {asked.software} kernels of {asked}",
        rel_error=ERROR_BARS[asked.gpu in ON_PCIE and asked.tp > 1],
    )
    return cost_file(
        cost,
        MeasuredEngine(
            gpu=asked.gpu,
            model=asked.model,
            tp=asked.tp,
            software=asked.software,
            weight_bytes_per_param=1.0 if asked.fp8 else WEIGHT_BYTES.get(asked.model, 2.0),
            kv_bytes_per_value=2,
        ),
        MadeFrom(
            source="aiconfigurator-core 0.12.0, https://pypi.org/project/aiconfigurator-core/, (c) NVIDIA",
            licence="Apache-2.0",
            command="benchmarks/bake_costs.py",
            fitted_on=(
                f"prompts of {_listed(PROMPTS)} tokens behind {_listed(PREFIXES)}",
                f"{_listed(BATCHES)} decodes at contexts of {_listed(CONTEXTS)}, up to {MOST_CONTEXT:,} in all",
                f"prompts of 512 tokens together with decodes at 512: {_pairs(MIXED)}",
            ),
            held_out=(
                f"prompts of {_listed(OTHER_PROMPTS)} tokens behind {_listed(OTHER_PREFIXES)}",
                f"{_listed(OTHER_BATCHES)} decodes at contexts of {_listed(OTHER_CONTEXTS)}, "
                f"up to {MOST_CONTEXT:,} in all",
                f"prompts of 512 tokens together with decodes at 512: {_pairs(OTHER_MIXED)}",
            ),
            notes=("GPU time only: host time comes on top",),
        ),
        tuple(_held_out(cost, asked)),
    )


def _held_out(cost: Any, asked: _Asked) -> Iterator[RowErrors]:
    for name, steps in (
        ("prefill", asked.prompts(OTHER_PROMPTS, OTHER_PREFIXES)),
        ("decode", asked.decodes(OTHER_BATCHES, OTHER_CONTEXTS)),
        ("mixed", [asked.mixed(*pair) for pair in OTHER_MIXED]),
    ):
        yield row_errors(name, len(steps), misfit(cost, steps))


def row_errors(of: str, rows: int, off: Misfit) -> RowErrors:
    """Return a misfit in the form of cost files, to a hundredth of a percent."""
    shares = {name: round(value, 4) + 0.0 for name, value in attrs.asdict(off).items()}
    return RowErrors(of=of, rows=rows, **shares)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _pairs(pairs: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{prompts} and {decodes}" for prompts, decodes in pairs)
