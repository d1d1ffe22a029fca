"""When handshakes are completed: before the first request, when an engine restarts, or at first contact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pdflow.scenario.reading.load import load
from pdflow_sim.build import build

MS = 1_000_000
SMALL = Path(__file__).parents[1] / "small.toml"
SLOW_HANDSHAKES = {"network.handshake_s": 0.3, "workload.requests": 40}

Play: TypeAlias = Callable[..., Any]


def waits_ms(world: Any, since_ms: float = 0) -> list[float]:
    """TTFT of each request that arrives from then on."""
    records = world.records
    pairs = zip(records.arrival_ns, records.first_token_ns, strict=True)
    return [(first - at) / MS for at, first in pairs if at >= since_ms * MS]


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull", "p2p-nccl-put", "kv-store"])
def test_no_request_waits_for_a_handshake(method: str, play: Play) -> None:
    ways = {"transfer.method": method}
    warm, cold = play(SLOW_HANDSHAKES | ways), play(SLOW_HANDSHAKES | ways | {"network.warm": False})
    assert max(waits_ms(warm)) < 300
    assert max(waits_ms(cold)) > 300
    without = play(SLOW_HANDSHAKES | ways | {"network.handshake_s": 0})
    assert waits_ms(warm) == waits_ms(without)


def test_a_restarted_engine_begins_its_handshakes_at_once(play: Play) -> None:
    """D's first handshake, which shows it the new incarnation, ends 0.3 s after the restart. D then closes the old
    connection, and its second handshake begins: P's own is over by then."""
    steady = SLOW_HANDSHAKES | {
        "workload.arrival": '{ process = "constant", rate_rps = 10 }',
        "pool.p.replicas": 1,
        "pool.d.replicas": 1,
        "router.max_attempts": 3,
        "fault": '[{ kind = "crash", engine = "p-0", at_s = 1.0, restart_after_s = 0.55 }]',
    }
    records = play(steady).records
    waits = {
        at // MS: (first - at) / MS
        for at, first, outcome in zip(records.arrival_ns, records.first_token_ns, records.outcome, strict=True)
        if outcome == "completed"
    }
    before, late = waits[500], waits[1600]
    assert late == pytest.approx(1_550 + 2 * 300 - 1_600, abs=10)
    assert all(wait == pytest.approx(before, abs=1) for at, wait in waits.items() if at < 900 or at > 2_150)


def test_a_lost_connection_is_cold() -> None:
    fabric = build(load(SMALL, overrides=["network.handshake_s=0.3"])).fabric
    port = fabric.ports["d-0.r0"]
    assert [fabric.contact_ns(port, peer) // MS for peer in ("p-0.r0", "p-0.r0", "p-1.r0")] == [0, 300, 0]
