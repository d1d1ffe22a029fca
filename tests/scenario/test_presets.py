"""Presets are complete, sourced, and agree with what is published about them."""

from __future__ import annotations

import pytest

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.scenario.convert import structure
from pdflow.scenario.presets import Preset, presets
from pdflow.scenario.schema import Network

EVERY = [preset for kind in ("models", "gpus", "links") for preset in presets(kind).values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", EVERY, ids=lambda preset: preset.name)
def test_every_figure_has_a_source(preset: Preset) -> None:
    assert preset.summary
    for key in preset.values:
        assert preset.sources[key], f"{preset.name}.{key} has no source"


def test_names() -> None:
    assert list(presets("models")) == ["llama-3.1-70b", "llama-3.1-8b", "qwen3-32b"]
    assert list(presets("gpus")) == ["a100-80g", "h100-sxm", "h200", "l40s"]
    assert list(presets("links")) == ["ideal", "nvlink", "pcie5", "rdma-400g", "tcp-100g"]


def test_all_structure() -> None:
    for kind, cls in (("models", ModelSpec), ("gpus", GpuSpec)):
        for name, preset in presets(kind).items():  # type: ignore[arg-type]
            spec, complaints = structure({"name": name, **preset.values}, cls)
            assert spec is not None, complaints
    for name, preset in presets("links").items():
        network, complaints = structure({"preset": name, **preset.values}, Network)
        assert network is not None, complaints


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes_per_token"),
    [  # parameter counts as their model cards say them; KV: 2 x layers x 8 KV heads x 128 x 2 bytes
        ("llama-3.1-8b", 8.03e9, 131_072),
        ("llama-3.1-70b", 70.6e9, 327_680),
        ("qwen3-32b", 32.8e9, 262_144),
    ],
)
def test_models(name: str, parameters: float, kv_bytes_per_token: int) -> None:
    model, _ = structure({"name": name, **presets("models")[name].values}, ModelSpec)
    assert model is not None
    assert model.parameters == pytest.approx(parameters, rel=0.003)
    assert model.kv_bytes_per_token == kv_bytes_per_token


def test_post_cost_is_the_line_through_the_published_points() -> None:
    values = presets("links")["rdma-400g"].values
    for descriptors, seconds in ((118, 0.46e-3), (18_880, 46e-3)):
        assert values["per_message_s"] + descriptors * values["per_descriptor_s"] == pytest.approx(seconds, rel=0.01)
