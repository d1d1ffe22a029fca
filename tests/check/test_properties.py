"""The laws of the relation, over clusters, budgets and schedules that Hypothesis draws and shrinks.

A schedule is bytes, each taken modulo how much may happen: the same walker follows it that follows seeds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
from hypothesis import event, given
from hypothesis import strategies as st

from pdflow.protocol.dialect import DIALECTS, STRICT
from pdflow.workload.rng import Rng
from pdflow_sim.check.counterexamples.names import find, name
from pdflow_sim.check.moves.ordered import Ordered, ordered
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, TOKENS, FaultKind, Scope
from pdflow_sim.check.search.schedulers import Given, chain, node
from pdflow_sim.check.search.swarm import Manner, quiet
from pdflow_sim.check.search.walk import Walk, WalkPolicy, run
from pdflow_sim.check.state.digest import digest

CLUSTERS = st.builds(
    Scope,
    pulls=st.booleans(),
    p_tp=st.integers(1, 2),
    d_tp=st.just(1),
    requests=st.integers(1, 3),
    same_product=st.booleans(),
    pool=st.integers(0, 1),
    hit_tokens=st.sampled_from([0, BLOCK_TOKENS, TOKENS]),
    lagging=st.booleans(),
    concurrent=st.booleans(),
    chunks=st.integers(1, 2),
    done_is_remote=st.booleans(),
) | st.builds(Scope, d_tp=st.just(2), requests=st.integers(1, 2), lagging=st.booleans())
NOWHERE = (FaultKind.CORRUPT, FaultKind.ROUTER_RESTART)
"""Kinds of faults of strict alone, and of a router, which these clusters do not have."""
BUDGETS = st.tuples(
    *(st.integers(0, 0 if fault in NOWHERE else 1 if "RESTART" in fault.name else 2) for fault in FaultKind)
)
SCHEDULES = st.binary(min_size=20, max_size=100)


@lru_cache(maxsize=8)
def world_of(cluster: Scope) -> Ordered:
    return ordered(cluster)


def follow(cluster: Scope, budget: tuple[int, ...], schedule: bytes) -> tuple[Ordered, Walk]:
    world = world_of(quiet(cluster))
    manner = Manner(scheduler="given", steps=len(schedule))
    return world, run(world, budget, WalkPolicy(world, manner, Given(schedule), Rng(0).stream("unused")))


@given(CLUSTERS, BUDGETS, SCHEDULES)
def test_nothing_breaks_and_everything_ends(cluster: Scope, budget: tuple[int, ...], schedule: bytes) -> None:
    world, record = follow(cluster, budget, schedule)
    assert record.broken is None, record.names(world)
    for stage in world.space.shadow_of(record.end).stages:
        event(f"stage {stage}")


@given(CLUSTERS, BUDGETS, SCHEDULES, st.sampled_from([*DIALECTS.values()]))
def test_a_move_is_a_function_and_its_name_finds_it(
    cluster: Scope, budget: tuple[int, ...], schedule: bytes, dialect: Any
) -> None:
    world, record = follow(attrs.evolve(cluster, dialect=dialect), budget, schedule)
    other = ordered(record.scope)
    state = other.turns.start()
    for left, (before, move) in enumerate(record.steps(world), 1 - len(record.moves)):
        assert digest(world, before) == digest(other, state)
        moves = world.moves(before)
        assert moves == world.moves(before)
        assert move in moves
        reached: dict[str, set[str]] = {}
        for possible in moves if left else ():
            text = name(world, before, possible)
            hash(chain(world, before, possible))
            assert 0 <= node(world, before, possible) < len(world.space.cluster.nodes)
            try:
                after = digest(world, world.apply(before, possible))
            except Exception as error:
                after = type(error).__name__
            reached.setdefault(text, set()).add(after)
        assert [text for text, ends in reached.items() if len(ends) > 1] == []
        found = find(other, state, name(world, before, move))
        assert found is not None
        if left:
            state = other.apply(state, found)


class Doubting:
    """Keeps two endpoints of one fingerprint that came about in different ways, and lets both do the same."""

    def __init__(self, world: Ordered) -> None:
        self.space, self.turns = world.space, world.turns
        self.others: dict[int, Any] = {}
        self.compared = 0
        self.plain_endpoint, self.plain_step = self.space.endpoint, self.turns.step
        self.space.endpoint = self.endpoint  # type: ignore[method-assign]
        self.turns.step = self.step  # type: ignore[method-assign]

    def endpoint(self, node: str, body: Any) -> int:
        number = self.plain_endpoint(node, body)
        if self.space.bodies[number] is not body:
            self.others[number] = body
        return number

    def step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        if end in self.others:
            what = self.turns.events.values[event][1]
            effects = [body.fork().handle(what, 0) for body in (self.space.bodies[end], self.others[end])]
            # In what order they were made is in no fingerprint, and in nothing that is judged.
            assert sorted(map(repr, effects[0])) == sorted(map(repr, effects[1]))
            self.compared += 1
        return self.plain_step(end, event)


@given(st.integers(0, 10_000), CLUSTERS, BUDGETS, st.sampled_from([*DIALECTS.values()]))
def test_endpoints_of_one_fingerprint_do_the_same(
    seed: int, cluster: Scope, budget: tuple[int, ...], dialect: Any
) -> None:
    """What a fingerprint forgets must not matter: the search takes such endpoints for one."""
    world = ordered(quiet(attrs.evolve(cluster, dialect=dialect)))
    doubting = Doubting(world)
    for run_seed in range(seed, seed + 4):
        rng = Rng(run_seed).stream("schedule")
        schedule = bytes(rng.below(256) for _ in range(40))
        record = run(world, budget, WalkPolicy(world, Manner(scheduler="given"), Given(schedule), rng))
        if record.broken is not None and dialect is STRICT:
            assert record.broken.name != "crash", record.broken
    event(f"compared {min(doubting.compared, 3)}")
