"""A small model with random weights, in the files that a real one comes in: for laptops and tests, nothing downloaded.

It is as good as any at what pdflow is about: every token depends on all before it. Its weights are larger than those
that training starts from, so that greedy answers wander rather than repeat one token.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from pdflow_runtime.engines.config import ModelError

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
SPECIAL: Final = ("<|begin_of_text|>", "<|end_of_text|>")
CHAT: Final = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
TEXT: Final = """
A request comes to the router, which chooses who computes its prompt and who writes the answer. The prefill engine reads
all tokens of the prompt at once and keeps what later tokens will look at: keys and values, layer by layer, in blocks.
These blocks are the cache, and they have to get from one engine to the other before the decode engine can go on with
the answer. The machine that moves them knows who waits, who writes, how long a block is held and what happens when a
peer dies. Then there is one token after another, each of them depending on all of those that came before, until there
is nothing left to say or there are as many of them as somebody has asked for. What was held for them is free again for
whoever comes next, and the next request is never far: it may even begin with the same words, and then its first blocks
are there already. Hello, world! How are you today? Once upon a time there was a small model that had learned nothing.
"""
"""The text that the tokenizer's merges are learned from."""
GAIN: Final = 1.5
"""The gain of every projection: its outputs are this times as large as its inputs."""


def tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write such a model to the folder, unless one is there, and return the folder. `changes`: to its config.json.

    Raises ModelError for a vocabulary that has not even all bytes.
    """
    config = CONFIG | changes
    if config["vocab_size"] < 256 + len(SPECIAL):
        raise ModelError(f"vocab_size is {config['vocab_size']}: a generated model needs at least {256 + len(SPECIAL)}")
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Several engines may start at once: whoever is first has the name, and nobody reads half a model.
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(made, seed, config)
            os.rename(made, folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _write(folder: Path, seed: int, config: dict[str, Any]) -> None:
    write_folder(
        folder, _weights(config, torch.Generator().manual_seed(seed)), _tokenizer(config["vocab_size"]), config
    )


def write_folder(folder: Path, weights: Mapping[str, Tensor], tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Write the files of a Hugging Face folder. The first two special tokens begin and end a text."""
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT, "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a tokenizer of the special tokens, all bytes and the merges learned from the texts: at most `size` ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Bytes()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer with merges learned from TEXT; the other ids are words that no text is encoded to, but that
    tokens decode to."""
    whole = json.loads(byte_tokenizer([TEXT], min(size, 512)).to_str())
    vocabulary = whole["model"]["vocab"]
    vocabulary |= {f"Ġw{index}": index for index in range(len(vocabulary), size)}
    return Tokenizer.from_str(json.dumps(whole))


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int, gain: float = GAIN) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain * columns**-0.5)

    weights = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        weights |= {
            f"{at}input_layernorm.weight": torch.ones(hidden),
            f"{at}self_attn.q_proj.weight": matrix(q, hidden),
            f"{at}self_attn.k_proj.weight": matrix(kv, hidden),
            f"{at}self_attn.v_proj.weight": matrix(kv, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, q),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights
