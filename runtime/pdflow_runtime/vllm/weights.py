"""The number that names what a vLLM instance computes KV with: all tensor data, the model's configuration, dtypes.

KV is exchanged between engines of the same number only (S4). The hash over the tensors is `engines/weight_hash.py`'s,
cached by file; weights that are not in *.safetensors are named by the option `weights_version`.
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from pdflow_runtime.engines.weight_hash import hash_weights
from pdflow_runtime.nodes.models import cache
from pdflow_runtime.vllm.options import Options, UnsupportedError

log = logging.getLogger(__name__)

SCHEME: Final = 1
"""The version of this definition: counted up where the same model would get another number."""
NOT_COMPUTED_WITH: Final = frozenset(
    (
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"),
        *("max_position_embeddings", "model_max_length", "eos_token_id", "bos_token_id", "pad_token_id"),
    )
)
"""Keys of a model's configuration by which no KV differs, or that name a folder or a version. Of rotary embeddings that
are scaled, `_rotary` has what else counts."""


def weights_of(vllm_config: Any, options: Options) -> int:
    """Return 63 bits that are the same for instances that compute the same KV. UnsupportedError if the weights cannot
    be named."""
    model = vllm_config.model_config
    named = options.weights_version
    tensors = f"version {named}" if named is not None else _hashed(model)
    keys = model.hf_config.to_dict()
    config = {key: each for key, each in keys.items() if key not in NOT_COMPUTED_WITH}
    dtypes = [str(model.dtype), str(vllm_config.cache_config.cache_dtype), str(model.quantization)]
    computed_with = [SCHEME, tensors, sorted(config.items()), dtypes, *_rotary(model, keys)]
    text = msgspec.json.encode(computed_with, enc_hook=str)
    weights = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
    log.info("pdflow: weights %016x, computed in %s, KV in %s", weights, dtypes[0], dtypes[1])
    return weights


def _rotary(model: Any, config: dict[str, Any]) -> list[Any]:
    """Return what scaled rotary embeddings depend on besides the keys that are hashed: the number of positions, and of
    longrope whether this instance serves longer texts than the model was trained for, by which vLLM chooses its factors
    (vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py). Nothing if none is scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = {str(kind) for one in each if (kind := one.get("rope_type") or one.get("type"))} - {"default"}
    if not kinds:
        return []
    positions = config.get("max_position_embeddings")
    if kinds.isdisjoint(("longrope", "su")):
        return [positions]
    trained = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return [positions, model.max_model_len > (trained or positions or 0)]


def _hashed(model: Any) -> str:
    folder = _folder(model)
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(
            f"{folder} has no *.safetensors to hash: set kv_connector_extra_config.weights_version to a "
            "text that changes with the weights, the same for all instances"
        )
    return hash_weights(folder, cache() / "weights").digest.hex()


def _folder(model: Any) -> Path:
    """Return the folder of the model's files: the one that was named, or its snapshot in Hugging Face's cache, which
    vLLM has loaded the weights from by now."""
    if os.path.isdir(model.model):
        return Path(model.model)
    try:
        hub: Any = import_module("huggingface_hub")
        found: str = hub.snapshot_download(model.model, revision=model.revision, local_files_only=True)
    except Exception as error:  # The hub's errors have no base of their own.
        raise UnsupportedError(
            f"the weights of {model.model} were not found on this host ({error}): set "
            "kv_connector_extra_config.weights_version to a text that changes with the weights"
        ) from None
    return Path(found)
