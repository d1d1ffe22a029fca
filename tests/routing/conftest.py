"""Routers of a few engines, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.routing.events import PrefillAnswered
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice
from pdflow.routing.watching import WatchingRouter


def _engines(name: str, count: int) -> tuple[EngineInfo, ...]:
    return tuple(EngineInfo(f"{name}-{i}", Shards(1, 1, 16)) for i in range(count))


def _governed(p: int = 2, d: int = 2, policy: Any = "round-robin", dispatch: Any = "concurrent", **options: Any) -> Any:
    """With `hedge_after_ns` one that hedges; whatever is none of a router's own options is a rule."""
    rules = Rules(**{key: options.pop(key) for key in list(options) if key in Rules.__struct_fields__})
    kind = HedgingRouter if "hedge_after_ns" in options else WatchingRouter if rules.stall else GovernedRouter
    choices = Choice(policy, p), Choice(policy, d)
    return kind(_engines("p", p), _engines("d", d), dispatch, choices, rules, **options)


@pytest.fixture(scope="session")
def governed() -> Callable[..., Any]:
    return _governed


@pytest.fixture(scope="session")
def answer() -> Callable[[Any], PrefillAnswered]:
    """What a prefill leg that went well is answered with."""

    def well(leg: Any) -> PrefillAnswered:
        params = KvParams(EngineInfo(f"p-{leg.engine}", Shards(1, 1, 16)), leg.xid, leg.request_id, 5)
        return PrefillAnswered(leg.request_id, params)

    return well
