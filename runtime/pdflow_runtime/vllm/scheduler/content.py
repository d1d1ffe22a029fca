"""The content of a request of vLLM's: everything, besides the weights, that the KV of its prompt is computed from.

Token ids, the LoRA adapter with all its tensors, the identity and position of multimodal inputs, and the cache salt.
That is what vLLM's own prefix cache has in its keys (vllm/v1/core/kv_cache_utils.py, `generate_block_hash_extra_keys`),
and the adapter's weights, of which vLLM takes the name alone. A prompt that is given as embeddings has no content that
could be named, nor has an adapter whose files are not here: such a request is computed where it is served.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from pdflow.errors import PdflowError
from pdflow_runtime.engines.weight_hash import hash_weights
from pdflow_runtime.nodes.content import digest_of
from pdflow_runtime.nodes.models import cache

log = logging.getLogger(__name__)

FileStamp: TypeAlias = tuple[str, int, int]
"""A file's name, its size and when it was written."""
_adapters: Final[dict[tuple[FileStamp, ...], str]] = {}
"""Digests of adapters by their files: as many as this process has been asked for."""
_loaded: Final[dict[tuple[str, int, str], tuple[FileStamp, ...]]] = {}
"""The files of each adapter, by its name, number and folder, as they were when vLLM was first asked for it."""


class UnnamedContentError(Exception):
    """The content of a request cannot be named. The text says why."""


def content_digest(request: Any, weights: int) -> int:
    """Return 64 bits over the content of a request's prompt and the weights. UnnamedContentError."""
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        raise UnnamedContentError("its prompt is given as embeddings")
    return digest_of(tokens, weights, _besides_tokens(request))


def _besides_tokens(request: Any) -> bytes:
    """Return what KV depends on besides tokens and weights; empty for most requests."""
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    salt = getattr(request, "cache_salt", None)
    if lora is None and not features and not salt:
        return b""
    adapter = None if lora is None else (lora.lora_name, _adapter(lora))
    inputs = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in features]
    return msgspec.json.encode([adapter, inputs, salt])


def _adapter(lora: Any) -> str:
    """Return a digest over all tensors of a LoRA adapter. UnnamedContentError if it has none that can be read, or if
    they were written anew behind vLLM's back, which may then compute with the old ones or the new ones."""
    folder = Path(lora.lora_path)
    try:
        files = sorted(folder.glob("*.safetensors"))
        key = tuple((str(file), status.st_size, status.st_mtime_ns) for file in files for status in (file.stat(),))
        if not key:
            raise UnnamedContentError(f"its adapter has no *.safetensors in {folder}")
        name = lora.lora_name, lora.lora_int_id, lora.lora_path
        if _loaded.get(name, key) != key and not lora.load_inplace:
            raise UnnamedContentError(
                f"the files of its adapter in {folder} changed after vLLM loaded it: load it again with load_inplace"
            )
        _loaded[name] = key
        if key not in _adapters:
            _adapters[key] = hash_weights(folder, cache() / "weights").digest.hex()
    except (OSError, PdflowError) as error:
        raise UnnamedContentError(f"cannot read its adapter: {error}") from None
    return _adapters[key]
