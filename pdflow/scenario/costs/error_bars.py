"""The error bars of the roofline: how far published measurements of engines of this class are from it.

`presets/error_bars.json` has the figures; `python -m benchmarks.error_bars` computes them from the rows of
docs/validation.md. A class is a GPU (and with it NVLink or PCIe), dense models or mixtures of experts, and how an
engine's GPUs share the work. Below and above 85 % load are apart. A class without rows was never compared, and results
say so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.scenario.presets import find_preset
from pdflow.scenario.schema.scenario import AiconfiguratorCost, MeasuredCost, Pool, RooflineCost

RATES: Final = ("bf16_flops", "fp8_flops", "fp4_flops", "hbm_bytes_per_s", "ec", "ec_fp8", "em")
"""What step times depend on most."""
_STATED_ERRORS: Final[Mapping[type, float]] = {AiconfiguratorCost: 0.10, MeasuredCost: 0.03}
"""Those of TPOT in docs/costs.md, of costs without a class of engines; constant ones are exact, and `fitted` tables
state theirs in words only."""


class ErrorBarKey(NamedTuple):
    """A class of engines."""

    gpu: str
    model: str
    """dense, or mixture of experts, with its windows, linear or sparse attention, and products in 4 bits"""
    parallel: str
    """one GPU, tensor parallel, or expert parallel"""


def key_of_engine(model: ModelSpec, pool: Pool) -> ErrorBarKey:
    """Return the class of a pool's engines."""
    parallel = "expert parallel" if not pool.tp_alone else "tensor parallel" if pool.tp * pool.pp > 1 else "one GPU"
    return ErrorBarKey(_gpu(pool.gpu), _kind(model), parallel)


def _gpu(gpu: GpuSpec) -> str:
    """Return the name of a GPU; one whose rates are not its preset's is another GPU."""
    preset = find_preset("gpus", gpu.name)
    same = preset is not None and all(getattr(gpu, rate) == preset.values.get(rate) for rate in RATES)
    return gpu.name if same else f"{gpu.name} with other rates"


def _kind(model: ModelSpec) -> str:
    kind = "dense" if model.moe is None else "mixture of experts"
    for name, has in (
        ("windows", model.window),
        ("linear attention", model.linear_attention),
        ("sparse attention", model.sparse_attention),
    ):
        if has is not None:
            kind += f", {name}"
    return f"{kind}, 4 bits" if "fp4" in (model.activation_dtype, model.expert_products) else kind


@functools.cache
def error_bars() -> Mapping[ErrorBarKey, Mapping[str, Any]]:
    """Return all error bars by class.

    `tpot_below`, `ttft_below`, `tpot_above` and `ttft_above` are None or [rows, low, high]: measured / simulated - 1,
    below and above 85 % load. `seen` is true if constants of the GPU's preset were fitted on these rows' runs.
    """
    text = resources.files("pdflow.scenario").joinpath("presets", "error_bars.json").read_text(encoding="utf-8")
    return {ErrorBarKey(row["gpu"], row["model"], row["parallel"]): row for row in json.loads(text)}


def error_bar(model: ModelSpec, pool: Pool) -> str:
    """Return the error bar of a pool with roofline costs, as a phrase."""
    key = key_of_engine(model, pool)
    called = f"{key.model}, {key.gpu}, {key.parallel}"
    row = error_bars().get(key)
    if row is None:
        return f"never compared with a measurement ({called})"
    intervals = [*_intervals(row, "below", ""), *_intervals(row, "above", "above 85 % load ")]
    seen = ", of the runs that the preset was fitted on" if row["seen"] else ""
    return f"measured against simulated: {'; '.join(intervals)} ({called}{seen})"


def step_time_error(model: ModelSpec, pool: Pool) -> tuple[float, float] | None:
    """Return how much longer the steps of a pool may take than modelled, from low to high, as shares. Those of a
    roofline are by TPOT where it was compared, otherwise by TTFT; None if neither was."""
    if not isinstance(pool.cost, RooflineCost):
        stated = _STATED_ERRORS.get(type(pool.cost), 0.0)
        return -stated, stated
    row = error_bars().get(key_of_engine(model, pool))
    bars = [] if row is None else [row[name] for name in ("tpot_below", "tpot_above", "ttft_below") if row[name]]
    return (bars[0][1], bars[0][2]) if bars else None


def _intervals(row: Mapping[str, Any], load: str, where: str) -> Iterator[str]:
    bars = [(metric, row[f"{metric}_{load}"]) for metric in ("tpot", "ttft")]
    figures = [f"{metric.upper()} {interval(bar)}" for metric, bar in bars if bar]
    if figures:
        rows = max(bar[0] for _, bar in bars if bar)
        yield f"{where}{', '.join(figures)} in {rows} row{'s' * (rows > 1)}"


def interval(bar: tuple[int, float, float]) -> str:
    """Return the interval of [rows, low, high] in per cent."""
    low, high = (f"{share * 100:+.0f}".replace("-", "−") for share in bar[1:])
    return f"{low} to {high} %" if bar[0] > 1 else f"{low} %"
