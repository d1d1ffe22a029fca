"""Clients that do not wait for ever: one request whose times are known, and when its client gives up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import InvariantError
from pdflow.results.figures.metrics import measure
from pdflow.scenario.schema.scenario import Slo
from pdflow_sim.clients.client_timeouts import CANCELLED, NO_FIRST_TOKEN, TIMED_OUT
from tests.sim.faults.test_faults import ONE, tokens_ms

HERE = Path(__file__).parents[1]
ALONE = HERE / "alone.toml"
Play = Callable[..., Any]

TOKENS = ONE | {"network.http_latency_s": 0.001, "router.dispatch": "sequential"}
"""Tokens at D at 28, 33 and 38 ms: after three hops, a prefill and a step. The client has them at 29, 34 and 39."""


def ended(play: Play, client: str, **overrides: Any) -> tuple[str, str | None]:
    world = play(TOKENS | {"workload.client": f"{{ {client} }}"} | overrides)
    return world.records.outcome[0], world.records.reason[0]


def test_nobody_waits_longer_than_the_timeout(play: Play) -> None:
    """What comes at its very end has come in time."""
    assert tokens_ms(play(TOKENS)) == (29, 39)
    assert ended(play, "timeout_s = 0.039") == ("completed", None)
    assert ended(play, "timeout_s = 0.038999") == ("cancelled", TIMED_OUT)


def test_nobody_waits_longer_for_a_first_token(play: Play) -> None:
    assert ended(play, "first_token_timeout_s = 0.029") == ("completed", None)
    assert ended(play, "first_token_timeout_s = 0.028999") == ("cancelled", NO_FIRST_TOKEN)
    assert ended(play, "first_token_timeout_s = 0.0005") == ("cancelled", NO_FIRST_TOKEN)
    # It is there, but the answer's end on its way: the engine knows nothing of the request any more.
    assert ended(play, "first_token_timeout_s = 0.0385") == ("completed", None)
    # P's token is a client's from 22 ms on.
    early = {"router.first_token": "prefill"}
    assert ended(play, "first_token_timeout_s = 0.022", **early) == ("completed", None)
    assert ended(play, "first_token_timeout_s = 0.021999", **early) == ("cancelled", NO_FIRST_TOKEN)


def test_an_engine_that_does_both_is_asked_too(play: Play) -> None:
    overrides = {
        "workload.requests": 1,
        "workload.arrival": '{ process = "constant", rate_rps = 1 }',
        "workload.output_tokens": 3,
    }
    outcomes = []
    for timeout_s in (0.099999, 0.1):
        client = {"workload.client.first_token_timeout_s": timeout_s}
        outcomes.append(play(overrides | client, file=ALONE).records.outcome[0])
    assert outcomes == ["cancelled", "completed"]


def test_some_go_away_by_themselves(play: Play) -> None:
    assert ended(play, "cancel_probability = 1, cancel_after_s = 0.039") == ("completed", None)
    assert ended(play, "cancel_probability = 1, cancel_after_s = 0.01") == ("cancelled", CANCELLED)
    assert ended(play, "cancel_probability = 1, cancel_after_s = 0") == ("cancelled", CANCELLED)
    assert ended(play, "cancel_probability = 1, cancel_after_s = 0.02, timeout_s = 0.01")[1] == TIMED_OUT


LEAVING = {
    "workload.requests": 300,
    "workload.client": "{ timeout_s = 0.09, first_token_timeout_s = 0.06, cancel_probability = 0.4,"
    ' cancel_after_s = { dist = "uniform", low_s = 0.0, high_s = 0.08 } }',
    "network.preset": "rdma-400g",
    "network.warm": False,
}


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize(
    ("dialect", "method"),
    [
        ("strict", "nixl-push"),
        ("strict", "nixl-pull"),
        ("vllm-compat", "nixl-push"),
        ("vllm-compat", "nixl-pull"),
        ("vllm-stock", "nixl-pull"),
    ],
)
def test_whoever_leaves_the_oracle_is_content(
    play: Play, lines: Callable[[Any], bytes], method: str, dialect: str, dispatch: str
) -> None:
    overrides = LEAVING | {"transfer.method": method, "transfer.dialect": dialect, "router.dispatch": dispatch}
    world = play(overrides)
    assert set(world.records.reason) == {None, CANCELLED, NO_FIRST_TOKEN, TIMED_OUT}
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_vllms_own_push_keeps_blocks_of_clients_who_have_left(play: Play) -> None:
    """Nothing ends a registration whose request has gone away: D's blocks are bound for ever."""
    with pytest.raises(InvariantError, match="resolved, but its blocks are held"):
        play(LEAVING | {"transfer.dialect": "vllm-stock"})


def test_who_gives_up_meets_no_slo(play: Play) -> None:
    client = {"workload.client.cancel_probability": 0.5, "workload.client.cancel_after_s": 0.001}
    world = play(client)
    metrics = measure(world.records, [], world.totals.duration_ns, Slo(e2e_ms=1e6))
    gone = metrics.outcomes["cancelled"]
    assert 0 < gone < 40
    assert metrics.reasons["cancelled"] == {CANCELLED: gone}
    assert metrics.slo is not None
    assert metrics.slo.good == 40 - gone
    assert metrics.slo.attainment == (40 - gone) / 40


def test_who_waits_for_ever_costs_nothing(play: Play) -> None:
    world = play(TOKENS)
    assert world.client_timeouts is None
    assert world.sessions is None
