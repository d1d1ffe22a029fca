"""Every interleaving of small scopes: S1 to S3, S6 and S7 in every state, and from every state a way to rest.

The counts are asserted, so that a change of the space is noticed; they depend on no hash seed. Goals guard against
vacuity: a scope in which nothing is ever delivered proves nothing.
"""

from __future__ import annotations

import pytest

from pdflow.protocol import producer_rules
from pdflow.protocol.consumer import QUARANTINED, WAITING, CancelDue, RequestDoomed
from pdflow.protocol.consumer_rules import RULES as CONSUMER_RULES
from pdflow.protocol.consumer_rules import aborted_unadmitted, freed
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import NOTHING, Outcome, Resolve
from pdflow.protocol.events import WriteEnded
from pdflow.protocol.lease import expired_unclaimed
from pdflow.protocol.producer import IN_FLIGHT, CancelReceived, LeaseEnded, cancelled, sent
from pdflow.protocol.tombstones import Tombstones
from pdflow.version import compiled
from tests.protocol.support.space import Broken, Scope, Space

EVERY_END = ("delivered", "expired", "cancelled before", "cancelled in flight", "released after use")

CI = {
    "strict push, drop and duplicate": (
        Scope(drop=1, dup=1),
        24923,
        91714,
        (*EVERY_END, "late REG refused", "resolved DEADLINE", "resolved STALLED"),
    ),
    "strict push, drop, SYNC and repeated CANCEL": (Scope(drop=1, sync=1, cancel=1), 54834, 195723, EVERY_END),
    "strict push, errors and broken connections": (
        Scope(drop=1, err=1, lose=1),
        12414,
        41633,
        (*EVERY_END, "resolved IO"),
    ),
    "strict push, unreachable peers and aborted prefills": (
        Scope(unreachable=1, prefill_abort=1, sync=1),
        10284,
        30001,
        (*EVERY_END, "resolved UNREACHABLE", "resolved PREFILL_ABORTED"),
    ),
    "strict push, TP 1 to 2": (Scope(d_tp=2, deadline=0, stall=0), 39465, 180446, EVERY_END),
    "strict push, TP 2 to 1, no abort": (
        Scope(p_tp=2, deadline=0, stall=0, abort=0),
        19382,
        80644,
        ("delivered", "expired"),
    ),
    "strict push, two requests": (Scope(requests=2, deadline=0, stall=0, abort=0), 25750, 90838, ("delivered",)),
    "strict push, two attempts at one prompt": (
        Scope(requests=2, deadline=0, stall=0, same_product=True, concurrent=False),
        15395,
        48871,
        EVERY_END,
    ),
    "strict push, P starts again": (
        Scope(restart=1, drop=1, sync=1, stall=0),
        30018,
        107807,
        (*EVERY_END, "resolved PEER_RESTARTED", "resolved NO_REQUEST"),
    ),
    "strict push, lagging ranks": (Scope(lagging=True, deadline=0, stall=0), 4054, 13559, EVERY_END),
    "strict pull": (
        Scope(pulls=True, drop=1, dup=1, err=1, lose=1, sync=1),
        16679,
        51754,
        ("delivered", "expired", "resolved STALE", "resolved IO"),
    ),
    "strict pull, two requests": (
        Scope(pulls=True, requests=2, deadline=0),
        6963,
        18070,
        ("delivered", "expired", "resolved STALE"),
    ),
    "strict pull, P starts again": (
        Scope(restart=1, pulls=True, sync=1),
        1123,
        2255,
        ("delivered", "resolved STALE", "resolved PEER_RESTARTED"),
    ),
    "vllm-compat push, P starts again": (
        Scope(restart=1, dialect=VLLM_COMPAT, p_tp=2),
        2163,
        7614,
        ("delivered", "resolved PEER_RESTARTED"),
    ),
    "vllm-compat push": (
        Scope(dialect=VLLM_COMPAT, drop=1, dup=1, err=1),
        557,
        1361,
        ("delivered", "expired", "released after use", "resolved DEADLINE"),
    ),
    "vllm-compat push, TP 1 to 2": (Scope(dialect=VLLM_COMPAT, d_tp=2, dup=1), 4590, 15435, ("delivered", "expired")),
    "vllm-compat push, TP 2 to 1": (
        Scope(dialect=VLLM_COMPAT, p_tp=2, drop=1, err=1),
        3449,
        11370,
        ("delivered", "expired"),
    ),
    "vllm-compat push, a retry with the same base id": (
        Scope(dialect=VLLM_COMPAT, requests=2, same_product=True, dup=1, err=1),
        13240,
        47449,
        ("delivered", "expired"),
    ),
    "vllm-compat pull": (
        Scope(dialect=VLLM_COMPAT, pulls=True, drop=1, dup=1, err=1, sync=1),
        1002,
        2065,
        ("delivered", "expired", "resolved IO"),
    ),
}

NIGHTLY = {
    "strict push, all repairs": Scope(drop=1, dup=1, sync=1, cancel=1),
    "strict push, two drops and an error": Scope(drop=2, err=1, sync=1, cancel=1),
    "strict push, broken connections and SYNC": Scope(dup=1, lose=1, sync=1),
    "strict push, TP 2 to 1": Scope(p_tp=2, drop=1, deadline=0, stall=0),
    "strict push, TP 1 to 2, duplicates": Scope(d_tp=2, dup=1, deadline=0, stall=0),
    "strict push, two requests": Scope(requests=2, deadline=0, stall=0, dup=1, concurrent=False),
    "strict push, two attempts, an error": Scope(requests=2, same_product=True, err=1, dup=1, deadline=0, stall=0),
    "strict push, P starts again among lagging ranks": Scope(restart=1, lagging=True, sync=1, deadline=0, stall=0),
    "strict push, P starts again twice, two requests": Scope(restart=2, requests=2, deadline=0, stall=0, abort=0),
    "strict push, lagging ranks, TP 1 to 2": Scope(lagging=True, d_tp=2, deadline=0, stall=0, abort=0),
    "strict push, lagging ranks, broken connections": Scope(lagging=True, lose=1, sync=1, deadline=0, stall=0),
    "vllm-compat push, lagging ranks": Scope(dialect=VLLM_COMPAT, lagging=True, p_tp=2, drop=1, err=1),
    "vllm-compat push, two requests": Scope(dialect=VLLM_COMPAT, requests=2, drop=1, dup=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CI)
def test_nothing_breaks_in_any_interleaving(name: str) -> None:
    scope, states, transitions, goals = CI[name]
    space = Space(scope)
    assert space.explore() == (states, transitions)
    assert {goal: space.seen.get(goal, 0) for goal in goals if not space.seen.get(goal)} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_nothing_breaks_in_larger_scopes(name: str) -> None:
    space = Space(NIGHTLY[name])
    space.explore(limit=3_000_000)
    assert space.seen["delivered"]


# Planted bugs: an explorer that finds none of these would be worth nothing.


def lease_frees_under_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)


def no_tombstone(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled():
        pytest.skip("a compiled method cannot be replaced")
    monkeypatch.setattr(Tombstones, "bury", lambda self, item: None)


def deadline_frees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def doomed(cell, event, now, ctx):  # type: ignore[no-untyped-def]
        after, effects = freed(cell, ctx)
        return after, (Resolve(cell.request_id, Outcome.FAILED, event.code), *effects)

    monkeypatch.setitem(CONSUMER_RULES, (WAITING, RequestDoomed), doomed)


def cancel_in_flight_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, CancelReceived), cancelled)


def failed_write_counts_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, WriteEnded), lambda cell, event, now, ctx: sent(cell, ctx))


def resolved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        CONSUMER_RULES,
        (WAITING, RequestDoomed),
        lambda cell, event, now, ctx: (cell, aborted_unadmitted(cell, event, now, ctx)[1][:1]),
    )


def cancel_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSUMER_RULES, (QUARANTINED, CancelDue), lambda cell, event, now, ctx: (cell, NOTHING))


@pytest.mark.parametrize(
    ("plant", "scope", "broken"),
    [
        (lease_frees_under_a_write, Scope(), "S2"),
        (no_tombstone, Scope(dup=1), "S1"),
        (deadline_frees_at_once, Scope(), "S1"),
        (cancel_in_flight_is_answered_at_once, Scope(), "S2"),
        (failed_write_counts_as_sent, Scope(err=1), "S2"),
        (resolved_twice, Scope(deadline=2), "S6"),
        (cancel_is_not_repeated, Scope(drop=2, deadline=0, stall=0), "liveness"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_bugs_are_found(monkeypatch, plant, scope, broken) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken) as found:
        Space(scope).explore(limit=60_000)
    assert found.value.name == broken
    assert found.value.__notes__
