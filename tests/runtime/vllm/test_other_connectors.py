"""Beside another connector of a MultiConnector: what that reports of its loads is not ours to change.

MultiConnector hands one output with the reports of all to each of them in turn.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdflow_runtime.vllm.scheduler.guard import GuardedSide
from tests.runtime.vllm.support.fake_engine import Request
from tests.runtime.vllm.support.pair import Pair


def output(**reports: set[str]) -> Any:
    return SimpleNamespace(**{"finished_recving": set(), "failed_recving": set()} | reports)


def prefilled() -> Pair:
    pair = Pair()
    pair.submit_prefill()
    pair.step(2)
    return pair


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("engine", ["p", "d"])
def test_a_load_of_another_connector_that_fails_stays_reported(engine: str, broken: bool) -> None:
    pair = Pair()
    guarded = GuardedSide(pair.prefill_side if engine == "p" else pair.decode_side)
    if broken:
        guarded.break_off("for the test")
    reported = output(finished_recving={"other"}, failed_recving={"other"})
    guarded.update_output(reported, None)
    assert (reported.finished_recving, reported.failed_recving) == ({"other"}, {"other"})
    assert bool(guarded.broken) == broken


def test_a_decode_leg_that_another_connector_loads_is_not_ours() -> None:
    """MultiConnector names one connector for a load, and calls the others' hook without tokens to load."""
    pair = prefilled()
    request = Request("r", 40, 3, pair.p.answers["p-x"][1])
    guarded: Any = pair.d.connector
    guarded.on_new_request(request)
    while guarded.get_num_new_matched_tokens(request, 0)[0] is None:
        pair.step()
    guarded.update_state_after_alloc(request, [5, 6, 7], 0)
    assert guarded.take_failed() == ()
    reported = output(finished_recving={"r"}, failed_recving={"r"})
    guarded.update_output(reported, None)
    assert reported.finished_recving == {"r"}
    assert not guarded.broken
