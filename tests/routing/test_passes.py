"""Requests that hang at an engine which serves others: when they are taken back, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.routing.effects import (
    AbortLeg,
    AskEngine,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    RequestHangs,
    RouterEffect,
)
from pdflow.routing.events import (
    DecodeEnded,
    EngineChanged,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.stalls import FACTOR, PASSED, StallRule

Make = Callable[..., Any]
RULE = StallRule(check_ns=1, least=9, passed=2)
LEARNS = StallRule(check_ns=1_000_000_000, learns=True)
LATER = range(100, 10_000)


class Routed:
    """A router between engines that answer at once, but for the request that hangs."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self.numbers = iter(LATER)

    def arrive(self, request: int, **fields: Any) -> tuple[RouterEffect, ...]:
        effects: tuple[RouterEffect, ...] = self.router.handle(RequestArrived(request, **fields), 0)
        return effects

    def prefilled(self, request_id: str, engine: int) -> tuple[RouterEffect, ...]:
        params = KvParams(EngineInfo(f"p-{engine}", Shards(1, 1, 16)), "x" + request_id[1:], request_id, 5)
        effects: tuple[RouterEffect, ...] = self.router.handle(PrefillAnswered(request_id, params), 0)
        return effects

    def delivered(self, request: int) -> None:
        self.router.handle(FirstTokenDelivered(request, f"r{request}.1"), 0)

    def serve(self, p: int | None = None, d: int | None = None) -> None:
        """Serve later requests without a fault, until one had these engines."""
        while True:
            number = next(self.numbers)
            (leg,) = self.arrive(number, prompt_tokens=10)
            assert isinstance(leg, DispatchPrefill)
            (decode,) = self.prefilled(leg.request_id, leg.engine)
            assert isinstance(decode, DispatchDecode)
            self.delivered(number)
            self.router.handle(DecodeEnded(leg.request_id), 0)
            if p in (None, leg.engine) and d in (None, decode.engine):
                return

    def check(self, *active: str, quiet: tuple[str, ...] = ()) -> list[RouterEffect]:
        effects = self.router.handle(EnginesChecked(active, quiet=quiet), 0)
        return [effect for effect in effects if not isinstance(effect, AskEngine)]


def routed(governed: Make, **options: Any) -> Routed:
    return Routed(governed(**{"dispatch": "sequential", "max_attempts": 2, "stall": RULE, **options}))


def test_a_prompt_that_later_ones_overtake_goes_to_another_engine(governed: Make) -> None:
    routes = routed(governed)
    (leg,) = routes.arrive(0, prompt_tokens=10)
    assert leg == DispatchPrefill(0, 0, "r0.1", "x0.1", True)
    for _ in range(RULE.passed):
        routes.serve(p=0)
        assert not routes.check("p-0", "p-1")
    assert not routes.check("p-0", "p-1"), "it has ended no later one since"
    routes.serve(p=0)
    hangs, abort, again = routes.check("p-0", "p-1")
    assert (hangs, abort) == (RequestHangs("p-0", "r0.1"), AbortLeg("prefill", 0, "r0.1"))
    assert isinstance(again, DispatchPrefill)
    assert again.engine == 1
    assert not routes.router.stalled
    assert routes.router.prefill_choice.up == [True, True]


def test_what_another_engine_ends_passes_nothing_over(governed: Make) -> None:
    routes = routed(governed, policy="least-loaded")
    routes.arrive(0, prompt_tokens=10)
    for _ in range(5 * RULE.passed):
        routes.serve(p=1)
        assert not routes.check("p-0", "p-1")


def test_what_began_before_passes_nothing_over(governed: Make) -> None:
    routes = routed(governed)
    for request in range(6):
        routes.arrive(request, prompt_tokens=10)
    for request in (0, 2, 4):
        assert not routes.check("p-0", "p-1")
        routes.prefilled(f"r{request}.1", 0)
    assert not routes.check("p-0", "p-1")


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_first_token_that_later_ones_overtake_is_asked_of_another_engine(governed: Make, recomputes: bool) -> None:
    routes = routed(governed, recomputes=recomputes, policy="round-robin", d=2)
    (leg,) = routes.arrive(0, prompt_tokens=10)
    assert isinstance(leg, DispatchPrefill)
    (decode,) = routes.prefilled("r0.1", leg.engine)
    assert isinstance(decode, DispatchDecode)
    effects: list[RouterEffect] = []
    for _ in range(RULE.passed + 1):
        assert not effects
        routes.serve(d=decode.engine)
        effects = routes.check("d-0", "d-1")
    assert AbortLeg("decode", decode.engine, "r0.1") in effects
    if recomputes:
        (alone,) = [effect for effect in effects if isinstance(effect, DispatchAlone)]
        assert alone.engine != decode.engine
    else:
        (again,) = [effect for effect in effects if isinstance(effect, DispatchPrefill)]
        (decode_again,) = routes.prefilled(again.request_id, again.engine)
        assert isinstance(decode_again, DispatchDecode)
        assert decode_again.engine != decode.engine


def streaming(governed: Make, **options: Any) -> Routed:
    """A stream of d-0 that has begun."""
    routes = routed(governed, d=2, resumes=True, **options)
    routes.arrive(0, prompt_tokens=10)
    routes.prefilled("r0.1", 0)
    routes.delivered(0)
    return routes


def test_a_stream_that_gets_nothing_while_others_do_continues_elsewhere(governed: Make) -> None:
    routes = streaming(governed)
    for _ in range(5):
        for _ in range(RULE.passed):
            assert not routes.check("d-0", quiet=("r0.1",))
        assert not routes.check("d-0"), "it has got something: these checks are not in a row with the next ones"
    for _ in range(RULE.passed):
        assert not routes.check("d-0", quiet=("r0.1",))
        assert not routes.check("d-1", quiet=("r0.1",)), "d-0 has sent nothing to others either"
    effects = routes.check("d-0", quiet=("r0.1",))
    assert AbortLeg("decode", 0, "r0.1") in effects
    assert routes.router.attempts.keys() == {"r0.2"}
    assert not routes.router.stalled


def test_a_request_stays_where_no_other_engine_can_serve_it(governed: Make) -> None:
    routes = streaming(governed)
    routes.router.handle(EngineChanged("d-1", False), 0)
    for _ in range(5 * RULE.passed):
        assert not routes.check("d-0", quiet=("r0.1",))
    routes.router.handle(EngineChanged("d-1", True), 0)
    assert routes.check("d-0", quiet=("r0.1",))


def test_the_last_attempt_goes_on(governed: Make) -> None:
    routes = streaming(governed, max_attempts=1)
    for _ in range(5 * RULE.passed):
        assert not routes.check("d-0", quiet=("r0.1",))
    assert routes.router.attempts.keys() == {"r0.1"}


def test_a_whole_answer_may_be_overtaken(governed: Make) -> None:
    routes = routed(governed, d=2)
    routes.arrive(0, prompt_tokens=10, streams=False)
    routes.prefilled("r0.1", 0)
    for number in range(1, 1 + 5 * RULE.passed):
        (leg,) = routes.arrive(number, prompt_tokens=10, streams=False)
        assert isinstance(leg, DispatchPrefill)
        routes.prefilled(leg.request_id, leg.engine)
        routes.router.handle(DecodeEnded(leg.request_id), 0)
        assert not routes.check("d-0", "d-1", quiet=("r0.1",))


def test_what_is_usual_hangs_not(governed: Make) -> None:
    """An engine whose queue prefers some requests passes others over often."""
    routes = routed(governed, stall=LEARNS)
    usual = PASSED - 1
    for request in range(3):
        (leg,) = routes.arrive(request, prompt_tokens=10)
        assert isinstance(leg, DispatchPrefill)
        for _ in range(usual):
            routes.serve(p=leg.engine)
            assert not routes.check("p-0", "p-1", "d-0")
        routes.prefilled(leg.request_id, leg.engine)
        routes.delivered(request)
        routes.router.handle(DecodeEnded(leg.request_id), 0)
    (leg,) = routes.arrive(50, prompt_tokens=10)
    assert isinstance(leg, DispatchPrefill)
    for _ in range(FACTOR * usual):
        routes.serve(p=leg.engine)
        assert not routes.check("p-0", "p-1", "d-0")
    routes.serve(p=leg.engine)
    assert AbortLeg("prefill", leg.engine, "r50.1") in routes.check("p-0", "p-1", "d-0")


def test_only_the_order_of_waits_tells_states_apart(governed: Make) -> None:
    new, used = routed(governed, policy="least-loaded"), routed(governed, policy="least-loaded")
    used.serve()
    used.check("p-0", "d-0")
    for routes in (new, used):
        routes.arrive(0, prompt_tokens=10)
    assert new.router.passes.begun < used.router.passes.begun
    assert new.router.fingerprint() == used.router.fingerprint()
    used.serve(p=1)
    assert new.router.fingerprint() == used.router.fingerprint(), "another engine's"
    copy = used.router.fork()
    for routes in (new, used):
        routes.arrive(1, prompt_tokens=10)
        routes.arrive(2, prompt_tokens=10)
    used.prefilled("r2.1", 0)
    assert new.router.fingerprint() != used.router.fingerprint()
    used.check("p-0", "p-1")
    assert used.router.waits["r0.1"].passed == 1
    assert copy.waits["r0.1"].passed == 0
