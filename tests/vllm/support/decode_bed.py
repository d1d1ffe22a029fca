"""A D whose loads end when a test says so, and what its connector's hooks were called with."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.vllm.support.real_engine import RealEngine
from tests.vllm.support.stub_connector import StubDecode, StubRank

PROMPT = list(range(40))
"""Three blocks, the last one of 8 tokens."""
REMOTE = {"do_remote_prefill": True, "source": "p"}
ASYNC = pytest.mark.parametrize("async_scheduling", [False, True], ids=("sync", "async"))
POLICY = pytest.mark.parametrize("recompute", [False, True], ids=("fail", "recompute"))


def rest(engine: RealEngine) -> None:
    for _ in range(60):
        engine.step()
    engine.assert_at_rest()


class RecordedDecode(StubDecode):
    """D's half, with the calls of its hooks. `delays`: whether the end of a request delays the free of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.delays = False
        self.pushes = False

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        result = super().get_num_new_matched_tokens(request, computed)
        self.calls.append(("lookup", request.request_id, computed, *result))
        return result

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        super().update_state_after_alloc(request, blocks, external)
        self.calls.append(("alloc", request.request_id, blocks.get_block_ids(), external))

    def update_connector_output(self, output: Any) -> None:
        self.calls.append(("output", sorted(output.finished_recving or ())))

    def request_finished(self, request: Any, *block_ids: list[int]) -> tuple[bool, Any]:
        super().request_finished(request, *block_ids)
        self.calls.append(("finished", request.request_id, request.status.name, *block_ids))
        return self.delays, None

    def has_pending_push_work(self) -> bool:
        return self.pushes

    def of(self, verb: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == verb]


class DecodeBed:
    """A D, the load of whose requests ends when the test says so. Its KV is as P would have written it."""

    def __init__(self, tp: int = 1, **setting: Any) -> None:
        self.side = RecordedDecode()
        self.ranks = [StubRank() for _ in range(tp)]
        self.engine = RealEngine(self.side, self.ranks, **setting)

    def loading(self, request_id: str = "r", max_tokens: int = 3, prompt: list[int] = PROMPT) -> Request:
        request = self.engine.add_request(request_id, prompt, max_tokens, dict(REMOTE))
        self.steps(1)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def write(self, request_id: str) -> None:
        """What P's WRITE does."""
        (load,) = [load for load in self.ranks[0].loads if load.request_id == request_id]
        prints = self.engine.core.fingerprints[request_id]
        for memory in self.engine.memories:
            for name, layer in memory.layers.items():
                blocks = load.blocks[int(name.split(".")[1])]
                for position, value in enumerate(prints.up_to(len(prints.prompt))):
                    layer[:, blocks[position // 16], position % 16] = value

    def report(self, request_id: str, failed: bool = False, ranks: int | None = None) -> None:
        if not failed:
            self.write(request_id)
        for rank in self.ranks[:ranks]:
            rank.results.finished_recving.add(request_id)
            if failed:
                rank.results.failed_recving.add(request_id)

    def rest(self) -> None:
        rest(self.engine)

    def unguarded(self) -> None:
        """vLLM's own assertions only."""
        self.engine.connector.update_connector_output = lambda output: None
