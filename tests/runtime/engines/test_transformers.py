"""Folders as transformers writes them are served with the tokens that transformers generates greedily, in float32: read
as `pdflow serve` reads them, alone and by way of P and D."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")
pytest.importorskip("transformers", reason="the comparison needs it: pip install 'pdflow[dev]'")

import torch
import transformers
from safetensors.torch import save_file

from pdflow.protocol.messages import Code
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.engines.sampling.constraints import Constraints
from pdflow_runtime.engines.tiny import tiny_model
from pdflow_runtime.nodes.models import TorchModel
from tests.runtime.process.test_cluster import QUICKSTART
from tests.runtime.support.live_pair import LivePair, cluster, live_pair, prompt
from tests.runtime.support.served import served

OUTPUT: Final = 16
PROMPTS: Final = [prompt(length, length) for length in (1, 16, 37, 300)]
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "dtype": "float32",
}
SIZES: Final = """
name = "sizes"
num_layers = 4
hidden_size = 256
intermediate_size = 688
num_heads = 4
num_kv_heads = 2
head_dim = 64
vocab_size = 512
"""
"""What a [model] says that names no config.json. As with one, it says nothing of a dtype."""
ROPE: Final = {"rope_theta": 500000.0}
LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {"head_dim": 64, "rms_norm_eps": 1e-5}),
    "llama3-rope": ("Llama", {"head_dim": 64, "rope_parameters": ROPE | LLAMA3}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": None}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen3-tied": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True, "attention_bias": False}),
}


def made(folder: Path, kind: str) -> Any:
    """The model, whose files are in the folder: in shards, with biases and norms that are not their initial values."""
    name, model_config = KINDS[kind]
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{name}Config")(**(SHAPE | model_config))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            wide = tensor.dim() == 2
            tensor.normal_(0.0, 1.5 * tensor.shape[1] ** -0.5 if wide else 0.3)
            tensor += 0.0 if wide else 1.0
    model.save_pretrained(folder, max_shard_size="3MB")
    tokens = tiny_model(folder.parent / "tokenizer", num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokens / file).read_bytes())
    return model


def greedy(model: Any) -> list[list[int]]:
    """To all prompts, by transformers; no token is a near-tie, which another order of summing could turn."""
    answers = []
    for tokens in PROMPTS:
        generated = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            do_sample=False,
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(generated.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3
        answers.append(generated.sequences[0, len(tokens) :].tolist())
    return answers


async def answers(home: LivePair) -> dict[str, list[list[int]]]:
    """Of one engine alone, and of P and D; to all prompts at once."""
    sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
    found: dict[str, list[list[int]]] = {}

    async def ask(mode: str, number: int) -> None:
        asked = home.ask_alone if mode == "alone" else home.ask
        tokens, code = await asked(f"{mode}-{number}", PROMPTS[number], sampling)
        assert code is Code.NONE
        found[mode][number] = tokens

    async with trio.open_nursery() as nursery:
        for mode in ("alone", "handed"):
            found[mode] = [[]] * len(PROMPTS)
            for number in range(len(PROMPTS)):
                nursery.start_soon(ask, mode, number)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a scenario says nothing of a dtype, it is the folder's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = greedy(made(tmp_path / kind, kind))
    shards = list((tmp_path / kind).glob("*.safetensors"))
    assert len(shards) > 1
    # Neither is named by the index: Mistral's second copy of the weights, and a shard of another download.
    for name in ("consolidated.safetensors", "model-00099-of-00099.safetensors"):
        save_file(
            {"model.norm.weight": torch.zeros(256), "tok_embeddings.weight": torch.ones(4)}, tmp_path / kind / name
        )
    assert len({token for answer in expected for token in answer}) > OUTPUT
    model_toml = SIZES if kind in ("qwen2", "mistral") else f'hf_config = "{tmp_path / kind}/config.json"'
    scenario = cluster(f"serve.model={tmp_path / kind}", model=model_toml)

    model = TorchModel(scenario)
    assert (model.dtype, scenario.model.kv_bytes_per_value) == ("float32", 4)

    async def run() -> dict[str, list[list[int]]]:
        async with live_pair(scenario, model) as home:
            found = await answers(home)
            assert home.d.engine.prompt_tokens_computed <= len(PROMPTS)
            return found

    assert trio.run(run) == {"alone": expected, "handed": expected}


def test_constrained_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a penalty, a bias, bad words and an ending that may not come at once; alone, and by P and D."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = made(tmp_path / "llama", "llama")
    scenario = cluster(f"serve.model={tmp_path / 'llama'}", model=SIZES)
    plain = greedy(model)
    cases = []
    for tokens, answer in zip(PROMPTS, plain, strict=True):
        words, ending, favoured = ((answer[0],), (answer[2], answer[3])), answer[4], answer[5]
        generated = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            do_sample=False,
            max_new_tokens=OUTPUT,
            min_new_tokens=10,
            eos_token_id=ending,
            repetition_penalty=1.15,
            sequence_bias={(favoured,): 1.5},
            bad_words_ids=[list(phrase) for phrase in words],
        )[0, len(tokens) :].tolist()
        rules = Constraints(repetition_penalty=1.15, logit_bias=((favoured, 1.5),), bad_words=words, min_tokens=10)
        sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True, stop_token_ids=frozenset({ending}), constraints=rules)
        assert generated != answer
        cases.append((tokens, sampling, generated))

    async def run() -> None:
        async with live_pair(scenario, TorchModel(scenario)) as home:
            for number, (tokens, sampling, expected) in enumerate(cases):
                for asked in (home.ask, home.ask_alone):
                    assert (await asked(f"{asked.__name__}-{number}", tokens, sampling)).tokens == expected

    trio.run(run)


@pytest.mark.slow
@pytest.mark.trio
async def test_a_served_folder_answers_as_transformers_does(tmp_path: Path) -> None:
    """By processes and HTTP, over tcp, with no key changed but `serve.model`."""
    expected = greedy(await trio.to_thread.run_sync(partial(made, tmp_path / "model", "llama3-rope")))
    overrides = [f"serve.model={tmp_path / 'model'}", "serve.transport=tcp"]
    overrides += [f"pool.{pool}.replicas=1" for pool in ("prefill", "decode")]
    with served(tmp_path, QUICKSTART, *overrides) as serving:
        for tokens, answer in zip(PROMPTS, expected, strict=True):
            assert (await serving.ask(prompt=tokens, max_tokens=OUTPUT, ignore_eos=True)).tokens == answer
        log = serving.log.read_text()
    for engine in ("prefill-0", "decode-0"):
        assert re.search(rf"component={engine} .*stored in F32, computed in float32, KV in float32", log)
