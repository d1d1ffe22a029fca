"""Error bars of the roofline: by class of engine, from published measurements, and open where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import error_bars as computing
from benchmarks.validation.unfitted import rows as unfitted
from pdflow.scenario.costs.error_bars import error_bars
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.reading.load import parse, resolve

TEXT = """
[workload]
requests = 1
arrival = {{ process = "constant", rate_rps = 1 }}
input_tokens = 1
output_tokens = 1
[model]
preset = "{model}"
[[pool]]
name = "e"
role = "aggregated"
gpu = "{gpu}"
tp = {tp}
"""


def bar_of(model: str, gpu: str, tp: int) -> str:
    scenario = resolve(parse("e.toml", TEXT.format(model=model, gpu=gpu, tp=tp)))
    return step_cost(scenario.model, scenario.pools[0], scenario.base_dir).rel_error["all"]


def test_a_class_that_was_measured_has_its_intervals_and_rows() -> None:
    row = next(row for key, row in error_bars().items() if key == ("h100-sxm", "dense", "tensor parallel"))
    rows, low, high = row["tpot_below"]
    found = bar_of("llama-3.1-70b", "h100-sxm", 4)
    assert found.startswith(
        f"measured against simulated: TPOT {low * 100:+.0f} to {high * 100:+.0f} %".replace("-", "−")
    )
    assert f" in {rows} rows; above 85 % load TPOT" in found
    assert found.endswith("(dense, h100-sxm, tensor parallel)")


def test_a_class_without_rows_was_never_compared() -> None:
    assert bar_of("qwen3-30b-a3b", "b200", 1) == (
        "never compared with a measurement (mixture of experts, b200, one GPU)"
    )


def test_runs_that_a_preset_was_fitted_on_are_called_so() -> None:
    assert "of the runs that the preset was fitted on" in bar_of("llama-3.1-8b", "rtx-pro-6000", 1)


@pytest.mark.parametrize("load", ["below", "above"])
@pytest.mark.parametrize("metric", ["tpot", "ttft"])
def test_intervals_are_in_order(metric: str, load: str) -> None:
    bars = [bar for row in error_bars().values() if (bar := row[f"{metric}_{load}"]) is not None]
    assert bars
    for rows, low, high in bars:
        assert rows >= 1
        assert -1 < low <= high


@pytest.mark.parametrize("gpu", ["a10", "h800"])
def test_the_stored_bars_are_those_of_the_rows(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two classes that section 7 alone has, so that nothing else need be simulated."""
    every: Callable[[], list[Any]] = unfitted.rows
    monkeypatch.setattr(unfitted, "rows", lambda: [row for row in every() if row.gpu == gpu])
    (computed,) = computing._bars(list(computing._of_unfitted()))
    (stored,) = [row for key, row in error_bars().items() if key.gpu == gpu]
    assert {key: list(value) if isinstance(value, list) else value for key, value in computed.items()} == stored


@pytest.mark.parametrize(
    ("keys", "called"),
    [
        ("window = { tokens = 128, layers = 16 }", "dense, windows, h100-sxm, one GPU"),
        (
            "linear_attention = { layers = 9, key_heads = 4, value_heads = 4, key_head_dim = 64, value_head_dim = 64 }",
            "dense, linear attention, h100-sxm, one GPU",
        ),
    ],
)
def test_attention_of_other_kinds_is_another_class(keys: str, called: str) -> None:
    text = TEXT.format(model="llama-3.1-8b", gpu="h100-sxm", tp=1).replace("[[pool]]", f"{keys}\n[[pool]]")
    scenario = resolve(parse("e.toml", text))
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    assert cost.rel_error["all"] == f"never compared with a measurement ({called})"


def test_a_gpu_with_other_rates_is_another_gpu() -> None:
    text = TEXT.format(model="llama-3.1-8b", gpu="h100-sxm", tp=1)
    text = text.replace('gpu = "h100-sxm"', 'gpu = { preset = "h100-sxm", ec = 0.2 }')
    scenario = resolve(parse("e.toml", text))
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    assert "h100-sxm with other rates" in cost.rel_error["all"]
