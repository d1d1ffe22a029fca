"""What engines compute with, opened from a scenario: the model's folder, its weights, its name, its tokenizer."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from pdflow.cost.specs import ModelSpec
from pdflow.errors import MissingBackendError, Problem, ScenarioError
from pdflow.scenario.schema import Pool, Scenario
from pdflow.version import version
from runtime.engines.job import Runner
from runtime.prompts import Prompts

if TYPE_CHECKING:
    from runtime.engine_node import EngineNode

DTYPES: Final = {2: "bfloat16", 4: "float32", 8: "float64"}
"""By the bytes of a value in the KV cache, which is what the weights are computed in, too."""
INSTALL: Final = "pip install 'pdflow[live]'"


class Model(Protocol):
    """One model, ready to be computed with."""

    prompts: Prompts
    weights: int
    """Names all that tokens depend on: engines with other weights exchange no KV."""
    eos: frozenset[int]

    def runner(self, node: EngineNode) -> Runner:
        """What computes in the memory of this node's ranks."""


def folder_of(scenario: Scenario) -> Path:
    """The model's folder, made first if the scenario names none. ScenarioError if there is nothing in it."""
    named = scenario.serve.model
    if named is not None:
        folder = scenario.base_dir / named
        if not (folder / "config.json").is_file():
            raise ScenarioError([Problem(scenario.path, "serve.model", f"{folder} has no config.json")])
        return folder
    spec = scenario.model
    if spec.mla is not None or spec.moe is not None or not spec.gated_mlp:
        raise ScenarioError(
            [Problem(scenario.path, "model", "has no folder, and only a Llama can be made: name one in serve.model")]
        )
    said = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "tie_word_embeddings": spec.tie_embeddings,
    }
    named_by = blake2b(
        msgspec.msgpack.encode((sorted(said.items()), scenario.seed, version())), digest_size=6
    ).hexdigest()
    folder = cache() / "models" / f"{spec.name}-{named_by}"
    if (folder / "config.json").is_file():
        return folder
    try:
        from runtime.engines.tiny import tiny_model
    except ImportError:
        raise MissingBackendError(f'engine = "torch" needs torch, safetensors and tokenizers: {INSTALL}') from None
    return tiny_model(folder, scenario.seed, **said)


def cache() -> Path:
    """Where what was made once stays."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdflow"


class TorchModel:
    """A Hugging Face folder, read whole."""

    def __init__(self, scenario: Scenario) -> None:
        folder = folder_of(scenario)
        from runtime.engines.config import read_config
        from runtime.engines.weights import read_weights

        self.dtype = DTYPES[scenario.model.kv_bytes_per_value]
        self.config = read_config(folder)
        self.eos = self.config.eos_token_ids
        self._loaded = read_weights(folder, self.config, self.dtype)
        self.weights = weights_of(folder, self.dtype)
        _demand_same_shape(scenario, folder, scenario.model)
        self.prompts = open_prompts(scenario)

    def runner(self, node: EngineNode) -> Runner:
        from runtime.engines.kv_cache import KvCache
        from runtime.engines.model import Llama
        from runtime.engines.torch_runner import TorchRunner

        ranks = list(node.ranks.values())
        cache = KvCache(node.place.shape, [rank.memory for rank in ranks], node.memories(), self._loaded.dtype)
        return TorchRunner(Llama(self.config, self._loaded), cache)


def open_model(scenario: Scenario, pool: Pool) -> Model:
    """What the engines of this pool compute with."""
    if pool.engine == "torch":
        return TorchModel(scenario)
    raise ScenarioError([Problem(scenario.path, f"pool.{pool.name}.engine", "synthetic engines are not served yet")])


def open_prompts(scenario: Scenario) -> Prompts:
    """The model's tokenizer, without its weights: all that a router needs."""
    folder = folder_of(scenario)
    try:
        from runtime.engines.tokenizer import Tokenizer
    except ImportError:
        raise MissingBackendError(f"a model's tokenizer needs tokenizers and jinja2: {INSTALL}") from None
    from runtime.engines.config import read_config

    config = read_config(folder)
    return Prompts(scenario.model.name, Tokenizer(folder), config.vocab_size, config.max_position_embeddings)


def weights_of(folder: Path, dtype: str) -> int:
    """63 bits over what the weights are, as far as their files say: names, sizes and heads of the files."""
    hashed = blake2b(dtype.encode(), digest_size=8)
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as opened:
            hashed.update(file.name.encode() + opened.read(1 << 20))
        hashed.update(str(file.stat().st_size).encode())
    return int.from_bytes(hashed.digest(), "little") >> 1


def _demand_same_shape(scenario: Scenario, folder: Path, spec: ModelSpec) -> None:
    """[model] says what is simulated, and how large KV is: it must be the model that is served."""
    from runtime.engines.config import read_config

    config = read_config(folder)
    pairs = {
        "num_layers": (spec.num_layers, config.num_hidden_layers),
        "num_kv_heads": (spec.num_kv_heads, config.num_key_value_heads),
        "head_dim": (spec.head_dim, config.head_dim),
    }
    problems = [
        Problem(scenario.path, f"model.{key}", f"is {said}, and {folder / 'config.json'} says {has}")
        for key, (said, has) in pairs.items()
        if said != has
    ]
    if problems:
        raise ScenarioError(problems)
