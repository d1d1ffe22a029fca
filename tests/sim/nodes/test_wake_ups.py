"""A node owes its engine a wake-up: whatever a turn has done to the engine, its timer is at the next boundary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.version import compiled
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.prefill_node import SimPrefillNode
from pdflow_sim.nodes.store_prefill_node import SimStorePrefillNode

pytestmark = pytest.mark.skipif(compiled(), reason="what is compiled cannot be watched")

FAULTS = Path(__file__).resolve().parents[3] / "examples" / "faults"
SMALL: dict[str, Any] = {"workload.requests": 150, "pool.prefill.kv_tokens": 20_000, "pool.decode.kv_tokens": 12_000}
"""Pools that hold a few prompts: who waits for blocks is woken by those that come free."""


class AsleepError(AssertionError):
    """An engine is due, and nothing will wake it."""


def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after each turn of each engine's node. A turn within a wake-up ends with one."""
    feed, wake = SimEngineNode.feed, SimEngineNode.wake
    waking: set[int] = set()

    def fed(self: SimEngineNode, port: Any, event: Any) -> None:
        feed(self, port, event)
        if not self.core.busy and id(self) not in waking:
            look(self)

    def woken(self: SimEngineNode, timer: int) -> None:
        waking.add(id(self))
        wake(self, timer)
        waking.discard(id(self))
        look(self)

    monkeypatch.setattr(SimEngineNode, "feed", fed)
    monkeypatch.setattr(SimEngineNode, "wake", woken)


def look(node: SimEngineNode) -> None:
    at, now = node.engine.wake_ns, node.clock.now
    if at is None or node.held or not node.alive or node.paused_until > now:
        return
    if node.timer not in (at, ~now if at <= now else at):
        raise AsleepError(f"{node.name} is due at {at}, and its timer is at {node.timer}")


@pytest.mark.parametrize("method", METHODS)
def test_whoever_is_due_is_woken(method: str, play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    play({**SMALL, "transfer.method": method}, file=FAULTS / "cancelled-anywhere.toml", checked=False)


def _not_rearmed(self: SimEngineNode, port: Any, effect: Any) -> None:
    rearm, self.rearm = self.rearm, lambda: None  # type: ignore[method-assign]
    type(self).freed_before(self, port, effect)  # type: ignore[attr-defined]
    self.rearm = rearm  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "method"), [(SimPrefillNode, "nixl-push"), (SimDecodeNode, "nixl-push"), (SimStorePrefillNode, "kv-store")]
)
def test_a_node_that_forgets_to_is_found_out(
    kind: Any, method: str, play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After blocks were freed."""
    watched(monkeypatch)
    monkeypatch.setattr(kind, "freed_before", kind.free, raising=False)
    monkeypatch.setattr(kind, "free", _not_rearmed)
    with pytest.raises(AsleepError):
        play({**SMALL, "transfer.method": method}, file=FAULTS / "cancelled-anywhere.toml", checked=False)
