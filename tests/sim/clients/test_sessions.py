"""Sessions in a world: every turn when it may come and with what was said, what is found of it, how users add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.scenario import ResolvedScenario
from pdflow.workload.sessions import Session, sessions
from tests.sim.support.simulations import RELAXED, random_simulations, scenarios
from tests.sim.test_determinism import simulate

HERE = Path(__file__).parents[1]
SMALL, ALONE, MIXED = HERE / "small.toml", HERE / "alone.toml", HERE / "mixed.toml"
KV_BYTES = 131_072
"""Of one token of Llama-3.1-8B."""
Play = Callable[..., Any]
Lay = Callable[..., ResolvedScenario]

TALK = {
    "workload.requests": 60,
    "workload.arrival": '{ process = "poisson", rate_rps = 20.0 }',
    "workload.input_tokens": '{ dist = "uniform", low = 300, high = 900 }',
    "workload.output_tokens": '{ dist = "uniform", low = 100, high = 800 }',
    "workload.sessions.turns": '{ dist = "uniform", low = 1, high = 4 }',
    "workload.sessions.think_s": '{ dist = "exponential", mean_s = 0.5 }',
    "workload.sessions.new_tokens": '{ dist = "uniform", low = 1, high = 400 }',
    "workload.sessions.system_prompt_tokens": 600,
}
ROOM = {"pool.p.kv_tokens": 10**6, "pool.d.kv_tokens": 10**6}
USERS = {"workload.arrival": '{ process = "closed", concurrency = 5 }'}


def drawn(scenario: ResolvedScenario) -> list[Session]:
    return list(islice(sessions(scenario.workload, scenario.seed), scenario.workload.requests))


def turns_in_order(world: Any, scenario: ResolvedScenario) -> None:
    """Each session's turns one after the other, each as it was drawn and when it was due."""
    records, expected = world.records, drawn(scenario)
    last: dict[int, int] = {}
    assert len(records) == scenario.workload.requests == len(records.sessions)
    for request, (session, turn) in enumerate(records.sessions):
        plan = expected[session].turns[turn - 1]
        assert (records.input_tokens[request], records.output_tokens[request]) == (
            plan.input_tokens,
            plan.output_tokens,
        )
        assert records.class_of(request) == ("turn 1" if turn == 1 else "turn 2+")
        assert turn == (1 if session not in last else records.sessions[last[session]][1] + 1)
        if turn > 1:
            before = last[session]
            assert records.outcome[before] == "completed"
            thought_ns = records.arrival_ns[request] - records.last_token_ns[before]
            assert thought_ns == expected[session].think_ns[turn - 2]
        elif expected[session].begins_ns >= 0:
            assert records.arrival_ns[request] == expected[session].begins_ns
        last[session] = request
    assert records.arrival_ns == sorted(records.arrival_ns)


@pytest.mark.parametrize("users", [{}, USERS], ids=["open", "closed"])
@pytest.mark.parametrize("dialect", ["strict", "vllm-compat", "vllm-stock"])
@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
def test_turns_come_in_order(
    play: Play, lay: Lay, lines: Callable[[Any], bytes], users: dict[str, Any], dialect: str, method: str
) -> None:
    overrides = TALK | ROOM | users | {"transfer.dialect": dialect, "transfer.method": method}
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    turns_in_order(world, lay(overrides))
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)


ONE_OF_EACH = {"pool.p.replicas": 1, "pool.d.replicas": 1, "router.dispatch": "sequential"}
TWO_TURNS = {
    "workload.requests": 2,
    "workload.arrival": '{ process = "constant", rate_rps = 0.001 }',
    "workload.input_tokens": 900,
    "workload.output_tokens": 700,
    "workload.sessions.turns": 2,
    "workload.sessions.think_s": 1,
    "workload.sessions.new_tokens": 100,
}
"""A prompt of 900 tokens, 1599 of a conversation whose KV is known at its end, and then a prompt of 1700."""


def test_a_prefill_engine_has_the_prompt_and_a_decode_engine_has_the_answer_too(play: Play) -> None:
    """P computes the first answer as part of the second prompt; D, which has it, is sent what follows it only."""
    world = play(TWO_TURNS | ONE_OF_EACH | ROOM)
    assert world.records.input_tokens == [900, 1700]
    assert world.prefills[0].prefix_cache() == (2600, 896)
    assert world.decodes[0].prefix_cache() == (2600, 1536)
    assert world.totals.bytes_moved == (2600 - 1536) * KV_BYTES


def test_an_engine_that_does_both_has_the_answer(play: Play) -> None:
    world = play(TWO_TURNS | {"pool.w.kv_tokens": 10**6}, file=ALONE)
    assert world.prefills[0].prefix_cache() == (2600, 1536)


def test_the_kv_of_an_answers_last_token_is_nowhere(play: Play) -> None:
    """900 + 637 tokens are 24 blocks of 64 and one token, which no step has read; one token fewer are 23 blocks."""
    for answer, found in ((636, 1472), (637, 1536)):
        world = play(TWO_TURNS | {"workload.output_tokens": answer, "pool.w.kv_tokens": 10**6}, file=ALONE)
        assert world.prefills[0].prefix_cache() == (900 + 900 + answer + 100, found)


def test_a_system_prompt_is_found_by_everybody(play: Play) -> None:
    overrides = {
        "workload.requests": 3,
        "workload.arrival": '{ process = "constant", rate_rps = 0.1 }',
        "workload.sessions.turns": 1,
        "workload.sessions.system_prompt_tokens": 1100,
    }
    world = play(TWO_TURNS | overrides | {"pool.w.kv_tokens": 10**6}, file=ALONE)
    assert world.prefills[0].prefix_cache() == (3 * 2000, 2 * 1088)


@pytest.mark.parametrize("turns", [1, 3])
def test_users_are_throughput_times_response_and_think_time(play: Play, lay: Lay, turns: int) -> None:
    """N = X (R + Z), the interactive response time law, exact to the nanosecond up to the last arrival: until then each
    user either waits for an answer or thinks. Over the whole run it holds but for how the run begins and ends."""
    overrides = TALK | ROOM | USERS | {"workload.requests": 400, "workload.sessions.turns": turns}
    world = play(overrides, checked=False)
    records, expected = world.records, drawn(lay(overrides))
    until = records.arrival_ns[-1]
    waiting = thinking = whole = 0
    for request, (session, turn) in enumerate(records.sessions):
        answered = records.last_token_ns[request]
        think_ns = expected[session].think_ns[turn - 1]
        waiting += min(answered, until) - records.arrival_ns[request]
        thinking += max(0, min(answered + think_ns, until) - answered)
        whole += answered - records.arrival_ns[request] + think_ns
    assert waiting + thinking == 5 * until
    assert whole / world.totals.duration_ns == pytest.approx(5, rel=0.05)


def test_who_gets_no_answer_asks_no_more(play: Play, lay: Lay) -> None:
    """A cancelled turn ends its session; a closed user begins another after thinking."""
    leaving = {"workload.client.cancel_probability": 0.3, "workload.client.cancel_after_s": 0.05}
    for users in ({}, USERS):
        overrides = TALK | ROOM | users | leaving
        world = play(overrides)
        records = world.records
        assert set(records.outcome) == {"completed", "cancelled"}
        turns_in_order(world, lay(overrides))
        by_session = defaultdict(list)
        for request, (session, _) in enumerate(records.sessions):
            by_session[session].append(records.outcome[request])
        assert any(outcomes[-1] == "cancelled" for outcomes in by_session.values())
        assert all(outcome == "completed" for outcomes in by_session.values() for outcome in outcomes[:-1])


def test_the_same_bytes_under_any_hash_seed(tmp_path: Path) -> None:
    args = [str(SMALL)]
    for key, value in (TALK | ROOM | USERS).items():
        args += ["--set", f"{key}={value}"]
    args += ["--set", "workload.client={ timeout_s = 2.0, cancel_probability = 0.1, cancel_after_s = 0.3 }"]
    first = simulate(tmp_path / "a", *args, hash_seed=1)
    assert b'"session":' in first["requests.jsonl"]
    assert b'"client cancelled"' in first["requests.jsonl"]
    assert simulate(tmp_path / "b", *args, hash_seed=2) == first


@st.composite
def talks(draw: st.DrawFn) -> dict[str, Any]:
    """Of two kinds: short ones that share nothing in pools of any size, and ones of many prefix blocks."""
    overrides = draw(scenarios())
    long = draw(st.booleans())
    overrides |= {
        "workload.requests": draw(st.integers(1, 30)),
        "workload.sessions.turns": draw(st.sampled_from(["1", "3", '{ dist = "geometric", mean = 4, high = 9 }'])),
        "workload.sessions.think_s": draw(st.sampled_from(["0", "0.005", '{ dist = "exponential", mean_s = 0.02 }'])),
        "workload.sessions.new_tokens": draw(st.sampled_from(["1", '{ dist = "uniform", low = 1, high = 40 }'])),
        "workload.sessions.max_context_tokens": 190,
    }
    if long:
        overrides |= {
            "workload.input_tokens": '{ dist = "uniform", low = 300, high = 1200 }',
            "workload.output_tokens": '{ dist = "uniform", low = 1, high = 700 }',
            "workload.sessions.system_prompt_tokens": draw(st.sampled_from([0, 512, 700])),
            "workload.sessions.max_context_tokens": draw(st.sampled_from([2600, 4000])),
            "pool.p.kv_tokens": 4096,
            "pool.d.kv_tokens": draw(st.sampled_from([4096, 8192])),
        }
    if draw(st.booleans()):
        overrides["workload.client"] = (
            f"{{ timeout_s = {draw(st.sampled_from([0.03, 0.1, 1.0]))}, "
            f"first_token_timeout_s = {draw(st.sampled_from([0.01, 0.02, 0.029]))}, "
            f"cancel_probability = 0.3, cancel_after_s = {draw(st.sampled_from([0, 0.005, 0.04]))} }}"
        )
    return overrides


def all_is_well(overrides: dict[str, Any], play: Play, lay: Lay, lines: Callable[[Any], bytes]) -> None:
    world = play(overrides)
    outcomes = set(world.records.outcome)
    assert None not in outcomes
    assert "cancelled" not in outcomes or "workload.client" in overrides
    turns_in_order(world, lay(overrides))
    exact = play(overrides, exact=True, checked=False)
    assert lines(exact).splitlines() == lines(world).splitlines()


@random_simulations(80)
@given(overrides=talks())
def test_exact_and_fast_are_the_same(
    overrides: dict[str, Any], play: Play, lay: Lay, lines: Callable[[Any], bytes]
) -> None:
    all_is_well(overrides, play, lay, lines)


@random_simulations(40)
@given(overrides=talks())
def test_sessions_alongside_an_aggregated_engine(
    overrides: dict[str, Any], play: Play, lay: Lay, lines: Callable[[Any], bytes]
) -> None:
    all_is_well(overrides, partial(play, file=MIXED), partial(lay, file=MIXED), lines)


@pytest.mark.nightly
@settings(max_examples=4_000, deadline=None, suppress_health_check=RELAXED)
@given(overrides=talks())
def test_exact_and_fast_are_the_same_at_night(
    overrides: dict[str, Any], play: Play, lay: Lay, lines: Callable[[Any], bytes]
) -> None:
    all_is_well(overrides, play, lay, lines)
