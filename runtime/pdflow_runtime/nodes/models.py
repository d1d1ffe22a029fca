"""The model that engines compute with, opened from a scenario: its folder, its weights, its name, its tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import msgspec

from pdflow.errors import MissingBackendError, Problem, ScenarioError
from pdflow.layout.shapes import KvShape
from pdflow.protocol.wire.limits import MAX_BLOCKS
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.hf.config import DTYPES as HF_DTYPES
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import kv_shape_of, kv_tokens_of
from pdflow.version import version
from pdflow_runtime.engines.job import Runner
from pdflow_runtime.router.prompts import Prompts

if TYPE_CHECKING:
    from pdflow_runtime.engines.config import ModelConfig
    from pdflow_runtime.engines.weight_hash import WeightHash
    from pdflow_runtime.nodes.engine_node import LiveEngineNode

log = logging.getLogger(__name__)

DTYPES: Final = {short: name for name, short in HF_DTYPES.items()}
"""Torch's dtype names, by those of [model] kv_dtype."""
OF_BYTES: Final = {2: "bfloat16", 4: "float32", 8: "float64"}
"""The dtype of a model without a folder, by the bytes of a value in the KV cache."""
SPECIAL: Final = 2
"""The number of special tokens, whose ids precede those of bytes."""
TOKEN_OF_BYTE: Final = bytes(min(byte + SPECIAL, 255) for byte in range(256))
"""UTF-8 has no bytes 254 and 255, whose tokens are none of a byte's values."""
INSTALL: Final = "pip install 'pdflow[live]'"
WEIGHTS_SCHEME: Final = 2
"""The version of `weights_of`: to be counted up where the same model would get another number, so that a store that
outlives its nodes has nothing under a number that means something else."""
WEIGHTS_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
"""Dtypes by the last two bits of `weights_of`, so that a number of another engine says what it computes in."""
NOT_COMPUTED_WITH: Final = frozenset(("eos_token_ids", "max_position_embeddings", "dtype", "qk_norm"))
"""Fields of a model's configuration that `weights_of` leaves out: when an answer ends, how long a prompt may be, the
folder's dtype, which is not always what is computed in, and norms, which are known by their tensors."""


class ServedModel(Protocol):
    """A model that is ready to compute."""

    prompts: Prompts
    weights: int
    """Identifies the weights that KV and tokens are computed with: engines of which it differs exchange no KV (S4)."""
    dtype: str
    """The dtype that is computed in and that KV is kept in; "" if nothing is computed."""
    eos: frozenset[int]

    def runner(self, node: LiveEngineNode) -> Runner:
        """Return the runner that computes in the memory of this node's ranks."""


def folder_of(scenario: ResolvedScenario) -> Path:
    """Return the model's folder, made first if the scenario names none. ScenarioError if there is nothing in it."""
    named = scenario.serve.model
    if named is not None:
        folder = scenario.base_dir / named
        if not (folder / "config.json").is_file():
            raise ScenarioError([Problem(scenario.path, "serve.model", f"{folder} has no config.json")])
        return folder
    spec = scenario.model
    if spec.mla is not None or spec.moe is not None or not spec.gated_mlp:
        raise ScenarioError(
            [
                Problem(
                    scenario.path,
                    "model",
                    "has no folder, and weights can be generated for a dense Llama only: set serve.model to a folder",
                )
            ]
        )
    sizes = {
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
        msgspec.msgpack.encode((sorted(sizes.items()), scenario.seed, version())), digest_size=6
    ).hexdigest()
    folder = cache() / "models" / f"{spec.name}-{named_by}"
    if (folder / "config.json").is_file():
        return folder
    need_torch()
    log.info("making a model with random weights in %s, once", folder)
    from pdflow_runtime.engines.tiny import tiny_model

    return tiny_model(folder, scenario.seed, **sizes)


def need_torch() -> None:
    """Raise MissingBackendError if a package that torch engines import is not installed. It imports none of them."""
    missing = [name for name in ("torch", "safetensors", "tokenizers", "jinja2") if find_spec(name) is None]
    if missing:
        raise MissingBackendError(f'engine = "torch" needs {", ".join(missing)}: {INSTALL}')


def cache() -> Path:
    """Return the folder in which models that were made once are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdflow"


class TorchModel:
    """A Hugging Face folder, read whole. Args: `pool`, of the engine that computes with it; without one, on the
    CPU."""

    def __init__(self, scenario: ResolvedScenario, pool: Pool | None = None) -> None:
        need_torch()
        folder = folder_of(scenario)
        log.info("importing torch, to read the model in %s", folder)
        from pdflow_runtime.engines.weights import read_weights

        self.config = config_of(scenario, folder)
        self.dtype = dtype_of(scenario, folder, self.config)
        self.eos = self.config.eos_token_ids
        self._device: Final = "cpu" if pool is None else pool.device
        self._sequences: Final = 0 if pool is None or pool.role == "prefill" else pool.max_num_seqs
        """The sequences that may be decoded at once."""
        self._loaded = read_weights(folder, self.config, self.dtype, self._device)
        self.weights = weights_of(folder, self.config, self.dtype)
        self.prompts = prompts_of(scenario, folder, self.config)

    def runner(self, node: LiveEngineNode) -> Runner:
        from pdflow_runtime.engines.device import device_named
        from pdflow_runtime.engines.host_mirror import HostMirror
        from pdflow_runtime.engines.kv_cache import KvCache
        from pdflow_runtime.engines.model import Llama
        from pdflow_runtime.engines.torch_runner import TorchRunner

        ranks, shape, device = node.computed_in(), node.config.shape, device_named(self._device)
        memories, kept = [rank.memory for rank in ranks], node.memories()
        cache = KvCache(shape, memories, kept, self._loaded.dtype, device)
        mirrors = [rank.held.mirror for rank in ranks]
        mirror = None if None in mirrors else HostMirror(shape, memories, kept, mirrors, device)
        runner = TorchRunner(Llama(self.config, self._loaded), cache, mirror, node.pool_role == "prefill")
        runner.warm_up(self._sequences)
        return runner


class SyntheticModel:
    """A model of which nothing is computed: a step takes the time that the scenario's cost model says."""

    eos: frozenset[int] = frozenset()
    weights = 1
    dtype = ""

    def __init__(self, scenario: ResolvedScenario, pool: Pool) -> None:
        self.prompts = open_prompts(scenario)
        self._cost = step_cost(scenario.model, pool, scenario.base_dir)

    def runner(self, node: LiveEngineNode) -> Runner:
        from pdflow_runtime.engines.synthetic import SyntheticRunner

        ranks = node.computed_in()
        memories = [rank.memory for rank in ranks]
        return SyntheticRunner(self._cost, node.config.shape, memories, node.memories(), self.prompts.vocab_size)


class ByteTokens:
    """A tokenizer without a model: each byte of a text is a token, and what is none decodes to U+FFFD."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode().translate(TOKEN_OF_BYTE))

    def exceeds(self, text: str, most: int) -> bool:
        return len(text.encode()) > most

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        return [self.decode([token]) for token in tokens]

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(token % 95 + 32) for token in tokens)

    def chat(self, messages: Sequence[dict[str, str]], **more: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def is_synthetic(scenario: ResolvedScenario) -> bool:
    """True if the engines are synthetic. Engines are all of one kind: no prompt is computed by one and decoded by the
    other."""
    return all(pool.engine == "synthetic" for pool in scenario.pools)


def shape_of(scenario: ResolvedScenario, pool: Pool) -> KvShape:
    """Return the shape of this pool's KV. That of synthetic engines is as small as it can be, so that a laptop has room
    for a cluster's: a layer for each pipeline stage, a head for each rank, two words for each token."""
    if not is_synthetic(scenario):
        return kv_shape_of(scenario.model, pool)
    stages, heads = (max(getattr(other, axis) for other in scenario.pools) for axis in ("pp", "tp"))
    return KvShape(stages, heads, head_dim=4, bytes_per_value=4, block_size=pool.block_size)


def open_model(scenario: ResolvedScenario, pool: Pool) -> ServedModel:
    """Open the model that the engines of this pool compute with."""
    return TorchModel(scenario, pool) if pool.engine == "torch" else SyntheticModel(scenario, pool)


def open_prompts(scenario: ResolvedScenario) -> Prompts:
    """Open the model's tokenizer without its weights: all that a router needs."""
    if is_synthetic(scenario):
        context = min(kv_tokens_of(scenario.model, pool) for pool in scenario.pools)
        vocab_size, most = scenario.model.vocab_size, handed_over(scenario)
        return Prompts(scenario.model.name, ByteTokens(), vocab_size, context, most, token_bytes=1)
    folder = folder_of(scenario)
    return prompts_of(scenario, folder, config_of(scenario, folder))


def prompts_of(scenario: ResolvedScenario, folder: Path, config: ModelConfig) -> Prompts:
    """Return prompts by the tokenizer of that folder."""
    try:
        from pdflow_runtime.engines.tokenizer import Tokenizer
        from pdflow_runtime.router.token_bytes import longest_token_bytes
    except ImportError:
        raise MissingBackendError(f"a model's tokenizer needs tokenizers and jinja2: {INSTALL}") from None
    context, most = config.max_position_embeddings, handed_over(scenario)
    tokenizer, longest = Tokenizer(folder), longest_token_bytes(folder / "tokenizer.json")
    return Prompts(scenario.model.name, tokenizer, config.vocab_size, context, most, token_bytes=longest)


def handed_over(scenario: ResolvedScenario) -> int | None:
    """Return the tokens of the longest prompt whose blocks a registration can name, at whichever engine; None where no
    engine hands anything over."""
    sizes = [pool.block_size for pool in scenario.pools if pool.role != "aggregated"]
    return MAX_BLOCKS * min(sizes) if sizes else None


def weights_of(folder: Path, config: ModelConfig, dtype: str) -> int:
    """Return 63 bits that identify all that KV and tokens are computed from: a hash over every tensor's name, dtype,
    shape and bytes and what config.json says of the network (rotations, norms, heads), and two bits for the dtype of KV
    and of the computation. How tensors are cut into files, and config.json's other keys, do not matter. ModelError if a
    file cannot be read."""
    from pdflow_runtime.engines.weight_hash import hash_weights

    found = hash_weights(folder, cache() / "weights")
    network = attrs.asdict(config, filter=lambda field, _: field.name not in NOT_COMPUTED_WITH)
    encoded = msgspec.json.encode([WEIGHTS_SCHEME, sorted(network.items()), found.digest.hex()])
    hashed = int.from_bytes(blake2b(encoded, digest_size=8).digest(), "little") >> 3
    weights = hashed << 2 | WEIGHTS_DTYPES.index(dtype)
    log.info(
        "%s: weights %016x (%d tensors, %.3g GB; %s in %.1f s); stored in %s, computed in %s, KV in %s",
        *(folder, weights, found.tensors, found.nbytes / 1e9, _hashing(found), found.elapsed_s),
        *(" and ".join(found.dtypes), dtype, dtype),
    )
    return weights


def _hashing(found: WeightHash) -> str:
    """Return how the hashes of the files were obtained, for the log."""
    if not found.hashed_bytes:
        return "hashes read from the cache"
    if found.hashed_bytes == found.nbytes:
        return "all of it hashed"
    return f"{found.hashed_bytes / 1e9:.3g} GB hashed, the other hashes read from the cache,"


def weights_words(weights: int) -> str:
    """Return a number of `weights_of` as text for people."""
    return f"weights {weights:016x} in {WEIGHTS_DTYPES[weights & 3]}"


def dtype_of(scenario: ResolvedScenario, folder: Path, config: ModelConfig) -> str:
    """Return the dtype that torch engines compute in and keep KV in: that of `model.kv_dtype`, which the loader has
    taken from the folder's config.json if the scenario does not say it; else that of the tensors, if it is as wide as
    the scenario's KV. ScenarioError if neither says it, or it is not computed in."""
    spec = scenario.model
    if spec.kv_dtype is not None and spec.kv_dtype in DTYPES:
        return DTYPES[spec.kv_dtype]
    known = ", ".join(DTYPES)
    if spec.kv_dtype is not None:
        problem = f"is {spec.kv_dtype}, expected one of {known}: torch engines compute and keep KV in one dtype"
        raise ScenarioError([Problem(scenario.path, "model.kv_dtype", problem)])
    nbytes = spec.kv_bytes_per_value
    if scenario.serve.model is None:
        if nbytes in OF_BYTES:
            return OF_BYTES[nbytes]
        problem = f"is {nbytes}: torch engines have no dtype of that size; set model.kv_dtype to one of {known}"
        raise ScenarioError([Problem(scenario.path, "model.kv_bytes_per_value", problem)])
    from pdflow_runtime.engines.config import BYTES
    from pdflow_runtime.engines.weight_hash import stored_dtype

    dtype = config.dtype or stored_dtype(folder)
    if dtype is None or BYTES[dtype] != nbytes:
        theirs = "names no dtype, and its tensors have several" if dtype is None else f"is in {dtype}"
        problem = (
            f"is missing: the scenario's KV has {nbytes} bytes a value, {folder} {theirs}; set it to one of {known}"
        )
        raise ScenarioError([Problem(scenario.path, "model.kv_dtype", problem)])
    return dtype


def weights_bytes(scenario: ResolvedScenario) -> int:
    """Return the bytes of the files that each engine reads at its start; 0 for a model that is made here, and for
    synthetic engines."""
    if scenario.serve.model is None or is_synthetic(scenario):
        return 0
    from pdflow_runtime.engines.weight_files import weight_files

    return sum(path.stat().st_size for path in weight_files(scenario.base_dir / scenario.serve.model))


def config_of(scenario: ResolvedScenario, folder: Path) -> ModelConfig:
    """Read the folder's configuration. It must be of the model of [model], which is simulated, and says how large KV
    is."""
    from pdflow_runtime.engines.config import read_config

    config, spec = read_config(folder), scenario.model
    pairs = {
        "num_layers": (spec.num_layers, config.num_hidden_layers),
        "num_kv_heads": (spec.num_kv_heads, config.num_key_value_heads),
        "head_dim": (spec.head_dim, config.head_dim),
    }
    problems = [
        Problem(
            scenario.path,
            f"model.{key}",
            f"is {scenario_value}, but {folder / 'config.json'} has {has}; without [model] the file's values are used",
        )
        for key, (scenario_value, has) in pairs.items()
        if scenario_value != has
    ]
    if problems:
        raise ScenarioError(problems)
    return config
