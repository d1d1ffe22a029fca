"""A P whose prompt is computed, and what its connector's hooks were called with."""

from __future__ import annotations

from typing import Any

from tests.vllm.support.real_engine import RealEngine
from tests.vllm.support.stub_connector import StubPrefill, StubRank


class RecordedPrefill(StubPrefill):
    def __init__(self) -> None:
        super().__init__(block_size=16)
        self.ends: list[tuple[str, tuple[list[int], ...]]] = []
        self.sent: set[str] = set()
        """Reported by the half in EngineCore, in the update that asks it."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        self.ends.append((request.status.name, block_ids))
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, output: Any) -> None:
        if self.sent:
            output.finished_sending = {*(output.finished_sending or ()), *self.sent}
            self.sent = set()


def prefilled(
    tokens: int = 1, prompt: int = 40, tp: int = 1, **setting: Any
) -> tuple[RealEngine, RecordedPrefill, list[StubRank]]:
    """A P whose prompt "p" is computed. Its output ends with the first token, whatever `tokens` are asked for."""
    side, ranks = RecordedPrefill(), [StubRank() for _ in range(tp)]
    engine = RealEngine(side, ranks, **setting)
    engine.add_request("p", range(prompt), tokens, {"do_remote_decode": True}, stops_at=1)
    while "p" not in engine.answers:
        engine.step()
    return engine, side, ranks
