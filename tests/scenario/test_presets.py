"""Presets are complete, sourced, and agree with what is published about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.network.slices import queue_bytes_per_s
from pdflow.scenario.presets import ALIASES, Kind, Preset, alias_note, find_preset, presets
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.reading.convert import did_you_mean, structure
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.network import Network

REFERENCE = Path(__file__).resolve().parents[2] / "examples/reference.toml"
EVERY = [preset for kind in ("models", "gpus", "links") for preset in presets(kind).values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", EVERY, ids=lambda preset: preset.name)
def test_every_figure_has_a_source(preset: Preset) -> None:
    assert preset.summary
    for key in preset.values:
        assert preset.sources[key], f"{preset.name}.{key} has no source"


def test_names() -> None:
    """What issues, documents and examples name."""
    assert set(presets("models")) >= {
        *(
            "llama-2-70b",
            "llama-3.1-8b",
            "llama-3.1-70b",
            "qwen2.5-7b",
            "qwen2.5-7b-gptq-int4",
            "qwen3-0.6b",
            "qwen3-8b",
        ),
        *("qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "opt-13b", "opt-66b", "bloom-176b"),
    }
    assert set(presets("gpus")) >= {
        *("a10", "a100-80g", "a800", "l40s", "h20", "h100-sxm", "h200", "h800", "b200", "mi300x", "rtx-4090"),
        "rtx-pro-6000",
    }
    assert set(presets("links")) == {
        *(
            "ideal",
            "nvlink",
            "pcie4",
            "pcie5",
            "rdma-400g",
            "efa-100g",
            "efa-200g",
            "tcp-25g",
            "tcp-100g",
            "nvme-of",
            "cuda-ipc",
        ),
    }


def test_all_structure() -> None:
    for kind, cls in (("models", ModelSpec), ("gpus", GpuSpec)):
        for name, preset in presets(kind).items():  # type: ignore[arg-type]
            spec, complaints = structure({"name": name, **preset.values}, cls)
            assert spec is not None, complaints
    for name, preset in presets("links").items():
        network, complaints = structure({"preset": name, **preset.values}, Network)
        assert network is not None, complaints


@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes_per_token"),
    [  # as model cards and papers say them, in thousands of millions; KV: 2 x layers x KV heads x head x bytes
        ("llama-2-70b", 68.98, 68.98, 327_680),
        ("llama-3.1-8b", 8.03, 8.03, 131_072),
        ("llama-3.1-70b", 70.55, 70.55, 327_680),
        ("qwen2.5-7b", 7.62, 7.62, 57_344),
        ("qwen2.5-7b-gptq-int4", 7.62, 7.62, 57_344),
        ("qwen3-0.6b", 0.596, 0.596, 114_688),
        ("qwen3-8b", 8.19, 8.19, 147_456),
        ("qwen3-32b", 32.76, 32.76, 262_144),
        ("qwen3-30b-a3b", 30.53, 3.35, 98_304),
        ("qwen3-235b-a22b", 235.1, 22.2, 192_512),
        ("deepseek-v3", 671.0, 37.6, 61 * 576 * 2),
        ("opt-13b", 12.85, 12.85, 819_200),
        ("opt-66b", 65.7, 65.7, 2_359_296),
        ("bloom-176b", 176.2, 176.2, 4_014_080),
    ],
)
def test_models(name: str, total: float, active: float, kv_bytes_per_token: int) -> None:
    model, _ = structure({"name": name, **presets("models")[name].values}, ModelSpec)
    assert model is not None
    assert model.parameters == pytest.approx(total * 1e9, rel=0.003)
    assert model.linear_parameters + model.embedding_parameters == pytest.approx(active * 1e9, rel=0.01)
    assert model.kv_bytes_per_token == kv_bytes_per_token


def test_quantised_checkpoints_have_their_published_size() -> None:
    """5.58 GB of Qwen2.5-7B-Instruct-GPTQ-Int4's safetensors."""
    model, _ = structure({"name": "q", **presets("models")["qwen2.5-7b-gptq-int4"].values}, ModelSpec)
    assert model is not None
    assert model.weight_bytes == pytest.approx(5.58e9, rel=0.01)


def test_post_cost_is_the_line_through_the_published_points() -> None:
    values = presets("links")["efa-200g"].values
    for descriptors, seconds in ((118, 0.46e-3), (18_880, 46e-3)):
        assert values["per_message_s"] + descriptors * values["per_descriptor_s"] == pytest.approx(seconds, rel=0.01)


def test_efa_reaches_what_was_published() -> None:
    """Of 16 NICs, in GB/s: with the slices that are advised, and with Mooncake's default of 64 KB."""
    values = presets("links")["efa-200g"].values
    wire = values["bandwidth_bytes_per_s"]
    for slice_bytes, published in ((values["slice_bytes"], 352.59), (65_536, 97.11)):
        queue = queue_bytes_per_s(slice_bytes, values["per_slice_s"])
        assert queue is not None
        assert 16 * min(wire, queue) / 1e9 == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("written", "suggested"),
    [
        ("h100-s", "h100-sxm"),  # not h800, which differs in fewer letters from h100
        ("H100", "h100-sxm"),
        ("rtx", "rtx-4090 or rtx-pro-6000"),
        ("l40", "l40s"),
        ("b300", "b200"),
    ],
)
def test_names_that_begin_as_written_are_suggested_first(written: str, suggested: str) -> None:
    assert did_you_mean(written, presets("gpus")) == f" (did you mean {suggested}?)"


@pytest.mark.parametrize("kind", ["models", "gpus", "links"])
def test_an_alias_is_no_preset_and_leads_to_one(kind: Kind) -> None:
    for alias, name in ALIASES[kind].items():
        assert alias not in presets(kind)
        assert find_preset(kind, alias) == presets(kind)[name]
        assert alias_note(kind, alias) == f'"{alias}" is the preset {name}: {presets(kind)[name].summary}'
        assert alias_note(kind, name) == ""


def test_a_scenario_that_names_an_alias_is_that_of_the_preset_with_a_note() -> None:
    plain = load(REFERENCE)
    by_name = load(REFERENCE, overrides=["pool.prefill.gpu=h100"])
    in_table = load(REFERENCE, overrides=["pool.prefill.gpu={ preset = 'h100', ec = 0.68 }"])
    assert plain.notes == ()
    expected = ('pool.prefill.gpu: "h100" is the preset h100-sxm: NVIDIA H100 SXM 80 GB',)
    for scenario in (by_name, in_table):
        assert scenario.notes == expected
        assert scenario.pools == plain.pools
        assert content_of(scenario) == content_of(plain)
