"""Policies in a world: everything ends and nothing is left over with any of them, and each does what it is for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdflow.scenario import load
from pdflow_sim.run import RunOptions, prepare, run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
POLICIES = ("round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity")
Play = Callable[..., Any]

TALK = {
    "workload.requests": 120,
    "workload.arrival": '{ process = "poisson", rate_rps = 12.0 }',
    "workload.input_tokens": '{ dist = "uniform", low = 300, high = 900 }',
    "workload.output_tokens": '{ dist = "uniform", low = 20, high = 100 }',
    "workload.sessions.turns": 4,
    "workload.sessions.think_s": '{ dist = "exponential", mean_s = 2.0 }',
    "workload.sessions.new_tokens": '{ dist = "uniform", low = 1, high = 400 }',
    "pool.p.replicas": 3,
    "pool.d.replicas": 3,
    "pool.p.kv_tokens": 100_000,
    "pool.d.kv_tokens": 100_000,
}


def played(example: str, *overrides: str) -> Any:
    world, _ = prepare(load(EXAMPLES / example, overrides=overrides), RunOptions(), [])
    run(world, None, False)
    return world


def hit_share(world: Any, engines: str = "prefills") -> float:
    queries, hits = zip(*(node.prefix_cache() for node in getattr(world, engines)), strict=True)
    return float(sum(hits) / sum(queries))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
def test_everything_ends_with_any_policy(play: Play, lines: Callable[[Any], bytes], policy: str, method: str) -> None:
    overrides = TALK | {"router.policy": policy, "transfer.method": method}
    world = play(overrides)
    assert set(world.records.outcome) == {"completed"}
    assert set(world.records.prefill_engine) == {"p-0", "p-1", "p-2"}
    assert lines(play(overrides, exact=True, checked=False)) == lines(world)
    router = world.router.port.endpoint
    assert not any(router.prefill_choice.loads + router.decode_choice.loads)
    assert router.prefill_choice.open_tokens == router.decode_choice.open_tokens == 0


def test_a_router_that_needs_no_prompt_lengths_receives_none(play: Play) -> None:
    """So that what it costs, and what events.jsonl says, is as it was."""
    seen: dict[str, set[int]] = {"least-loaded": set(), "prefix-aware": set()}
    for policy, tokens in seen.items():

        def observe(node: str, event: Any, effects: Any, now: int, tokens: set[int] = tokens) -> None:
            if type(event).__name__ == "RequestArrived":
                tokens.add(event.prompt_tokens)

        play(TALK | {"router.policy": policy, "workload.requests": 10}, observe=observe)
    assert seen["least-loaded"] == {0}
    assert min(seen["prefix-aware"]) >= 300


def test_sessions_stay_where_they_are_with_affinity(play: Play) -> None:
    used_engines: dict[str, float] = {}
    for policy in ("round-robin", "session-affinity"):
        world = play(TALK | {"router.policy": policy})
        of_session: dict[int, set[str]] = defaultdict(set)
        for (session, _), engine in zip(world.records.sessions, world.records.decode_engine, strict=True):
            of_session[session].add(engine)
        used_engines[policy] = sum(map(len, of_session.values())) / len(of_session)
    assert 1.3 * used_engines["session-affinity"] < used_engines["round-robin"]


def test_prompts_that_return_find_more_with_a_router_that_knows_where_they_were() -> None:
    """Of the Mooncake conversation trace's model, what is shared beyond the first block is a few per cent of all."""
    shares = {
        policy: hit_share(played("conversation.toml", f"router.policy={policy}", "workload.requests=600"))
        for policy in ("round-robin", "least-loaded", "prefix-aware")
    }
    assert shares["prefix-aware"] > 1.2 * shares["round-robin"]
    assert shares["prefix-aware"] > 1.2 * shares["least-loaded"]


def test_p_and_d_are_chosen_each_by_its_policy(play: Play) -> None:
    world = play(TALK | {"router.prefill_policy": "prefix-aware", "router.decode_policy": "two-choices"})
    router = world.router.port.endpoint
    assert (router.prefill_choice.policy, router.decode_choice.policy) == ("prefix-aware", "two-choices")


def test_the_router_remembers_as_much_as_its_engines(play: Play) -> None:
    router = play(TALK | {"router.policy": "prefix-aware"}).router.port.endpoint
    assert router.prefill_choice.capacities == (100_000 // 64,) * 3
    overrides = TALK | {"router.policy": "prefix-aware", "router.prefix_memory_tokens": 640}
    router = play(overrides).router.port.endpoint
    assert all(len(names) == 10 for names in router.decode_choice.known)
