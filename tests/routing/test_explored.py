"""Every order of events of small scopes, with all rules: each leg is dispatched once, each client answered once, and as
long as one is not, somebody is at work for it. No attempt is begun behind a token that the client has, and none but the
attempt of that token completes the request. When all are answered, nothing is left, and who was to leave has left.

`pdflow check` explores the plain router with the engines' endpoints behind it (sim/pdflow_sim/check/routed/routed.py).
Here engines are only what they answer: well, badly, late although the leg was taken back, or never because they died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from pdflow.protocol.events import TimeReached
from pdflow.protocol.messages import Code
from pdflow.routing import hedging
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import AbortLeg, DispatchAlone, DispatchDecode, DispatchPrefill, EngineLeft, Reply
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.failure import after_failure
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.membership import Membership
from pdflow.version import compiled
from pdflow_sim.uncollected import uncollected

Make = Callable[..., Any]
LATER = 1 << 40


class Leg(NamedTuple):
    """What an engine may still answer."""

    effect: Any
    open: bool
    """Not taken back."""


class State(NamedTuple):
    router: Any
    legs: frozenset[Leg]
    dispatched: frozenset[tuple[str, str]]
    answered: tuple[int, ...]
    begun: frozenset[tuple[int, str]]
    """Requests whose client has a token, and of which attempt."""
    to_come: tuple[RequestArrived, ...]
    budget: tuple[int, ...]
    """Failures, clients that leave, engines that die, that leave; hedges are the router's own budget."""
    down: frozenset[str]

    def key(self) -> Any:
        return (self.router.fingerprint(), *self[1:])


def role(effect: Any) -> str:
    return "prefill" if isinstance(effect, DispatchPrefill) else "decode"


def engine(effect: Any) -> str:
    return f"{role(effect)[0]}-{effect.engine}"


def moves(state: State, answer: Make) -> Iterator[tuple[Any, State]]:
    """What may happen, with what it leaves of the world around the router."""
    failures, gone, deaths, leaves = state.budget
    if state.to_come:
        yield state.to_come[0], state._replace(to_come=state.to_come[1:])
    for leg in state.legs:
        rest = state._replace(legs=state.legs - {leg})
        request_id = leg.effect.request_id
        if role(leg.effect) == "prefill":
            yield answer(leg.effect), rest
        else:
            yield DecodeEnded(request_id), rest
            request = leg.effect.request
            hedged = request in state.router.deadlines.due or request in state.router.pairs
            if (hedged or failures or deaths) and request not in {begun for begun, _ in state.begun} | set(
                state.answered
            ):
                yield (
                    FirstTokenDelivered(request, request_id),
                    state._replace(begun=state.begun | {(request, request_id)}),
                )
        if failures:
            fewer = rest._replace(budget=(failures - 1, gone, deaths, leaves))
            bad = PrefillAnswered(request_id, None, Code.IO) if role(leg.effect) == "prefill" else None
            yield bad or DecodeEnded(request_id, Code.IO), fewer
    if state.router.deadlines.due:
        yield TimeReached(), state
    arrived = set(range(2)) - {each.request for each in state.to_come}
    for request in arrived - set(state.answered) if gone else ():
        yield ClientGone(request), state._replace(budget=(failures, gone - 1, deaths, leaves))
    for name in ("p-0", "d-0"):
        if name in state.down:
            yield EngineChanged(name, True), state._replace(down=state.down - {name})
        elif deaths:
            left = frozenset(leg for leg in state.legs if engine(leg.effect) != name)
            dead = state._replace(legs=left, down=state.down | {name}, budget=(failures, gone, deaths - 1, leaves))
            yield EngineLost(name), dead
        if leaves:
            yield EngineLeaves(name), state._replace(budget=(failures, gone, deaths, leaves - 1))
        elif state.router.membership.is_out(name):
            yield EngineJoins(name), state


def after(state: State, event: Any, around: State) -> State:
    router = state.router.fork()
    legs, dispatched, answered = set(around.legs), set(around.dispatched), list(around.answered)
    begun = dict(around.begun)
    for effect in router.handle(event, LATER if isinstance(event, TimeReached) else 0):
        if isinstance(effect, (DispatchPrefill, DispatchDecode, DispatchAlone)):
            name = (role(effect), effect.request_id)
            assert name not in dispatched, f"{name} is dispatched a second time"
            assert effect.request not in answered, f"{name} is dispatched, and its client has been answered"
            assert effect.request not in begun, f"{name} is dispatched, and its client has the start of an answer"
            dispatched.add(name)
            legs.add(Leg(effect, True))
        elif isinstance(effect, AbortLeg):
            mine = {
                leg for leg in legs if (role(leg.effect), leg.effect.request_id) == (effect.role, effect.request_id)
            }
            legs = legs - mine | {leg._replace(open=False) for leg in mine}
        elif isinstance(effect, Reply):
            assert effect.request not in answered, f"{effect.request} is answered twice"
            if effect.outcome == "completed" and effect.request in begun:
                assert event.request_id == begun[effect.request], f"{effect.request} is answered by another attempt"
            answered.append(effect.request)
        else:
            assert isinstance(effect, EngineLeft)
    found = around._replace(
        router=router, legs=frozenset(legs), dispatched=frozenset(dispatched), answered=tuple(sorted(answered))
    )
    at_work = {leg.effect.request for leg in found.legs if leg.open}
    waiting = set(range(2)) - set(found.answered) - {each.request for each in found.to_come}
    assert waiting == at_work, f"{waiting} wait, and {at_work} are at work"
    if found.answered == (0, 1):
        assert not router.attempts
        assert not any(router.prefill_choice.loads + router.decode_choice.loads + router.membership.users)
        assert not any((router.membership.leaving, router.pairs, router.last, router.deadlines.due))
    return found


def explored(router: Any, answer: Make, budget: tuple[int, ...]) -> int:
    """How many states there are. An assertion fails in the first that is wrong."""
    asked = (RequestArrived(0, prompt_tokens=10), RequestArrived(1, prompt_tokens=90))
    first = State(router, frozenset(), frozenset(), (), frozenset(), asked, budget, frozenset())
    seen, todo = {first.key()}, [first]
    with uncollected():
        while todo:
            state = todo.pop()
            for event, around in moves(state, answer):
                found = after(state, event, around)
                key = found.key()
                if key not in seen:
                    seen.add(key)
                    todo.append(found)
    return len(seen)


ALONE = Disaggregation(((10,), (10,)))


@pytest.mark.parametrize(
    ("rules", "dispatch", "budget", "states"),
    [
        ({}, "concurrent", (1, 0, 0, 0), 21289),
        ({"max_attempts": 2}, "sequential", (1, 0, 0, 0), 28413),
        ({"disaggregation": ALONE}, "sequential", (1, 1, 0, 1), 28423),
        pytest.param({}, "sequential", (0, 1, 0, 1), 76911, marks=pytest.mark.slow),
        pytest.param(
            {"max_attempts": 2, "recomputes": True}, "sequential", (1, 0, 1, 0), 134283, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"disaggregation": ALONE, "max_attempts": 2, "recomputes": True},
            "sequential",
            (1, 0, 1, 1),
            150855,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_all_orders(
    governed: Make, answer: Make, rules: dict[str, Any], dispatch: str, budget: tuple[int, ...], states: int
) -> None:
    it = governed(policy="least-loaded", dispatch=dispatch, hedge_after_ns=1000, **rules)
    assert explored(it, answer, budget) == states


def answers_for_each(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HedgingRouter, "_over", GovernedRouter._over)


def forgets_the_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hedging, "after_failure", lambda code, started, *counts: after_failure(code, False, *counts))


def ignores_late_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HedgingRouter, "_late_first_token", lambda self, request: ())


def never_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "gone", lambda self, prefill, decode, legs: iter(()))


def keeps_the_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HedgingRouter, "_next_number", lambda self, attempt: attempt.number + 1)


@pytest.mark.skipif(compiled(), reason="a compiled router's rules cannot be exchanged; the source's are")
@pytest.mark.parametrize(
    ("bug", "message", "budget"),
    [
        (answers_for_each, "are at work", (0, 0, 0, 0)),
        (never_leaves, "d-0|p-0", (0, 0, 0, 1)),
        (forgets_the_token, "has the start of an answer", (1, 0, 0, 0)),
        (ignores_late_tokens, "by another attempt|has the start of an answer", (1, 0, 0, 0)),
        (keeps_the_number, "is dispatched a second time", (2, 0, 0, 0)),
    ],
)
def test_what_breaks_it_is_found(
    governed: Make,
    answer: Make,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[..., None],
    message: str,
    budget: tuple[int, ...],
) -> None:
    bug(monkeypatch)
    it = governed(policy="least-loaded", dispatch="concurrent", hedge_after_ns=1000, max_attempts=2)
    with pytest.raises((AssertionError, KeyError), match=message):
        explored(it, answer, budget)
