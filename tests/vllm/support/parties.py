"""The requests of a duel, in the shapes that both worlds want them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from pdflow.protocol.ids import KvParams
from tests.vllm.support.vllm_engine import BLOCK

PROMPT_BLOCKS = 3
"""Of every prompt: where two share a base id, vLLM serves either, and raises if D wants more than P has (R34)."""


class Prompt:
    def __init__(self, index: int, name: str, step: int) -> None:
        self.xid = f"x{index}"
        self.name = name
        self.step = step
        self.state = "running"
        self.named = False
        """A D request's heartbeats name it."""
        first = 1 + PROMPT_BLOCKS * index
        self.blocks = tuple(range(first, first + PROMPT_BLOCKS))
        self.vllm = request(name, {"do_remote_decode": True}, PROMPT_BLOCKS * BLOCK)


class Decode:
    def __init__(self, index: int, name: str, params: KvParams, vllm: Any) -> None:
        first = 1 + PROMPT_BLOCKS * index
        self.name = name
        self.params = params
        self.state = "queued"
        self.blocks = tuple(range(first, first + PROMPT_BLOCKS))
        self.vllm = vllm


def request(name: str, params: dict[str, Any], tokens: int) -> Any:
    """As much of a Request as the connector reads."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        status=RequestStatus.RUNNING,
    )


class Blocks:
    """As much of KVCacheBlocks as the connector reads: fresh ones, of one group."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.blocks = ([SimpleNamespace(block_hash=None, is_null=False) for _ in ids],)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return (list(self.ids),)
