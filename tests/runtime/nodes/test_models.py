"""A model's folder that cannot be served is a sentence and exit code 2, whatever is wrong with it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

import torch
from safetensors.torch import load_file, save_file

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.wire.limits import MAX_BLOCKS
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.nodes.models import TorchModel, folder_of, open_prompts, weights_bytes
from tests.runtime.support.live_pair import cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(folder_of(cluster()), tmp_path / "model"))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_model_file_is_named(missing: str, folder: Path) -> None:
    (folder / missing).unlink()
    with pytest.raises(PdflowError, match=r"config\.json|tokenizer\.json|safetensors") as caught:
        TorchModel(cluster(f"serve.model={folder}"))
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_another_shape_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    other = cluster(f"serve.model={folder}", "model.num_layers=3")
    for opened in (TorchModel, open_prompts):
        with pytest.raises(PdflowError, match=r"model\.num_layers: is 3"):
            opened(other)


def test_a_prompt_of_more_blocks_than_a_registration_names_is_refused_to_whoever_sends_it() -> None:
    """D's process ended when it was to be registered."""
    engines = [f"pool.{pool}.engine=synthetic" for pool in ("prefill", "decode")]
    room = [f"pool.{pool}.kv_tokens=200_000" for pool in ("prefill", "decode")]
    prompts = open_prompts(cluster(*engines, *room, "pool.prefill.block_size=1", "pool.decode.block_size=1"))
    prompts.check_length(MAX_BLOCKS, 20)
    with pytest.raises(OpenAIError, match="accepts prompts of at most 65536 tokens") as refused:
        prompts.check_length(MAX_BLOCKS + 1, 20)
    assert refused.value.status == 400
    open_prompts(cluster(*engines, *room)).check_length(190_000, 20)


def test_the_time_to_start_is_by_the_size_of_the_weights(folder: Path) -> None:
    assert weights_bytes(cluster()) == 0
    assert weights_bytes(cluster(f"serve.model={folder}")) == (folder / "model.safetensors").stat().st_size


SIZED = """
name = "sized"
num_layers = 4
hidden_size = 256
intermediate_size = 688
num_heads = 4
num_kv_heads = 2
head_dim = 64
vocab_size = 512
"""
"""A [model] that says nothing of a dtype."""


def stored_in(folder: Path, stored: torch.dtype, /, **keys: Any) -> None:
    """The model's tensors are of that dtype; its config.json says these."""
    path = folder / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("stored", "keys", "model_toml", "computed"),
    [
        ("float32", {"torch_dtype": "float32"}, "", "float32"),
        ("float16", {"dtype": "float16"}, "", "float16"),
        ("bfloat16", {"torch_dtype": "bfloat16"}, "", "bfloat16"),
        ("bfloat16", {"torch_dtype": "float32"}, "", "float32"),
        ("float32", {"torch_dtype": "float32"}, 'kv_dtype = "bf16"', "bfloat16"),
        ("float32", {"torch_dtype": "float32"}, 'kv_dtype = "fp16"', "float16"),
        ("float16", {}, "", "float16"),
        ("float16", {"torch_dtype": "float16"}, "kv_bytes_per_value = 2", "float16"),
        ("float32", {}, "kv_bytes_per_value = 4", "float32"),
    ],
)
def test_what_is_computed_in_is_the_folders_or_the_scenarios_dtype(
    stored: str, keys: dict[str, Any], model_toml: str, computed: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stored_in(folder, getattr(torch, stored), **keys)
    model = TorchModel(cluster(f"serve.model={folder}", model=SIZED + model_toml))
    assert model.dtype == computed
    assert model._loaded.dtype == getattr(torch, computed)
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[stored]
    assert f"stored in {short}, computed in {computed}, KV in {computed}" in caplog.text


@pytest.mark.parametrize(
    ("model_toml", "message"),
    [
        ("", "the scenario's KV has 2 bytes a value, .* is in float32; set it to one of fp64, fp32, bf16, fp16"),
        (
            'kv_dtype = "fp8"',
            "model.kv_dtype: is fp8, expected one of .*: torch engines compute and keep KV in one dtype",
        ),
    ],
)
def test_a_dtype_that_is_not_computed_in_is_refused(model_toml: str, message: str, folder: Path) -> None:
    stored_in(folder, torch.float32)
    with pytest.raises(PdflowError, match=message):
        TorchModel(cluster(f"serve.model={folder}", model=SIZED + model_toml))


def test_tensors_of_several_dtypes_give_no_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    stored_in(folder, torch.bfloat16)
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, path)
    with pytest.raises(PdflowError, match="names no dtype, and its tensors have several"):
        TorchModel(cluster(f"serve.model={folder}", model=SIZED))


def test_a_model_that_is_made_has_the_scenarios_dtype(folder: Path) -> None:
    for model_toml, dtype in (
        ('kv_dtype = "fp16"', "float16"),
        ("", "bfloat16"),
        ("kv_bytes_per_value = 8", "float64"),
    ):
        assert TorchModel(cluster(model=SIZED + model_toml)).dtype == dtype
    with pytest.raises(PdflowError, match="kv_bytes_per_value: is 3: torch engines have no dtype of that size"):
        TorchModel(cluster(model=SIZED + "kv_bytes_per_value = 3"))
