"""A connector that does what vLLM expects and nothing else, for tests of the bed itself.

P's half keeps the blocks of a prompt until every rank has reported it as sent. D's half loads what the request's params
name, without checking that it is of the request's prompt.
"""

from __future__ import annotations

from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.v1.request import RequestStatus


@attrs.frozen
class StubLoad:
    """Args: `source`: P's request. `blocks`: all of D's, by group."""

    request_id: str
    source: str
    blocks: tuple[tuple[int, ...], ...]


class StubMetadata(KVConnectorMetadata):
    def __init__(self, loads: list[StubLoad]) -> None:
        self.loads = loads


class StubPrefill:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.products: dict[str, tuple[list[int], ...]] = {}
        """Blocks by group, of prompts that D may load."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        params = request.kv_transfer_params or {}
        computed = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or request.status not in computed:
            return False, None
        count = -(-request.num_prompt_tokens // self.block_size)
        self.products[request.request_id] = tuple(blocks[:count] for blocks in block_ids)
        return True, {"do_remote_prefill": True, "source": request.request_id}


class StubDecode:
    def __init__(self) -> None:
        self.loaded: set[str] = set()
        """A second load of these is not begun."""
        self.beginning: list[StubLoad] = []
        self.hesitates: set[str] = set()
        """For these a lookup has no answer yet."""
        self.failed: set[str] = set()
        """For these the next lookup has no answer, so that vLLM moves them out of the queue of those that hold blocks:
        there they would keep loaded ones behind them waiting (`test_real_loads.py`)."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            return None, False
        if not params.get("do_remote_prefill") or request.request_id in self.loaded:
            return 0, False
        if request.request_id in self.hesitates:
            return None, False
        return request.num_prompt_tokens - computed, True

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if external:
            self.loaded.add(request.request_id)
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            self.beginning.append(StubLoad(request.request_id, request.kv_transfer_params["source"], ids))

    def build_connector_meta(self, output: Any) -> StubMetadata:
        loads, self.beginning = self.beginning, []
        return StubMetadata(loads)

    def update_connector_output(self, output: Any) -> None:
        self.failed |= output.failed_recving & self.loaded

    def request_finished(self, request: Any, *block_ids: list[int]) -> tuple[bool, Any]:
        self.failed.discard(request.request_id)
        self.loaded.discard(request.request_id)
        self.hesitates.discard(request.request_id)
        return False, None


class StubRank:
    """A worker's half, of either engine. A test or StubPair fills `sent`, `received` and `failed`."""

    def __init__(self) -> None:
        self.loads: list[StubLoad] = []
        """Begun, and not ended here."""
        self.metadata: Any = None
        self.results = KVConnectorTransferResults()

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.metadata = metadata

    def clear_connector_metadata(self) -> None:
        self.metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.loads += getattr(self.metadata, "loads", ())

    def get_transfer_results(self, finished_request_ids: set[str]) -> KVConnectorTransferResults:
        results, self.results = self.results, KVConnectorTransferResults()
        return results
