"""`pdflow validate` names the connector, the thread that posts READs, and what varies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.scenario.reading.load import load
from pdflow.scenario.summary import noise_summary, posting_summary

REFERENCE = Path(__file__).resolve().parents[3] / "examples/reference.toml"
SMALL = (
    "pool.prefill.replicas=1",
    "pool.decode.replicas=1",
    *(f"pool.{p}.kv_tokens=65536" for p in ("prefill", "decode")),
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "connector vllm-nixl"),
        (("transfer.connector=sglang",), "connector sglang"),
        (("transfer.method=nixl-pull",), "connector vllm-nixl; READs by D's engine thread, during steps"),
        (
            ("transfer.method=nixl-pull", "transfer.connector=vllm-nixl-0.28"),
            "connector vllm-nixl-0.28; READs by D's engine thread, before each step",
        ),
        (
            ("transfer.method=nixl-pull", "transfer.reads_on=background"),
            "connector vllm-nixl; READs by another thread of D",
        ),
        (
            ("transfer.method=kv-store", "transfer.dialect=as-published"),
            "connector per-tensor; READs by D's engine, which waits for them",
        ),
        (("transfer.method=cpu-staged",), "whole ranges of staging memory"),
    ],
)
def test_posting(overrides: tuple[str, ...], expected: str) -> None:
    assert posting_summary(load(REFERENCE, overrides=overrides)) == expected


@pytest.mark.parametrize(("method", "dialect"), [(name, d) for name in METHODS for d in METHODS[name].dialects])
def test_the_line_of_posting_has_80_columns(method: str, dialect: str) -> None:
    scenario = load(REFERENCE, overrides=(*SMALL, f"transfer.method={method}", f"transfer.dialect={dialect}"))
    assert len(posting_summary(scenario)) <= 70


def test_noise() -> None:
    def line(*overrides: str) -> str:
        return noise_summary(load(REFERENCE, overrides=overrides))

    constant = [f'pool.{pool}.cost={{ model = "constant" }}' for pool in ("prefill", "decode")]
    assert line() == "standard deviations: steps 5 %, API servers 10 %, latencies 40 %"
    assert line("noise.steps=0.07", "noise.links=0") == "standard deviations: steps 7 %, API servers 10 %"
    assert line(*constant[:1]) == line()
    assert line(*constant) == "standard deviations: latencies 40 %"
    assert line(*constant, "network.preset=ideal") == "off"
    assert line("noise.steps=0", "noise.api_server=0", "noise.links=0") == "off"
