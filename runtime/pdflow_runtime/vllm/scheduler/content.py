"""The content of a request of vLLM's: everything, besides the weights, that the KV of its prompt is computed from.

Token ids, the LoRA adapter, the identity and position of multimodal inputs, and the cache salt, as in the keys of
vLLM's own prefix cache (vllm/v1/core/kv_cache_utils.py, `generate_block_hash_extra_keys`). A prompt that is given as
embeddings has no content that could be named, so it is computed where it is served.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow_runtime.nodes.content import digest_of


def content_digest(request: Any, weights: int) -> int | None:
    """Return 64 bits over the content of a request's prompt and the weights; None if it cannot be named."""
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    return digest_of(tokens, weights, _besides_tokens(request))


def _besides_tokens(request: Any) -> bytes:
    """Return what KV depends on besides tokens and weights; empty for most requests."""
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    salt = getattr(request, "cache_salt", None)
    if lora is None and not features and not salt:
        return b""
    inputs = [(each.identifier, each.mm_position.offset, each.mm_position.length) for each in features]
    return msgspec.json.encode([None if lora is None else lora.lora_name, inputs, salt])
