"""S12 in simulations: a node that does not carry out an effect of its core, in memory or by waking its engine, is
noticed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pdflow.errors import InvariantError
from pdflow.methods.catalogue import METHODS
from pdflow.version import compiled
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.prefill_node import SimPrefillNode
from pdflow_sim.nodes.store_node import SimStoreNode
from pdflow_sim.nodes.store_prefill_node import SimStorePrefillNode

FAULTS: Final = Path(__file__).resolve().parents[3] / "examples" / "faults"
CANCELLED: Final = FAULTS / "cancelled-anywhere.toml"
SMALL: Final[dict[str, Any]] = {
    "workload.requests": 150,
    "pool.prefill.kv_tokens": 20_000,
    "pool.decode.kv_tokens": 12_000,
}
"""Pools that hold a few prompts: those that wait for blocks are admitted when others are freed."""
ALIKE: Final[dict[str, Any]] = {
    "workload": "{ requests = 150, like = 'mooncake-conversation' }",
    "transfer.method": "kv-store",
    "transfer.store_granularity": "block",
    "pool.prefill.kv_tokens": 200_000,
    "pool.prefill.enable_prefix_caching": False,
    "pool.decode.kv_tokens": 200_000,
    "network.preset": "tcp-25g",
}
"""Prompts that begin alike: prefill engines load from the store what others have put there, and slowly."""


def nothing(*_: Any) -> None:
    """Carry out nothing."""


@pytest.mark.parametrize("method", METHODS)
def test_every_effect_is_carried_out(method: str, play: Callable[..., Any]) -> None:
    world = play({**SMALL, "transfer.method": method}, file=CANCELLED)
    assert world.clock.after_each is not None


def test_a_run_that_is_not_checked_has_no_checks(play: Callable[..., Any]) -> None:
    world = play({**SMALL}, file=CANCELLED, checked=False)
    assert world.clock.after_each is None
    assert all(node.on_turn is None for node in world.nodes.peers())


def test_restarted_engines_are_checked(play: Callable[..., Any]) -> None:
    first: list[Any] = []
    world = play({}, file=FAULTS / "prefill-crash.toml", prepared=lambda world: first.extend(world.nodes.engines()))
    assert world.nodes.named("prefill-0") not in first
    assert all(node.on_turn is not None for node in world.nodes.engines())


def _not_rearmed(self: SimEngineNode, port: Any, effect: Any) -> None:
    rearm, self.rearm = self.rearm, nothing  # type: ignore[method-assign]
    type(self).freed_before(self, port, effect)  # type: ignore[attr-defined]
    self.rearm = rearm  # type: ignore[method-assign]


WATCHED: Final = pytest.mark.skipif(compiled(), reason="a compiled node cannot be changed")


@WATCHED
@pytest.mark.parametrize(
    ("kind", "method"), [(SimPrefillNode, "nixl-push"), (SimDecodeNode, "nixl-push"), (SimStorePrefillNode, "kv-store")]
)
def test_a_node_that_does_not_wake_its_engine_is_noticed(
    kind: Any, method: str, play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After blocks were freed."""
    monkeypatch.setattr(kind, "freed_before", kind.free, raising=False)
    monkeypatch.setattr(kind, "free", _not_rearmed)
    with pytest.raises(InvariantError, match=r"S12: the engine of \S+ is due at \d+, but"):
        play({**SMALL, "transfer.method": method, "network.warm": "false"}, file=CANCELLED)


@WATCHED
@pytest.mark.parametrize(
    ("kind", "name", "overrides", "message"),
    [
        (SimDecodeNode, "quarantine", {}, "must be in quarantine, but are not"),
        (SimStorePrefillNode, "quarantine", ALIKE, "must be in quarantine, but are not"),
        (SimPrefillNode, "bump", {"transfer.method": "nixl-pull"}, "no prompt has lease word"),
        (SimStoreNode, "bump", {"transfer.method": "kv-store"}, "no prompt has lease word"),
        (SimStoreNode, "expose", {"transfer.method": "kv-store"}, "but readers do not find its lease word"),
    ],
)
def test_an_effect_that_is_ignored_is_noticed(
    kind: Any,
    name: str,
    overrides: dict[str, Any],
    message: str,
    play: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind, name, nothing)
    with pytest.raises(InvariantError, match=f"S12: at .*{message}"):
        play({**SMALL, **overrides}, file=CANCELLED)


@WATCHED
def test_a_prompt_whose_lease_word_is_not_exposed_is_noticed(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Any, port: Any, effect: Any) -> None:
        self.fabric.expose_word = nothing
        answered(self, port, effect)

    answered = SimPrefillNode.answer
    monkeypatch.setattr(SimPrefillNode, "answer", answer)
    with pytest.raises(InvariantError, match=r"S12: at .*but readers do not find its lease word"):
        play({**SMALL, "transfer.method": "nixl-pull"}, file=CANCELLED)


@WATCHED
def test_blocks_in_quarantine_that_the_protocol_does_not_know_of_are_noticed(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a driver put the blocks of every request there."""
    admit = SimDecodeNode.admit

    def admitted(self: Any, port: Any, effect: Any) -> None:
        admit(self, port, effect)
        self.engine.pool.quarantine(self.legs[effect.handle].allocation)

    monkeypatch.setattr(SimDecodeNode, "admit", admitted)
    with pytest.raises(InvariantError, match=r"S12: at .* waits for KV, but its blocks are in quarantine"):
        play({**SMALL}, file=CANCELLED)
