"""Folders of models: what is read of them, and which are refused, with the file and the reason."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.engines import support

torch = support.torch

from safetensors.torch import load_file, save_file  # noqa: E402

from pdflow_runtime.engines.config import ModelError, read_config  # noqa: E402
from pdflow_runtime.engines.tiny import tiny_model  # noqa: E402
from pdflow_runtime.engines.weight_files import weight_files  # noqa: E402
from pdflow_runtime.engines.weight_hash import hash_weights, stored_dtype  # noqa: E402
from pdflow_runtime.engines.weights import read_weights  # noqa: E402


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def load(folder: Path) -> Any:
    return read_weights(folder, read_config(folder), "float32")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling 'yarn' is not supported; llama3 is"),
        (
            {"vocab_size": 600},
            r"model.embed_tokens.weight has shape \[512, 256\], expected \[600, 256\] by config.json",
        ),
        ({"num_hidden_layers": 5}, "no tensor model.layers.4.input_layernorm.weight"),
    ],
)
def test_what_is_not_computed_here_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    change(folder, **keys)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_what_is_missing_or_broken_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/config\.json: No such file"):
        read_config(folder / "nowhere")
    path = folder / "model.safetensors"
    path.write_bytes(b"\x07" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4}')
    with pytest.raises(ModelError, match=r"config\.json: vocab_size is missing"):
        read_config(folder)


def test_weights_may_be_in_several_files_with_biases_and_tied(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    del tensors["lm_head.weight"]
    first = {name: tensors.pop(name) for name in list(tensors)[:10]}
    for layer in range(4):
        for name, size in (("q", 256), ("k", 128), ("v", 128)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(size)
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    change(folder, model_type="qwen2", tie_word_embeddings=True)
    weights = load(folder)
    assert weights.head is weights.embedding
    assert [len(layer.qkv_bias) for layer in weights.layers] == [512] * 4


def test_a_tensor_that_no_llama_has_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_norm\.weight is not a tensor of this model_type"):
        load(folder)


def split(folder: Path) -> dict[str, Any]:
    """The folder's weights in two shards with an index, which is returned."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for shard, those in shards.items():
        save_file({name: tensors[name] for name in those}, folder / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, those in shards.items() for name in those}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_only_the_shards_that_the_index_names_are_read(folder: Path, tmp_path: Path) -> None:
    whole, digest = load(folder), hash_weights(folder, tmp_path / "cache").digest
    dtype = stored_dtype(folder)
    split(folder)
    for name in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        save_file({"model.norm.weight": torch.zeros(256, dtype=torch.float16)}, folder / name)
    assert torch.equal(load(folder).norm, whole.norm)
    assert hash_weights(folder, tmp_path / "cache").digest == digest
    assert stored_dtype(folder) == dtype == "float32"


def test_a_whole_file_comes_before_an_index_as_for_transformers(folder: Path) -> None:
    kept = (folder / "model.safetensors").read_bytes()
    split(folder)
    (folder / "model.safetensors").write_bytes(kept)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]


def test_without_an_index_consolidated_weights_are_left_out(folder: Path) -> None:
    index = split(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": torch.zeros(256)}, folder / "consolidated-00001-of-00001.safetensors")
    assert [path.name for path in weight_files(folder)] == sorted(set(index["weight_map"].values()))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, r"index\.json: weight_map is missing or empty"),
        ({"weight_map": []}, r"index\.json: weight_map is missing or empty"),
        (
            {"weight_map": {"a": "../model.safetensors"}},
            r"weight_map names '\.\./model\.safetensors', which is not a file",
        ),
        ({"weight_map": {"a": "model-7.safetensors"}}, r"model-7\.safetensors: No such file .*index\.json names it"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(folder: Path, index: dict[str, Any], message: str) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_norms_of_heads_are_needed_where_the_model_has_them(folder: Path) -> None:
    change(folder, model_type="qwen3")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)


def test_answers_end_with_any_token_of_the_generation_config(folder: Path) -> None:
    assert read_config(folder).eos_token_ids == {1}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert read_config(folder).eos_token_ids == {1, 7}


def test_long_waves_are_slowed_and_short_ones_stay(folder: Path) -> None:
    """Llama 3's scaling, against its definition wave by wave."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    change(folder, rope_scaling={"rope_type": "llama3", **scaling})
    model = support.load(folder, "float64")
    for wave in range(32):
        speed = 10000.0 ** (-2 * wave / 64)
        turns = 1024 * speed / (2 * math.pi)
        mix = min(1.0, max(0.0, (turns - 1.0) / 3.0))
        slowed = (1 - mix) * speed / 8.0 + mix * speed
        assert float(model._cos[100, 0, wave]) == pytest.approx(math.cos(100 * slowed), abs=1e-4)


def test_the_tiny_model_is_made_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_hidden_layers": 1}
    one, same, other = (tiny_model(tmp_path / name, seed, **small) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    contents = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert contents[0] == contents[1] != contents[2]
    before = (one / "config.json").stat().st_mtime_ns
    assert tiny_model(one, 1, **small) == one
    assert (one / "config.json").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"], "nothing half made is left"


def test_answers_wander(tiny: Path) -> None:
    """A model that repeats one token would hide what tests are to find."""
    answer = support.dense_answer(support.load(tiny), [5, 6, 7], 40)
    assert len(set(answer)) > 20


def test_quantised_weights_are_refused(folder: Path) -> None:
    """Their scales would be left out, and the answers wrong."""
    change(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: quantised weights"):
        read_config(folder)
