"""P with a store, in every order: nothing is found, and what is found of a P with a rule missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.methods.kv_store import KV_STORE
from pdflow.methods.method import AS_PUBLISHED
from pdflow.serving.prefill_requests import PrefillRequests
from pdflow.serving.storing import Storing
from pdflow.version import compiled
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.rows import STRICT
from pdflow_sim.check.datapath.storing import StoringWorld
from pdflow_sim.check.search.forward import Explored, explore


def found(dialect: str = STRICT) -> Explored:
    return explore(StoringWorld(KV_STORE.pipeline_policy(dialect)))


@pytest.mark.parametrize(("dialect", "states"), [(STRICT, 1817), (AS_PUBLISHED, 1457)])
def test_nothing_is_found_in_any_order(dialect: str, states: int) -> None:
    explored = found(dialect)
    assert (explored.states, explored.counterexamples) == (states, {})


def _admitted_while_dropping(storing: Any, event: Any) -> None:
    request = storing.requests.by_handle.get(event.handle)
    dropping, request.dropping = request.dropping, False
    _admitted(storing, event)
    request.dropping = dropping


def _answered_in_vain(storing: Any, event: Any) -> None:
    if event.handle in storing.asking:
        _store_answered(storing, event)


_admitted, _store_answered = Storing.admitted, Storing.store_answered
BUGS: dict[str, tuple[str, Callable[..., Any], Finding]] = {
    "a late admission is reported": ("admitted", _admitted_while_dropping, Finding.CRASH),
    "what is found in vain stays at the store": ("store_answered", _answered_in_vain, Finding.KEPT),
    "a refused put waits for its lease": ("_over", Storing.settle, Finding.KEPT),
    "a put prompt is over at once": ("is_over", lambda *_: True, Finding.ANSWER),
    "a prompt that just fits is refused": ("refusal", lambda _, tokens: "long" if tokens > 99 else "", Finding.ANSWER),
}  # fmt: skip


@pytest.mark.skipif(compiled(), reason="a compiled core's rules cannot be exchanged; the source's are")
@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_rule_is_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    name, replacement, finding = BUGS[bug]
    monkeypatch.setattr(Storing, name, replacement)
    assert finding in found().counterexamples


@pytest.mark.skipif(compiled(), reason="a compiled core's rules cannot be exchanged; the source's are")
def test_an_engine_that_is_never_resumed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillRequests, "wait_no_more", lambda *_: None)
    assert {Finding.STUCK, Finding.KEPT} & found(AS_PUBLISHED).counterexamples.keys()
