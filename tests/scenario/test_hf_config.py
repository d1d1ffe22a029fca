"""Models by their config.json: what the presets say by hand follows from the published files' own keys."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.cost.specs import ModelSpec
from pdflow.errors import ScenarioError
from pdflow.scenario.hf.config import computed_dtype, model_note, model_values
from pdflow.scenario.hf.keys import HfConfigError
from pdflow.scenario.hf.layers import layer_kinds
from pdflow.scenario.presets import presets
from pdflow.scenario.reading.convert import structure
from pdflow.scenario.reading.document import KV_DTYPES
from pdflow.scenario.reading.load import load

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "n_layer": 70,
    "n_head": 112,
    "hidden_size": 14336,
    "vocab_size": 250880,
}
GPTQ: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"},
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama-3.1-8b"),
        (QWEN_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK, "deepseek-v3"),
        (OPT, "opt-13b"),
        (BLOOM, "bloom-176b"),
        (GPTQ, "qwen2.5-7b-gptq-int4"),
        ({"model_type": "vision", "text_config": LLAMA, "vision_config": {}}, "llama-3.1-8b"),
    ],
)
def test_a_config_gives_the_values_of_its_preset(config: dict[str, Any], preset: str) -> None:
    ours, complaints = structure({"name": "m", **model_values(config)}, ModelSpec)
    known, _ = structure({"name": "m", **presets("models")[preset].values}, ModelSpec)
    assert ours is not None, complaints
    assert known is not None
    same = ("parameters", "linear_parameters", "kv_bytes_per_token", "tie_embeddings", "mla", "moe")
    assert {key: getattr(ours, key) for key in same} == {key: getattr(known, key) for key in same}
    assert ours.weight_bytes == pytest.approx(known.weight_bytes, rel=0.002)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": True}, "has no hidden_size"),
        ({"quantization_config": {"quant_method": "unheard-of"}}, 'quantised by "unheard-of"'),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED"}}, 'quantised by "MIXED"'),
        ({"quantization_config": {"config_groups": {"a": {}}, "quant_method": "x"}}, 'quantised by "x"'),
        ({"quantization_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, 'KV cache in "NVFP4"'),
        ({"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}}, "leaves out"),
        ({"full_attention_interval": 4}, "linear attention"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of linear_attention"),
        ({"layer_types": ["mamba"] * 32}, "layers of mamba"),
        ({"attn_type_list": [0, 1]}, "linear attention .attn_type_list."),
        ({"hybrid_override_pattern": "M*"}, "state-space layers"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"head_dim": 128, "global_head_dim": 256}, "heads of two sizes"),
        ({"layer_types": ["full_attention"] * 3}, "has 3 entries in layer_types and 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "has layers of sliding_attention and no sliding_window"),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 16}, "windows of two kinds"),
        ({"sliding_window": 512, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern = LLLG"),
        ({"sliding_window": "wide"}, "sliding_window = wide"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "1 entries in no_rope_layers"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1]}, "has 2 entries in moe_layer_freq"),
    ],
)
def test_fields_that_a_config_lacks_are_reported(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HfConfigError, match=message):
        model_values({**LLAMA, **change})


CARDS = tomllib.loads((Path(__file__).parent / "model_cards.toml").read_text())
DSA, HYBRID = CARDS["deepseek-ai/DeepSeek-V3.2"]["config"], CARDS["Qwen/Qwen3.5-35B-A3B"]["config"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *(DEEPSEEK | QWEN_MOE),
        *("quantization_config", "text_config", "layer_types", "moe_layer_freq", "mlp_layer_types", "moe_layers"),
        *("shared_expert_intermediate_size", "mlp_only_layers", "sliding_window", "global_head_dim", "head_dim"),
        *("index_topk", "index_n_heads", "index_head_dim", "indexer_types", "index_topk_freq", "model_type"),
        *("full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "attn_type_list"),
        *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "attention_chunk_size"),
    ]
)
QUANTISED = st.fixed_dictionaries(
    {},
    optional={
        "quant_method": st.sampled_from(["fp8", "mxfp4", "modelopt", "gptq"]) | JSON,
        "quant_algo": st.sampled_from(["FP8", "NVFP4"]) | JSON,
        "quantization": JSON,
        "config_groups": st.dictionaries(st.text(max_size=2), st.fixed_dictionaries({"weights": JSON})) | JSON,
        "kv_cache_scheme": JSON,
        "kv_cache_quant_algo": JSON,
        "ignore": st.lists(st.sampled_from(["re:(", "re:.*attn.*", "lm_head", "model.layers.1.*"]) | JSON) | JSON,
        "bits": JSON,
        "group_size": JSON,
    },
)


@given(
    st.sampled_from([DEEPSEEK, QWEN_MOE, DSA, HYBRID]), st.dictionaries(KEYS, JSON, max_size=4), st.none() | QUANTISED
)
def test_whatever_a_config_says_it_is_read_or_refused(
    base: dict[str, Any], changed: dict[str, Any], quantised: dict[str, Any] | None
) -> None:
    config = base | changed | ({} if quantised is None else {"quantization_config": quantised})
    try:
        values = model_values(config)
    except HfConfigError:
        return
    structure({"name": "m", **values}, ModelSpec)
    model_note(config)


def spec_of(config: dict[str, Any]) -> ModelSpec:
    spec, complaints = structure({"name": "m", **model_values(config)}, ModelSpec)
    assert spec is not None, complaints
    return spec


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_that_the_models_card_states(name: str) -> None:
    card = CARDS[name]
    assert spec_of(card["config"]).parameters == pytest.approx(card["parameters"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if "kv_bytes_per_token" in card])
def test_kv_bytes_are_those_that_are_published_or_counted_by_hand(name: str) -> None:
    card = CARDS[name]
    spec = spec_of(card["config"])
    values = spec.kv_bytes_per_token // spec.kv_bytes_per_value
    assert (values * KV_DTYPES[spec.kv_dtype] if spec.kv_dtype else 2 * values) == card["kv_bytes_per_token"]
    assert card["source"]


def test_there_are_cards_of_every_kind() -> None:
    specs = [spec_of(card["config"]) for card in CARDS.values()]
    assert len(specs) >= 30
    for key in ("window", "linear_attention", "sparse_attention", "mla", "moe"):
        assert any(getattr(spec, key) is not None for spec in specs), key
    assert {spec.activation_dtype for spec in specs} == {"bf16", "fp4"}


def test_linear_attention_by_hand() -> None:
    """Qwen3.5-397B-A17B: 45 of 60 layers, each with a state of 64 heads x 128 x 128 in float32, and 3 tokens of the
    convolution's 2 x 16 x 128 + 64 x 128 values."""
    spec = spec_of(CARDS["Qwen/Qwen3.5-397B-A17B"]["config"])
    assert spec.linear_attention is not None
    assert (spec.linear_attention.layers, spec.attention_layers, spec.gated_attention) == (45, 15, True)
    assert spec.state_bytes == 45 * (64 * 128 * 128 * 4 + 3 * 12288 * 2)
    assert spec.kv_bytes_of(1000) == 30_720_000 + spec.state_bytes
    with pytest.raises(ValueError, match="tp 32 does not divide its 16 key heads of linear attention"):
        spec.check_parallel(32)


def test_sparse_attention_by_hand() -> None:
    """GLM-5.2's indexers: layers 0 to 2, and of those that follow every fourth."""
    spec = spec_of(CARDS["zai-org/GLM-5.2"]["config"])
    assert spec.sparse_attention is not None
    assert (spec.sparse_attention.topk, spec.sparse_attention.layers) == (2048, 21)
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32)
    assert spec.attention_parameters == 78 * spec.attention_parameters_per_layer + 21 * indexer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v9"}, "sparse attention .index_topk., which .model. does not support in this family"),
        ({"q_lora_rank": None}, "has no q_lora_rank"),
        ({"index_n_heads": None}, "has no index_n_heads"),
        ({"index_topk_pattern": "FSSF"}, "index_topk_pattern and no indexer_types"),
        ({"indexer_types": ["full"]}, "has indexer_types, expected"),
        ({"indexer_types": ["shared"] * 61}, "no layer with an indexer"),
        ({"index_skip_topk_offset": "x"}, "index_skip_topk_offset = x"),
    ],
)
def test_sparse_attention_that_is_not_understood_is_refused(change: dict[str, Any], message: str) -> None:
    config = CARDS["deepseek-ai/DeepSeek-V3.2"]["config"]
    with pytest.raises(HfConfigError, match=message):
        model_values({**config, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": None}, "has no linear_num_key_heads"),
        ({"model_type": "bailing"}, "linear attention .full_attention_interval., which"),
        ({"full_attention_interval": 64}, "has no layers but those of linear_attention"),
    ],
)
def test_linear_attention_that_is_not_understood_is_refused(change: dict[str, Any], message: str) -> None:
    config = CARDS["Qwen/Qwen3.5-27B"]["config"] | {"full_attention_interval": 4}
    with pytest.raises(HfConfigError, match=message):
        model_values({**config, **change} | ({"num_hidden_layers": 60} if "full_attention_interval" in change else {}))


def test_products_of_an_fp4_checkpoint_are_those_of_what_it_quantises() -> None:
    config = CARDS["nvidia/Qwen3-235B-A22B-NVFP4"]["config"]
    all_of_it = spec_of(config)
    assert (all_of_it.activation_dtype, all_of_it.expert_products) == ("fp4", "fp4")
    left = ["lm_head", "model.layers.*.self_attn*"]
    experts = spec_of({**config, "quantization_config": {"quant_algo": "NVFP4", "exclude_modules": left}})
    assert (experts.activation_dtype, experts.expert_products) == ("bf16", "fp4")
    group = {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}}
    for inputs, products in ((None, "bf16"), ({"num_bits": 4, "type": "float"}, "fp4")):
        groups = {"config_groups": {"a": {**group, "input_activations": inputs}}, "quant_method": "compressed-tensors"}
        assert spec_of({**LLAMA, "quantization_config": groups}).activation_dtype == products


@pytest.mark.parametrize(
    ("name", "quantised", "gigabytes"),
    [
        # The sizes of the checkpoints on Hugging Face, without multi-token prediction and vision.
        ("openai/gpt-oss-120b", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 65.2),
        ("openai/gpt-oss-20b", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 13.8),
        ("meta-llama/Meta-Llama-3.1-70B", {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, 72.7),
        (
            "moonshotai/Kimi-K2.5",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
            },
            595.0,
        ),
        (
            "Qwen/Qwen3-235B-A22B",
            {"quant_algo": "NVFP4", "exclude_modules": [f"model.layers.{n}.mlp.gate" for n in range(94)]},
            134.0,
        ),
    ],
)
def test_a_quantised_checkpoint_has_the_bytes_that_were_published(
    name: str, quantised: dict[str, Any], gigabytes: float
) -> None:
    spec = spec_of({**CARDS[name]["config"], "quantization_config": quantised})
    assert spec.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_attention_that_a_checkpoint_leaves_in_16_bits_counts_so() -> None:
    half = {"quant_algo": "FP8", "exclude_modules": [f"model.layers.{n}.self_attn*" for n in range(48)]}
    all_of_it = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    left, taken = (spec_of({**QWEN_MOE, "quantization_config": each}) for each in (half, all_of_it))
    attention = left.num_layers * left.attention_parameters_per_layer
    assert left.weight_bytes - taken.weight_bytes == pytest.approx(attention, rel=0.02)
    assert (left.bytes_per_expert_param, left.activation_dtype) == (1.0, "fp8")
    assert model_values({**QWEN_MOE, "quantization_config": all_of_it})["kv_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 3}, 3),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 3]}, 26),
        ({"interleave_moe_layer_step": 4}, 36),
        ({"moe_layer_freq": [0, 0, *[1] * 46]}, 2),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, 25),
        ({"mlp_layer_types": ["dense", *["sparse"] * 47]}, 1),
        ({"moe_layers": [1, 3]}, 46),
    ],
)
def test_layers_without_experts_are_counted(keys: dict[str, Any], dense: int) -> None:
    assert model_values({**QWEN_MOE, **keys})["moe"]["dense_layers"] == dense


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "gpt_oss", "sliding_window": 128}, 16),
        ({"model_type": "gemma2"}, 16),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, 27),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 24),
        ({"model_type": "cohere2", "sliding_window": 4096}, 24),
        ({"model_type": "olmo3", "sliding_window": 4096}, 24),
        ({"model_type": "mistral", "sliding_window": 4096}, 32),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "llama", "sliding_window": 4096, "max_position_embeddings": 4096}, 0),
        ({"model_type": "llama4_text"}, 24),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0] * 16, "attention_chunk_size": 8192}, 16),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 512}, 16),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 512}, 0),
    ],
)
def test_layers_with_a_window_are_counted(config: dict[str, Any], layers: int) -> None:
    window = spec_of({**LLAMA, **config}).window
    assert (0 if window is None else window.layers) == layers
    size = config.get("sliding_window") or config.get("attention_chunk_size")
    assert window is None or window.tokens == (size or {"llama4_text": 8192}.get(config["model_type"], 4096))
    assert window is None or window.whole_kv == (config.get("model_type") == "llama4_text")


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "olmo3", "qwen2", "llama4_text"])
def test_layers_are_of_the_kinds_that_transformers_says(family: str) -> None:
    """A family's own rule, where a file does not name the kinds."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CONFIG_MAPPING[family](num_hidden_layers=26)
    assert layer_kinds({"model_type": family}, 26) == theirs.layer_types


@pytest.mark.parametrize(
    ("layers", "kind", "note"),
    [
        (32, "sliding_attention", "all layers attend to the latest 512 tokens only"),
        (24, "chunked_attention", "24 of 32 layers attend to chunks of 512 tokens"),
        (24, "sliding_attention", ""),
    ],
)
def test_what_counts_as_more_than_it_is_has_a_note(layers: int, kind: str, note: str) -> None:
    kinds = [kind] * layers + ["full_attention"] * (32 - layers)
    found = model_note({**LLAMA, "layer_types": kinds, "sliding_window": 512, "attention_chunk_size": 512})
    assert found.startswith(note) if note else not found


SCENARIO = """
[workload]
requests = 10
arrival = { process = "poisson", rate_rps = 1.0 }
input_tokens = 100
output_tokens = 10
[model]
hf_config = "my-model/config.json"
MORE
[[pool]]
name = "p"
role = "prefill"
gpu = "h100-sxm"
[[pool]]
name = "d"
role = "decode"
gpu = "h100-sxm"
"""


def test_a_scenario_names_a_config(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model/config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "s.toml"
    file.write_text(SCENARIO.replace("MORE", 'weight_dtype = "fp8"\nnum_layers = 16'))
    model = load(file).model
    assert (model.name, model.num_layers, model.weight_bytes_per_param) == ("llama-4.5B", 16, 1.0)
    assert model.hidden_size == 4096


def test_what_is_beside_a_config_counts_unless_the_config_says_it(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "sliding_window": 4096}))
    quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quant))
    file = tmp_path / "s.toml"
    file.write_text(SCENARIO.replace("MORE", ""))
    scenario = load(file)
    assert (scenario.model.weight_bytes_per_param, scenario.model.kv_bytes_per_value) == (0.5625, 1)
    assert scenario.model.activation_dtype == "fp4"
    assert len(scenario.notes) == 1
    assert "all layers attend to the latest 4,096 tokens only" in scenario.notes[0]
    file.write_text(SCENARIO.replace("MORE", 'weight_dtype = "bf16"'))
    model = load(file).model
    assert (model.weight_bytes_per_param, model.activation_dtype) == (2.0, "bf16")
    file.write_text(SCENARIO.replace("MORE", 'weight_dtype = "fp4"'))
    assert load(file).model.activation_dtype == "fp4"
    file.write_text(SCENARIO.replace("MORE", 'weight_dtype = "fp4"\nactivation_dtype = "bf16"'))
    assert load(file).model.activation_dtype == "bf16"
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    file.write_text(SCENARIO.replace("MORE", ""))
    assert load(file).model.weight_bytes_per_param == 1.0
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ScenarioError, match=r"hf_quant_config\.json"):
        load(file)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "llama-8.0B"),
        ({"_name_or_path": "meta-llama/Llama-3.1-8B"}, "meta-llama/Llama-3.1-8B"),
        ({"_name_or_path": "/data/models/our-8b/"}, "our-8b"),
        ({"_name_or_path": "C:\\models\\our-8b"}, "our-8b"),
        ({"_name_or_path": "./our-8b"}, "our-8b"),
        ({"_name_or_path": "/x/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0"}, "Qwen/Qwen3-0.6B"),
        ({"_name_or_path": ""}, "llama-8.0B"),
        ({"_name_or_path": None, "model_type": "", "architectures": ["OlmoForCausalLM"]}, "olmo-8.0B"),
        ({"num_hidden_layers": 1, "vocab_size": 1000}, "llama-226M"),
        ({"model_type": None}, "model-8.0B"),
    ],
)
def test_a_model_is_named_by_its_config_and_not_by_its_folder(tmp_path: Path, keys: dict[str, Any], name: str) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model/config.json").write_text(json.dumps({**LLAMA, **keys}))
    file = tmp_path / "s.toml"
    file.write_text(SCENARIO.replace("MORE", ""))
    assert load(file).model.name == name
    assert load(file, overrides=["model.name=mine"]).model.name == "mine"


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, "", '"my-model/config.json" cannot be read: No such file'),
        (b"\xff", "", "is not JSON"),
        (b"[" * 100_000, "", "is not JSON"),
        (b"[]", "", "is not a JSON object"),
        (b"{}", "", "has no hidden_size"),
        (b"{}", 'preset = "llama-3.1-8b"', "cannot be combined with preset"),
    ],
)
def test_a_wrong_config_is_reported_once_with_its_location(
    tmp_path: Path, content: bytes | None, more: str, message: str
) -> None:
    (tmp_path / "my-model").mkdir()
    if content is not None:
        (tmp_path / "my-model/config.json").write_bytes(content)
    file = tmp_path / "s.toml"
    file.write_text(SCENARIO.replace("MORE", more))
    with pytest.raises(ScenarioError) as caught:
        load(file)
    assert str(caught.value).count("\n") == 0, str(caught.value)
    assert f"{file}:8: model.hf_config: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("dtype_keys", "dtype", "kv", "weights"),
    [
        ({"torch_dtype": "float32"}, "float32", "fp32", 4.0),
        ({"torch_dtype": "float64"}, "float64", "fp64", 8.0),
        ({"torch_dtype": "float16"}, "float16", "fp16", 2.0),
        ({"dtype": "bfloat16"}, "bfloat16", "bf16", 2.0),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32", "fp32", 4.0),
        ({"torch_dtype": "torch.float32"}, "float32", "fp32", 4.0),
        ({"torch_dtype": None}, None, None, 2.0),
        ({"torch_dtype": "float8_e4m3fn"}, None, None, 2.0),
    ],
)
def test_kv_is_kept_in_what_a_model_is_computed_in(
    dtype_keys: dict[str, Any], dtype: str | None, kv: str | None, weights: float
) -> None:
    config = {**LLAMA, "torch_dtype": None, **dtype_keys}
    assert computed_dtype(config) == dtype
    found = model_values(config)
    assert (found.get("kv_dtype"), found["weight_bytes_per_param"]) == (kv, weights)
    multimodal = {"model_type": "vision", "dtype": "float16", "text_config": config}
    assert computed_dtype(multimodal) == (dtype or "float16")
    assert model_values(multimodal)["kv_dtype"] == (kv or "fp16")


SERVED = """
[workload]
requests = 10
arrival = { process = "poisson", rate_rps = 1.0 }
input_tokens = 100
output_tokens = 10
[model]
MODEL
[[pool]]
name = "all"
role = "aggregated"
gpu = "cpu"
engine = "ENGINE"
kv_tokens = 8192
[serve]
model = "served"
"""


@pytest.mark.parametrize(
    ("model", "engine", "kv_dtype", "kv_bytes"),
    [
        ('preset = "qwen3-8b"', "torch", "fp32", 4),
        ('preset = "tiny"', "torch", "fp32", 4),
        ('hf_config = "other/config.json"', "torch", "fp32", 4),
        ('preset = "qwen3-8b"\nkv_dtype = "fp16"', "torch", "fp16", 2),
        ('preset = "qwen3-8b"\nkv_bytes_per_value = 8', "torch", None, 8),
        ('hf_config = "other/config.json"\nkv_dtype = "bf16"', "torch", "bf16", 2),
        ('hf_config = "other/config.json"\nkv_bytes_per_value = 1', "torch", None, 1),
        ('hf_config = "other/config.json"', "synthetic", "fp16", 2),
        ('preset = "qwen3-8b"', "synthetic", None, 2),
    ],
)
def test_the_dtype_of_a_served_folder_counts_unless_the_scenario_sets_one(
    model: str, engine: str, kv_dtype: str | None, kv_bytes: int, tmp_path: Path
) -> None:
    """Synthetic engines have nothing of the folder."""
    for name, dtype in (("served", "float32"), ("other", "float16")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": dtype}))
    file = tmp_path / "s.toml"
    file.write_text(SERVED.replace("MODEL", model).replace("ENGINE", engine))
    found = load(str(file)).model
    assert (found.kv_dtype, found.kv_bytes_per_value) == (kv_dtype, kv_bytes)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"torch_dtype": 7}', "[" * 100_000])
def test_a_served_folder_that_cannot_be_read_sets_no_dtype(content: str | None, tmp_path: Path) -> None:
    """`simulate` does not need it, and `serve` says what is wrong with it."""
    if content is not None:
        (tmp_path / "served").mkdir()
        (tmp_path / "served/config.json").write_text(content)
    file = tmp_path / "s.toml"
    file.write_text(SERVED.replace("MODEL", 'preset = "qwen3-8b"').replace("ENGINE", "torch"))
    assert load(str(file)).model.kv_dtype is None


WITHOUT_MODEL = SERVED.replace("[model]\nMODEL\n", "").replace("ENGINE", "torch")


def served_folder(folder: Path) -> Path:
    (folder / "served").mkdir()
    (folder / "served/config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float32"}))
    return folder / "served"


@pytest.mark.parametrize("model", ["", "[model]\n", '[model]\nname = "mine"\nkv_dtype = "bf16"\n'])
def test_serve_model_alone_specifies_the_model(model: str, tmp_path: Path) -> None:
    """[model] is absent, empty, or has some values, which count."""
    served_folder(tmp_path)
    file = tmp_path / "s.toml"
    file.write_text(model + WITHOUT_MODEL)
    found = load(str(file)).model
    assert (found.num_layers, found.hidden_size, found.num_kv_heads) == (32, 4096, 8)
    assert found.kv_dtype == ("bf16" if "bf16" in model else "fp32")
    assert (found.name == "mine") == ("mine" in model)


def test_serve_model_on_the_command_line_replaces_the_model_of_the_quickstart(tmp_path: Path) -> None:
    quickstart = Path(__file__).resolve().parents[2] / "examples/serve-quickstart.toml"
    folder = served_folder(tmp_path)
    assert load(quickstart).model.num_layers == 4
    assert load(quickstart, overrides=[f"serve.model={folder}"]).model.num_layers == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, '"served/config.json" cannot be read: No such file or directory; looked for '),
        ("[]", "is not a JSON object"),
        ('{"model_type": "clip"}', "has no hidden_size: is it the config.json of a language model?"),
    ],
)
def test_a_folder_that_specifies_no_model_is_one_error_at_its_key(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        served_folder(tmp_path)
        (tmp_path / "served/config.json").write_text(content)
    file = tmp_path / "s.toml"
    file.write_text(WITHOUT_MODEL)
    with pytest.raises(ScenarioError) as caught:
        load(file)
    [problem] = caught.value.problems
    assert (problem.location, problem.path) == (f"{file}:{len(WITHOUT_MODEL.splitlines())}", "serve.model")
    assert message in problem.message


def test_a_preset_or_a_whole_specification_comes_before_serve_model(tmp_path: Path) -> None:
    """`serve` compares its shape with that of the folder; `simulate` needs no folder."""
    file = tmp_path / "s.toml"
    file.write_text('[model]\npreset = "qwen3-8b"\n' + WITHOUT_MODEL)
    assert load(file).model.num_layers == 36
