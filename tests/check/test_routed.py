"""The router's endpoint in the explored world does what it does in the simulated one, and what breaks it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
from pdflow.protocol.messages import Code
from pdflow.routing import router as routing
from pdflow.routing.answer import Answer, Ending
from pdflow.routing.attempt import Attempt
from pdflow.routing.effects import AbortLeg, Reply, ReportPrefill
from pdflow.routing.events import ClientGone, DecodeEnded, EngineLost, PrefillAnswered
from pdflow.routing.failure import after_failure
from pdflow.routing.policy import Choice
from pdflow.routing.router import Router
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.diagram import collect
from pdflow_sim.check.counterexamples.diagram_lines import CLIENT
from pdflow_sim.check.counterexamples.diagram_mermaid import mermaid
from pdflow_sim.check.counterexamples.diagram_text import text
from pdflow_sim.check.counterexamples.names import find, name
from pdflow_sim.check.counterexamples.replay import lenient, named, record, strict
from pdflow_sim.check.counterexamples.shrink import shrink
from pdflow_sim.check.counterexamples.simpler import simpler
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.ordered import RelationCache
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.routed.answers import ClientAnswers
from pdflow_sim.check.routed.cluster import ROUTER
from pdflow_sim.check.routed.invariant_checker import DELIVERED, RoutedInvariantChecker
from pdflow_sim.check.routed.routed import RouterDriver
from pdflow_sim.check.scopes.routed_scopes import ROUTED
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.liveness import settle
from pdflow_sim.check.search.schedulers import node
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.search.walk import walk
from pdflow_sim.check.state.digest import digest
from pdflow_sim.check.state.shadow_state import Broken, ClientStage, PromptStage

NO_TIMEOUTS: dict[str, Any] = {"deadline": 0, "stall": 0}
RETRIED = [
    "request r0",
    "deliver DispatchPrefill r0.1 router -> P",
    "abort prefill x0.1",
    "deliver PrefillAnswered r0.1 PREFILL_ABORTED P -> router",
    "deliver DispatchPrefill r0.2 router -> P",
    "finish x0.2",
    "deliver PrefillAnswered r0.2 NONE P -> router",
]
"""The first attempt's prefill fails, the second's does not."""


def after_moves(scope: Scope, names: list[str]) -> tuple[Transitions, Any]:
    """These moves, each of which must be possible."""
    world = relation(scope)
    state = world.turns.start()
    for move_name in names:
        move = find(world, state, move_name)
        assert move is not None, (move_name, [name(world, state, move) for move in world.moves(state)])
        state = world.apply(state, move)
    return world, state


def waiting(world: Transitions, state: Any, sender: str, to: str) -> list[str]:
    """What is under way from one to the other."""
    links = [link for link, ends in enumerate(world.space.cluster.links) if ends == (sender, to)]
    frames = [frame for link in links for frame in world.space.chans.values[state[world.space.first_link + link]]]
    return [type(world.space.frames.values[frame]).__name__ for frame in frames]


def test_nothing_happens_before_a_client_asks() -> None:
    world = relation(Scope(attempts=1, requests=2, p_restart=0))
    start = world.turns.start()
    assert [name(world, start, move) for move in world.moves(start)] == ["request r0", "request r1"]


@pytest.mark.parametrize(
    ("concurrent", "pulls", "early"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_decode_leg_is_dispatched_as_the_router_dispatches(concurrent: bool, pulls: bool, early: bool) -> None:
    world, state = after_moves(Scope(attempts=1, concurrent=concurrent, pulls=pulls), ["request r0"])
    assert waiting(world, state, ROUTER, "D") == ["DispatchDecode"] * early


def test_a_retry_is_another_attempt_in_every_table() -> None:
    world, state = after_moves(Scope(attempts=2, concurrent=False, prefill_abort=1, **NO_TIMEOUTS), RETRIED)
    shadow = world.space.shadow_of(state)
    assert shadow.products == (PromptStage.DEAD, PromptStage.HELD)
    assert waiting(world, state, ROUTER, "D") == ["DispatchDecode"]
    after = settle(world, state)[-1]
    assert world.space.shadow_of(after).clients == (ClientStage.COMPLETED,)
    assert world.space.body(after, ROUTER).attempts == {}


def test_what_a_dead_engine_has_answered_arrives_before_its_death_is_noticed_or_never() -> None:
    scope = Scope(attempts=1, p_restart=1, **NO_TIMEOUTS)
    dies = ["request r0", "deliver DispatchPrefill r0.1 router -> P", "finish x0.1", "restart P"]
    world, state = after_moves(scope, dies)
    assert waiting(world, state, "P", ROUTER) == ["PrefillAnswered", "EngineLost", "EngineChanged"]
    world, state = after_moves(scope, [*dies, "deliver EngineLost P P -> router"])
    assert waiting(world, state, "P", ROUTER) == ["EngineChanged"]
    assert waiting(world, state, ROUTER, "P") == ["AbortLeg"]


def test_a_leg_that_is_taken_back_is_aborted_only_where_it_runs() -> None:
    scope = Scope(attempts=1, **NO_TIMEOUTS)
    begun = ["request r0", "deliver DispatchPrefill r0.1 router -> P"]
    taken_back = ["disconnect r0", "deliver AbortLeg r0.1 router -> P"]
    world, state = after_moves(scope, [*begun, *taken_back])
    assert world.space.body(state, "P").fingerprint() == world.space.body(world.turns.start(), "P").fingerprint()
    world, state = after_moves(scope, [*begun, "finish x0.1", *taken_back])
    assert world.space.body(state, "P.r0").cells, "its lease decides"
    assert "cancelled too late" in world.space.checker.seen


def test_a_token_precedes_its_leg_s_end_and_reaches_the_client_before_the_endpoint() -> None:
    world = relation(Scope(attempts=2, pulls=True, streams=True, **NO_TIMEOUTS))
    for state in settle(world, world.apply(world.turns.start(), ("request", 0))):
        under_way = waiting(world, state, "D", ROUTER)
        assert under_way in (
            [],
            ["FirstTokenDelivered", "DecodeEnded"],
            ["TokenPassed", "DecodeEnded"],
            ["DecodeEnded"],
        )
        assert bool(world.space.shadow_of(state).legs[0] & DELIVERED) == (
            under_way in (["TokenPassed", "DecodeEnded"], ["DecodeEnded"])
            or world.space.shadow_of(state).clients[0] > 1
        )


def client_answers(world: Transitions) -> ClientAnswers:
    assert isinstance(world.space.clients, RouterDriver)
    return world.space.clients.answers


def answers(world: Transitions, state: Any) -> list[Answer]:
    known = client_answers(world)
    return [known.bodies[at] for at in state[known.first :]]


def checker_of(world: Transitions) -> RoutedInvariantChecker:
    assert isinstance(world.space.checker, RoutedInvariantChecker)
    return world.space.checker


def test_a_whole_answer_is_one_piece_where_clients_do_not_stream() -> None:
    world = relation(Scope(attempts=2, pulls=True, **NO_TIMEOUTS))
    for state in settle(world, world.apply(world.turns.start(), ("request", 0))):
        (answer,) = answers(world, state)
        ended = world.space.shadow_of(state).clients == (ClientStage.COMPLETED,)
        assert (answer.streaming, answer.over) == (("r0.1", True) if ended else (None, False))
        assert bool(world.space.shadow_of(state).legs[0] & DELIVERED) == ended
    assert ended


def test_each_client_has_an_answer_of_its_own_and_states_share_none_that_changes() -> None:
    world, state = after_moves(
        Scope(attempts=1, requests=2, **NO_TIMEOUTS), ["request r0", "request r1", "disconnect r1"]
    )
    assert [answer.over for answer in answers(world, state)] == [False, True]
    assert [answer.over for answer in answers(world, world.turns.start())] == [False, False]
    assert "answers" not in world.space.further(world.turns.start())
    assert [answer[4] for answer in world.space.further(state)["answers"]] == [False, True]


def test_what_an_answer_raises_is_a_violation() -> None:
    world = relation(Scope(attempts=1))
    with pytest.raises(Broken, match=r"crash: LocalProtocolError: r0\.1 cannot have the whole answer"):
        client_answers(world).answer(list(world.turns.start()), 0, Answer.whole, "r0.1")


@pytest.mark.parametrize(
    ("client", "legs", "what"),
    [
        (ClientStage.WAITING, (DELIVERED, 0), "client 0 receives a piece of r0.2, but has the start of r0.1"),
        (ClientStage.FAILED, (0, 0), "client 0 receives a piece of r0.2, but is failed"),
    ],
)
def test_what_reaches_a_client_is_of_one_attempt_and_before_its_end(
    client: ClientStage, legs: tuple[int, ...], what: str
) -> None:
    world = relation(Scope(attempts=2))
    shadow = world.space.shadow_of(world.turns.start())._replace(clients=(client,), legs=legs)
    with pytest.raises(Broken, match=what):
        checker_of(world).received(shadow, 1)


@pytest.mark.parametrize(
    ("outcome", "legs", "ending"),
    [
        ("failed", DELIVERED, Ending.ERROR),
        ("failed", 0, Ending.BREAK_OFF),
        ("failed", 0, Ending.NOTHING),
        ("completed", DELIVERED, Ending.BREAK_OFF),
        ("cancelled", 0, Ending.ERROR),
    ],
)
def test_the_outcome_sent_to_a_client_fits_its_answer(outcome: Any, legs: int, ending: Ending) -> None:
    world = relation(Scope(attempts=1))
    shadow = world.space.shadow_of(world.turns.start())._replace(legs=(legs,))
    with pytest.raises(Broken, match=f"but its end is {ending.name}: {outcome}"):
        checker_of(world).ended(shadow, Reply(0, outcome, Code.NONE, 1), ending)


def test_tokens_are_reported_to_a_router_only() -> None:
    with pytest.raises(ValueError, match="streams=true needs attempts"):
        relation(Scope(streams=True))


@pytest.mark.parametrize("field", ["same_product", "same_base"])
def test_what_it_is_not_made_for_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"attempts excludes {field}=true"):
        relation(evolve(Scope(attempts=1), **{field: True}))


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        (Scope(attempts=2, p_engines=2, d_engines=2), "needs requests=1 and attempts of at most 2"),
        (Scope(attempts=2, p_engines=2, requests=2), "needs requests=1 and attempts of at most 2"),
        (Scope(attempts=3, d_engines=2), "needs requests=1 and attempts of at most 2"),
        (Scope(attempts=2, d_engines=2, concurrent=False), "need concurrent=true and pulls=false"),
        (Scope(attempts=2, d_engines=2, pulls=True), "need concurrent=true and pulls=false"),
    ],
)
def test_where_nobody_knows_whose_turn_it_will_be(scope: Scope, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        relation(scope)


def test_its_counterexamples_replay() -> None:
    scope = Scope(attempts=2, concurrent=False, prefill_abort=1, **NO_TIMEOUTS)
    counterexample = record(relation(scope), RETRIED)
    assert counterexample.moves == RETRIED
    assert counterexample.verdict is None
    again = strict(relation(scope), decode(encode(counterexample)))
    assert again.mismatch is None


def test_its_diagrams_show_what_the_router_does() -> None:
    scope = Scope(attempts=2, concurrent=False, prefill_abort=1, **NO_TIMEOUTS)
    drawn = collect(record(relation(scope), [*RETRIED, "disconnect r0"]))
    arrows = [(line.at, line.text, line.to) for line in drawn.lines if line.arrow and ROUTER in (line.at, line.to)]
    assert arrows == [
        (CLIENT, "request r0", ROUTER),
        (ROUTER, "dispatch prefill x0.1", "P"),
        (ROUTER, "dispatch prefill x0.2", "P"),
        ("P", "prefill x0.2 answered", ROUTER),
        (ROUTER, "dispatch decode r0.2", "D"),
        (CLIENT, "disconnect r0", ROUTER),
        (ROUTER, "abort decode r0.2", "D"),
        (ROUTER, "r0 cancelled, CANCELLED", CLIENT),
    ]
    assert text(drawn)
    assert mermaid(drawn)


class Doubting:
    """Keeps two routers of one fingerprint that came about in different ways, and lets both do the same."""

    def __init__(self, world: Transitions) -> None:
        self.space, self.turns = world.space, world.turns
        self.others: dict[int, Router] = {}
        self.compared = 0
        self.plain_endpoint, self.plain_step = self.space.endpoint, self.turns.step
        self.space.endpoint = self.endpoint  # type: ignore[method-assign]
        self.turns.step = self.step  # type: ignore[method-assign]

    def endpoint(self, node: str, body: Any) -> int:
        number = self.plain_endpoint(node, body)
        if node == ROUTER and self.space.bodies[number] is not body:
            self.others[number] = body
        return number

    def step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        if end in self.others:
            one, other = self.space.bodies[end].fork(), self.others[end].fork()
            what = self.turns.events.values[event][1]
            assert one.handle(what, 0) == other.handle(what, 0)
            assert one.fingerprint() == other.fingerprint()
            self.compared += 1
        return self.plain_step(end, event)


@pytest.mark.parametrize(
    "scope",
    [
        Scope(attempts=2, requests=2, pulls=True, clocks=False, prefill_abort=1),
        Scope(attempts=2, p_engines=2, pulls=True, p_restart=1, **NO_TIMEOUTS),
    ],
    ids=["two requests", "two engines"],
)
def test_routers_of_one_fingerprint_do_the_same(scope: Scope) -> None:
    world = relation(scope)
    doubting = Doubting(world)
    assert shortest(world) is None
    assert doubting.compared > 10


# At random.


ROUGH: dict[str, int] = dict.fromkeys(("prefill_abort", "drop", "dup", "delay", "lose", "sync", "cancel"), 1)
WALKED = (
    Scope(attempts=2, requests=2, err=1, unreachable=1, p_restart=1, d_restart=1, streams=True, **ROUGH),
    Scope(attempts=2, concurrent=False, p_tp=2, lagging=True, chunks=2, p_restart=1, d_restart=1, **ROUGH),
    Scope(attempts=3, requests=2, pulls=True, pool=1, err=1, p_restart=1, d_restart=1, **ROUGH),
    Scope(dialect=VLLM_COMPAT, attempts=2, requests=2, drop=1, dup=1, err=1, p_restart=1, d_restart=1),
)


@pytest.mark.parametrize("scope", WALKED, ids=range(len(WALKED)))
def test_nothing_breaks_in_random_runs(scope: Scope) -> None:
    cache = RelationCache()
    outcomes = set()
    for seed in range(100):
        record = walk(cache, seed, scope.dialect, scope)
        assert record.broken is None, (seed, record.broken, record.names(cache.of(record.cluster)))
        outcomes.update(cache.of(record.cluster).space.shadow_of(record.end).clients)
    assert {ClientStage.COMPLETED, ClientStage.FAILED, ClientStage.CANCELLED} <= outcomes


@pytest.mark.parametrize("scope", WALKED, ids=range(len(WALKED)))
def test_its_moves_are_found_by_their_names_in_any_world(scope: Scope) -> None:
    cache, other = RelationCache(), RelationCache()
    for seed in range(10):
        record = walk(cache, seed, scope.dialect, scope)
        world, again = cache.of(record.cluster), other.of(record.cluster)
        state = again.opening(record.budget)
        for before, move in record.steps(world):
            assert digest(world, before) == digest(again, state)
            assert 0 <= node(world, before, move) < len(world.space.cluster.nodes)
            possible = [name(world, before, each) for each in world.moves(before)]
            assert possible == [name(again, state, each) for each in again.moves(state)]
            found = find(again, state, name(world, before, move))
            assert found is not None
            state = again.apply(state, found)


def test_what_a_walk_finds_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To one client, one rank and no fault, since this takes none."""
    answers_no_departed_client(monkeypatch)
    scope = Scope(attempts=2, requests=2, p_tp=2, drop=1, dup=1)
    cache = RelationCache()
    record = next(found for seed in range(100) if (found := walk(cache, seed, STRICT, scope)).broken)
    short = shrink(record.scope, record.names(cache.of(record.cluster)), "L")
    assert short.names == ("request r0", "disconnect r0")
    assert short.scope == Scope(attempts=1, concurrent=False, deadline=0, stall=0)


@pytest.mark.parametrize(
    ("move", "left"),
    [
        ("request r1", "request r0"),
        ("disconnect r0", None),
        ("deliver DispatchPrefill r1.2 router -> P", "deliver DispatchPrefill r0.2 router -> P"),
        ("land PostWrite r1.1 r0->r1 by P.r0", "land PostWrite r0.1 r0->r1 by P.r0"),
        ("land PostWrite r0.1 r1->r1 by P.r1", None),
        ("timer LEASE x2.1 at P.r2", "timer LEASE x1.1 at P.r2"),
        ("handshake P.r0 -> D.r0", "handshake P.r0 -> D.r0"),
    ],
)
def test_a_counterexample_without_the_first_client(move: str, left: str | None) -> None:
    scope = Scope(attempts=2, requests=3)
    fewer = [names for smaller, names in simpler(scope, [move]) if smaller.requests == 2]
    assert fewer[0] == [left] * (left is not None)


# What breaks a router, and what says so.


def without(kind: type, role: str | None = None) -> Callable[[Any], Any]:
    """Some effects of `_close` are forgotten."""
    close = Router._close

    def forgetful(self: Router, attempt: Attempt) -> Any:
        effects = close(self, attempt)
        return tuple(e for e in effects if not isinstance(e, kind) or (role and getattr(e, "role", None) != role))

    return lambda patch: patch.setattr(Router, "_close", forgetful)


def answers_twice(patch: pytest.MonkeyPatch) -> None:
    over = Router._over
    patch.setattr(Router, "_over", lambda *args: (*over(*args), over.__get__(Twin(args[0]))(*args[1:])[-1]))


class Twin:
    """A router that has nothing to close."""

    def __init__(self, router: Router) -> None:
        self._close = lambda attempt: ()


def answers_no_departed_client(patch: pytest.MonkeyPatch) -> None:
    gone = Router._client_gone
    patch.setitem(routing._ON, ClientGone, lambda self, event: gone(self, event)[:-1])


def keeps_the_id(patch: pytest.MonkeyPatch) -> None:
    make = Attempt.__init__

    def same(self: Attempt, request: int, number: int, *rest: Any) -> None:
        make(self, request, number, *rest)
        self.request_id = f"r{request}.1"

    patch.setattr(Attempt, "__init__", same)


def keeps_the_xid(patch: pytest.MonkeyPatch) -> None:
    make = Attempt.__init__

    def same(self: Attempt, request: int, number: int, *rest: Any) -> None:
        make(self, request, number, *rest)
        self.xid = f"x{request}.1"

    patch.setattr(Attempt, "__init__", same)


def takes_any_attempts_end(patch: pytest.MonkeyPatch) -> None:
    """Completion is keyed by the request."""
    ended = Router._decode_ended

    def whose(self: Router, event: DecodeEnded) -> Any:
        now = self.by_request.get(int(event.request_id[1 : event.request_id.index(".")]))
        return ended(self, event if now is None else DecodeEnded(now.request_id, event.code))

    patch.setitem(routing._ON, DecodeEnded, whose)


def completes_with_the_prefill(patch: pytest.MonkeyPatch) -> None:
    answered = Router._prefill_answered

    def hasty(self: Router, event: PrefillAnswered) -> Any:
        attempt = self.attempts.get(event.request_id)
        if attempt is None or event.params is None:
            return answered(self, event)
        attempt.p_open = False
        self.prefill_choice.give_back(attempt.p)
        return self._over(attempt, "completed", Code.NONE)

    patch.setitem(routing._ON, PrefillAnswered, hasty)


def ignores_deaths(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(routing._ON, EngineLost, lambda self, event: ())


def reports_lost_p_as_never_writing(patch: pytest.MonkeyPatch) -> None:
    """As it was, until the search found it."""

    def lost(self: Router, event: EngineLost) -> Any:
        effects: Any = ()
        for attempt in list(self.attempts.values()):
            if attempt.p_open and self.prefill[attempt.p].engine == event.engine:
                effects += (AbortLeg("prefill", attempt.p, attempt.request_id),)
                effects += self._prefill_answered(PrefillAnswered(attempt.request_id, None, Code.PEER_DEAD))
        return effects

    patch.setitem(routing._ON, EngineLost, lost)


def tries_the_first_again(patch: pytest.MonkeyPatch) -> None:
    take = Choice.take

    def first(self: Choice, avoid: int | None = None) -> int | None:
        self.next_turn = 0
        return take(self)

    patch.setattr(Choice, "take", first)


def never_gives_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Choice, "give_back", lambda self, engine: None)


def forgets_the_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routing, "after_failure", lambda code, started, *counts: after_failure(code, False, *counts))


def ignores_late_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Router, "_late_first_token", lambda self, request: ())


STREAMS = Scope(attempts=2, pulls=True, d_restart=1, clocks=False, streams=True)
COMPAT = VLLM_COMPAT
PASSED = {named.scope for named in ROUTED}
"""By test_scopes.py."""
BUGS: dict[str, tuple[Callable[[Any], Any], Scope, str, str]] = {
    "the decode leg is not taken back": (
        without(AbortLeg, "decode"),
        Scope(attempts=1, **NO_TIMEOUTS),
        "L",
        "the decode leg of r0.1 is still open",
    ),
    "the prefill leg is not taken back": (
        without(AbortLeg, "prefill"),
        Scope(attempts=1, **NO_TIMEOUTS),
        "L",
        "the prefill leg of r0.1 is still open",
    ),
    "a client is answered twice": (answers_twice, Scope(attempts=1, **NO_TIMEOUTS), "S6", "but has received"),
    "who has left is forgotten": (
        answers_no_departed_client,
        Scope(attempts=1, **NO_TIMEOUTS),
        "L",
        "client 0 is GONE",
    ),
    "a retry has the id of the first attempt": (
        keeps_the_id,
        Scope(attempts=2, prefill_abort=1, abort=0, **NO_TIMEOUTS),
        "S6",
        "a second time",
    ),
    "a retry has the xid of the first attempt": (
        keeps_the_xid,
        Scope(attempts=2, prefill_abort=1, abort=0, **NO_TIMEOUTS),
        "S6",
        "with the xid x0.1",
    ),
    "any attempt's end is the request's": (
        takes_any_attempts_end,
        Scope(attempts=2, prefill_abort=1, abort=0, **NO_TIMEOUTS),
        "L",
        "the decode leg of r0.2 is still open",
    ),
    "a prompt that is computed completes the request": (
        completes_with_the_prefill,
        Scope(attempts=1, concurrent=False, **NO_TIMEOUTS),
        "S6",
        "never committed",
    ),
    "a death is not noticed": (
        ignores_deaths,
        Scope(attempts=1, concurrent=False, p_restart=1, abort=0, **NO_TIMEOUTS),
        "L",
        "client 0 is WAITING",
    ),
    "compat: D is told that a lost P never writes": (
        reports_lost_p_as_never_writing,
        Scope(dialect=COMPAT, attempts=1, p_restart=1, abort=0),
        "S1",
        "may still land in it",
    ),
    "compat: D is not told that the prefill leg was taken back": (
        without(ReportPrefill),
        Scope(dialect=COMPAT, attempts=1),
        "L",
        "r0.1 is RESOLVED",
    ),
    "a retry goes where it has failed": (
        tries_the_first_again,
        Scope(attempts=2, p_engines=2, concurrent=False, p_restart=1, deadline=0, stall=0),
        "L6",
        "r0.2 is dispatched to P0, not to P1",
    ),
    "a client that has the start of an answer gets another one": (
        forgets_the_token,
        STREAMS,
        "S6",
        "r0.2 is dispatched after its client has the start of r0.1",
    ),
    "a token of an attempt that was taken back is nothing": (
        ignores_late_tokens,
        STREAMS,
        "S6",
        "r0.2 is dispatched after its client has the start of r0.1",
    ),
    "loads are never given back": (never_gives_back, Scope(attempts=1, **NO_TIMEOUTS), "L", "counts a leg as open"),
}


@pytest.mark.parametrize(("plant", "scope", "invariant", "what"), BUGS.values(), ids=BUGS)
def test_a_router_that_is_broken_is_found_out(
    plant: Callable[[Any], Any], scope: Scope, invariant: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    world = relation(scope)
    counterexample = shortest(world)
    assert counterexample is not None
    assert (counterexample.broken.name, what in counterexample.broken.what) == (invariant, True), counterexample.broken
    assert len(counterexample.moves) <= (18 if scope is STREAMS else 12)
    again = lenient(relation(scope), named(world, counterexample.moves))
    assert again.verdict is not None
    assert again.verdict.invariant == invariant


@pytest.mark.parametrize(
    "scope", dict.fromkeys(scope for _, scope, _, _ in BUGS.values() if scope not in PASSED), ids=lambda _: ""
)
def test_ours_passes_there(scope: Scope) -> None:
    assert shortest(relation(scope)) is None


def test_an_answer_that_was_decoded_for_a_while_counts_as_committed() -> None:
    """It was a violation, since its stage is no longer COMMITTED when the router receives its end."""
    assert shortest(relation(Scope(attempts=1, decodes=True, abort=0, deadline=0, stall=0))) is None
