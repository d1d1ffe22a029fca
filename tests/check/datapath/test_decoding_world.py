"""D's core alone, in every order: nothing is found, and what is found of a D with a rule missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.methods.method import PipelinePolicy
from pdflow.serving.decode import DecodeCore
from pdflow.serving.decode_requests import DecodeRequests
from pdflow.serving.landing import Landing
from pdflow.version import compiled
from pdflow_sim.check.datapath.decoding import ALONE, FOLLOWS, PLAIN, DecodingWorld
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.search.forward import Explored, explore

WAITS = PipelinePolicy(decode_waits=True)
WHOLE = PipelinePolicy(decode_waits=True, fails_whole_batches=True)


def found(policy: PipelinePolicy, *requests: int) -> Explored:
    return explore(DecodingWorld(policy, requests, updates=PLAIN in requests))


@pytest.mark.parametrize(
    ("policy", "states"), [(PipelinePolicy(), (402, 1580)), (WAITS, (402, 1588)), (WHOLE, (402, 1652))]
)
def test_nothing_is_found_in_any_order(policy: PipelinePolicy, states: tuple[int, int]) -> None:
    explored = found(policy, FOLLOWS, ALONE), found(policy, PLAIN, FOLLOWS)
    assert tuple(each.states for each in explored) == states
    assert not any(each.counterexamples for each in explored)


def _first_known_too_late(core: Any, event: Any) -> None:
    """Note P's first token, and leave a request waiting whose KV is there."""
    request = core.requests.by_handle.get(event.handle)
    if request is not None:
        request.first_follows = False


BUGS: dict[str, tuple[type, str, Callable[..., Any], Finding]] = {
    "prompts of D's own are not queued": (DecodeCore, "_alone", lambda *_: None, Finding.STUCK),
    "the first token is not passed on": (DecodeCore, "_first_known", _first_known_too_late, Finding.STUCK),
    "new weights are not noted": (DecodeCore, "set_weights", lambda *_: None, Finding.STALE),
    "a failed prefill is not reported": (DecodeCore, "_prefill_reported", lambda *_: None, Finding.ANSWER),
    "a rejected request waits": (Landing, "rejected", lambda *_: None, Finding.STUCK),
    "blocks that were left are kept": (Landing, "left", lambda *_: None, Finding.KEPT),
}


@pytest.mark.skipif(compiled(), reason="a compiled core's rules cannot be exchanged; the source's are")
@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_rule_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    owner, name, replacement, finding = BUGS[bug]
    monkeypatch.setattr(owner, name, replacement)
    assert finding in {**found(WAITS, FOLLOWS, ALONE).counterexamples, **found(WAITS, PLAIN, FOLLOWS).counterexamples}


@pytest.mark.skipif(compiled(), reason="a compiled core's rules cannot be exchanged; the source's are")
def test_an_engine_that_is_never_resumed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeRequests, "wait_no_more", lambda *_: None)
    assert {Finding.STUCK, Finding.KEPT} & found(WAITS, PLAIN, FOLLOWS).counterexamples.keys()
