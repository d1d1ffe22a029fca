"""What the connector asks a request of vLLM's (`vllm.v1.request.Request`), by the names of its statuses."""

from __future__ import annotations

from typing import Any, Final

WELL: Final = frozenset(("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"))


def ended_well(request: Any) -> bool:
    """Whether all that was asked for has been generated."""
    return request.status.name in WELL


def was_aborted(request: Any) -> bool:
    """Whether the client has gone, or somebody has stopped the request."""
    return bool(request.status.name == "FINISHED_ABORTED")


def waits_for_load(request: Any) -> bool:
    """Whether the request has blocks, and its KV is being loaded into them."""
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")
