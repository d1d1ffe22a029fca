"""The router's rules in a world: short prompts stay with D, failures are answered, late requests are hedged, the queue
is bounded; whatever goes wrong beside it, everything ends and nothing is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.messages import Code
from pdflow.routing.effects import Reply
from pdflow.routing.events import DecodeEnded, PrefillAnswered
from pdflow_sim.run import RunOptions, conclude, prepare, run
from tests.sim.faults.test_fault_swarm import everything_ends as ends_under_faults
from tests.sim.support.fault_plans import disturbed_scenarios
from tests.sim.support.simulations import RELAXED, both_modes_agree, random_simulations, scenarios

Play = Callable[..., Any]
Lines = Callable[[Any], bytes]
MS = 1_000_000
MIXED = Path(__file__).parents[1] / "mixed.toml"

GONE = {"fault": '[{ kind = "crash", engine = "p-*", at_s = 0.3 }]'}
"""All prefill engines, for good."""
STUCK = {"fault": '[{ kind = "pause", engine = "p-0", at_s = 0.1, for_s = 5.0 }]', "workload.requests": 20}


def reasons(world: Any) -> Counter[str | None]:
    return Counter(world.records.reason)


# Prompts of D's own.


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_short_prompts_are_computed_where_they_are_decoded(
    play: Play, lines: Lines, dispatch: str, first_token: str
) -> None:
    overrides = {
        "router.disaggregate_above_tokens": 50,
        "router.dispatch": dispatch,
        "router.first_token": first_token,
    }
    world = play(overrides)
    records = world.records
    assert set(records.outcome) == {"completed"}
    for request, tokens in enumerate(records.input_tokens):
        stays = records.prefill_engine[request] == records.decode_engine[request]
        assert stays == (tokens <= 50)
        assert 0 <= records.first_token_ns[request] <= records.last_token_ns[request]
    more = int(first_token == "prefill")
    sent = [t for t, out in zip(records.input_tokens, records.output_tokens, strict=True) if t > 50 and out > more]
    assert world.totals.transfers == len(sent)
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


def test_nothing_moves_where_every_prompt_stays(play: Play) -> None:
    world = play({"router.disaggregate_above_tokens": 100})
    assert world.totals.bytes_moved == world.fabric.messages == 0
    assert set(world.records.outcome) == {"completed"}


@pytest.mark.parametrize("rate", [0.2, 200.0])
def test_auto_keeps_prompts_at_a_decode_engine_that_has_nothing_to_do(play: Play, rate: float) -> None:
    """As fast as P, and nobody is kept from decoding; with company P is better, since both cost the same there."""
    arrival = f'{{ process = "constant", rate_rps = {rate} }}'
    world = play({"router.disaggregate_above_tokens": '"auto"', "workload.arrival": arrival})
    at_d = sum(engine is not None and engine.startswith("d-") for engine in world.records.prefill_engine)
    assert at_d == 40 if rate < 1 else 0 < at_d < 20


def test_a_prompt_that_d_knows_stays(play: Play) -> None:
    """With room for what is new in a turn, later turns need no P where their session is known."""
    overrides = {
        "workload.arrival": '{ process = "closed", concurrency = 3 }',
        "workload.sessions.turns": 4,
        "workload.sessions.think_s": 0.1,
        "workload.sessions.new_tokens": 40,
        "workload.input_tokens": 600,
        "workload.output_tokens": 64,
        "pool.p.kv_tokens": 100_000,
        "pool.d.kv_tokens": 100_000,
        "router.decode_policy": "prefix-aware",
        "router.prefix_weight": 10,
        "router.disaggregate_above_tokens": 200,
    }
    records = play(overrides).records
    stays = {turn: set() for turn in (1, 2, 3, 4)}  # type: ignore[var-annotated]
    for (_, turn), engine in zip(records.sessions, records.prefill_engine, strict=True):
        stays[turn].add(engine[0])
    assert stays == {1: {"p"}, 2: {"d"}, 3: {"d"}, 4: {"d"}}


# After a failure.


def test_what_follows_a_failure_is_what_was_asked_for(play: Play) -> None:
    ended = {}
    for answer in ("fail", "retry", "recompute"):
        world = play(GONE | {"router.on_failure": answer})
        ended[answer] = Counter(world.records.outcome)
        assert max(world.records.attempts) == (2 if answer == "recompute" else 1)
    assert ended["fail"]["failed"] > 0
    assert ended["retry"]["failed"] > 0, "there is no P left"
    assert ended["recompute"] == {"completed": 40}


def test_d_computes_what_is_recomputed(play: Play) -> None:
    records = play(GONE | {"router.on_failure": "recompute"}).records
    recomputed = [r for r, attempts in enumerate(records.attempts) if attempts == 2]
    assert recomputed
    assert all(records.prefill_engine[r] == records.decode_engine[r] for r in recomputed)
    late = [r for r, at in enumerate(records.arrival_ns) if at > 400 * MS]
    assert {records.attempts[r] for r in late} == {1}, "nobody asks engines that are known to be down"


@pytest.mark.parametrize("crash", ["d-0", "p-0"])
def test_a_recomputing_engine_may_die_too(play: Play, crash: str) -> None:
    fault = f'[{{ kind = "crash", engine = "{crash}", every_s = 0.2, at_s = 0.1, restart_after_s = 0.05 }}]'
    world = play(
        {"fault": fault, "faults.heal_s": 2.0, "router.disaggregate_above_tokens": 50, "router.max_attempts": 4}
    )
    assert Counter(world.records.outcome)["completed"] > 30


# Hedging.


def test_a_hedge_saves_whom_a_stuck_engine_would_keep_waiting(play: Play) -> None:
    waits = {}
    for after in (None, 0.5):
        replies: Counter[int] = Counter()

        def observe(node: str, event: Any, effects: Any, now: int, replies: Counter[int] = replies) -> None:
            replies.update(effect.request for effect in effects if isinstance(effect, Reply))

        hedge = {} if after is None else {"router.hedge_after_s": after}
        records = play(STUCK | hedge, observe=observe).records
        assert set(records.outcome) == {"completed"}
        assert replies == Counter(range(20)), "never two answers"
        ttft = [first - at for first, at in zip(records.first_token_ns, records.arrival_ns, strict=True)]
        waits[after] = max(ttft) / 1e9
        assert set(records.attempts) == ({1} if after is None else {1, 2})
    assert waits[None] > 4.0
    assert waits[0.5] < 1.0


def test_of_two_attempts_the_first_to_stream_is_the_answer(play: Play) -> None:
    """The first attempt has its first token at 25 ms, and then its D stands still. The second one, from 24 ms on, would
    end at 59 ms, but the client has the start of the other answer."""
    stops = '[{ kind = "pause", engine = "d-0", at_s = 0.027, for_s = 0.5 }]'
    one = {"workload.requests": 1, "workload.input_tokens": 50, "workload.output_tokens": 3}
    arrival = {"workload.arrival": '{ process = "closed", concurrency = 1 }'}
    records = play(one | arrival | {"router.hedge_after_s": 0.024, "fault": stops}).records
    assert (records.outcome, records.attempts) == (["completed"], [2])
    assert records.first_token_ns == [25 * MS]
    assert records.last_token_ns[0] > 500 * MS
    assert records.decode_engine == ["d-0"], "its tokens are in that engine's step log"


def test_an_engine_that_serves_alone_does_not_start_an_answer_again(play: Play) -> None:
    """P tells its first token at 20 ms, when the hedge computes the prompt at an engine that would decode it, too."""
    one = {"workload.requests": 1, "workload.arrival": '{ process = "closed", concurrency = 1 }'}
    seen: list[Any] = []
    rules = {"router.first_token": "prefill", "router.hedge_after_s": 0.01}
    world = play(one | rules, file=MIXED, observe=lambda node, event, effects, now: seen.append(event))
    assert PrefillAnswered("r0.2", None, Code.CANCELLED) in seen
    assert (world.records.outcome, world.records.attempts) == (["completed"], [2])
    assert world.records.first_token_ns == [20 * MS]
    assert DecodeEnded("r0.1") in seen


def test_who_has_a_token_is_not_hedged(play: Play) -> None:
    """However long the answer takes."""
    slow = '{ model = "constant", prefill_s = 0.0, decode_step_s = 0.2 }'
    overrides = {"pool.d.cost": slow, "workload.output_tokens": 12, "workload.requests": 5}
    world = play(overrides | {"router.hedge_after_s": 1.0})
    assert max(world.records.last_token_ns) > 2_000 * MS
    assert set(world.records.attempts) == {1}


def test_both_attempts_have_blocks_of_their_own(play: Play) -> None:
    """And the loser's come back: what is moved for nothing is moved all the same."""
    alone = play({"workload.requests": 10})
    hedged = play({"workload.requests": 10, "router.hedge_after_s": 0.001, "pool.p.cost.prefill_s": 0.05})
    assert set(hedged.records.attempts) == {2}
    assert alone.totals.transfers < hedged.totals.transfers <= 2 * alone.totals.transfers


def test_a_client_that_waits_for_a_token_sees_that_of_either_attempt(play: Play) -> None:
    world = play(STUCK | {"router.hedge_after_s": 0.2, "workload.client.first_token_timeout_s": 1.0})
    assert set(world.records.outcome) == {"completed"}


# Shedding.

FLOOD = {
    "workload.arrival": '{ process = "constant", rate_rps = 500 }',
    "workload.requests": 200,
    "pool.p.max_num_seqs": 1,
}


def watched(play: Play, overrides: dict[str, Any], look: Callable[[Any], int]) -> tuple[Any, int]:
    """The world, and the most that was seen after any event."""
    simulations: list[Any] = []
    most = 0

    def observe(*_: Any) -> None:
        nonlocal most
        most = max(most, look(simulations[0]))

    return play(overrides, prepared=simulations.append, observe=observe), most


def test_no_more_than_so_many_are_open(play: Play) -> None:
    world, most = watched(play, FLOOD | {"router.max_inflight": 10}, lambda world: len(world.router.by_request))
    assert most == 10
    shed = reasons(world)["shed: too many requests in flight"]
    assert shed > 50
    assert reasons(world) == {None: 200 - shed, "shed: too many requests in flight": shed}
    assert {made for made, why in zip(world.records.attempts, world.records.reason, strict=True) if why} == {0}


def test_no_more_tokens_wait_for_an_engine_than_may(play: Play) -> None:
    def queued(world: Any) -> int:
        tokens = world.records.input_tokens
        return sum(tokens[attempt.request] for attempt in world.router.attempts.values() if attempt.p_open)

    plain, before = watched(play, FLOOD, queued)
    world, most = watched(play, FLOOD | {"router.max_queue_tokens": 300}, queued)
    assert before > 2000
    assert 500 < most <= 2 * 300
    assert set(reasons(world)) == {None, "shed: too many prompt tokens in the queue"}
    waits = [max(w.records.first_token_ns[r] - at for r, at in enumerate(w.records.arrival_ns)) for w in (plain, world)]
    assert waits[1] < waits[0] / 3


def test_results_count_shed_requests_by_reason(lay: Callable[..., Any]) -> None:
    scenario = lay(FLOOD | {"router.max_inflight": 10})
    world, _ = prepare(scenario, RunOptions(), [])
    run(world, None, False)
    metrics = conclude(scenario, world, (), False).metrics
    assert metrics.outcomes["failed"] == metrics.reasons["failed"]["shed: too many requests in flight"] > 50


def test_a_closed_loop_goes_on_when_somebody_is_shed(play: Play) -> None:
    """Whose client sends its next request at once: there is no time between."""
    closed = {"workload.arrival": '{ process = "closed", concurrency = 5 }', "router.max_inflight": 3}
    assert len(play(closed).records) == 40


# All of it at once.


@st.composite
def ruled(draw: st.DrawFn, others: Callable[[], st.SearchStrategy[dict[str, Any]]], sheds: bool) -> dict[str, Any]:
    """Those worlds, with rules."""
    drawn = draw(others())
    overrides = drawn.get("overrides", drawn)
    overrides["router.policy"] = draw(
        st.sampled_from(["round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity"])
    )
    for key, values in {
        "disaggregate_above_tokens": [None, 0, 40, 1000, '"auto"'],
        "hedge_after_s": [None, 0.002, 0.03, 0.5],
        **({"max_inflight": [None, None, 2], "max_queue_tokens": [None, None, 50]} if sheds else {}),
    }.items():
        value = draw(st.sampled_from(values))
        if value is not None:
            overrides[f"router.{key}"] = value
    attempts = overrides.get("router.max_attempts")
    if attempts is None or attempts > 1:
        answer = draw(st.sampled_from([None, "retry", "recompute"]))
        if answer is not None:
            overrides["router.on_failure"] = answer
    return drawn


@random_simulations(100)
@given(overrides=ruled(scenarios, sheds=False))
def test_exact_and_fast_are_the_same(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    both_modes_agree(overrides, play, lines)


@random_simulations(100)
@given(overrides=ruled(disturbed_scenarios, sheds=True))
def test_whatever_goes_wrong_everything_ends(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)


@pytest.mark.nightly
@settings(max_examples=5000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=ruled(disturbed_scenarios, sheds=True))
def test_whatever_goes_wrong_everything_ends_at_night(overrides: dict[str, Any], play: Play, lines: Lines) -> None:
    ends_under_faults(overrides, play, lines)
