"""Told again, a story is the same story; and where it is not, the first difference is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.producer import rules as producer_rules
from pdflow.protocol.producer.cell import IN_FLIGHT, LeaseEnded
from pdflow.protocol.producer.lease import expired_unclaimed
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.counterexamples.counterexample import (
    CounterexampleFile,
    ReplayStep,
    Verdict,
    decode,
    encode,
    read,
)
from pdflow_sim.check.counterexamples.replay import lenient, named, record, strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore, shortest
from pdflow_sim.check.state.digest import digest

ROOT = Path(__file__).resolve().parents[2]
REPLAYS = sorted((ROOT / "tests/replays").glob("*.json"))
REQUEST = "u0-d0000000"

SCOPES = [
    Scope(drop=1, dup=1, sync=1, cancel=1),
    Scope(p_tp=2, lose=1, err=1),
    Scope(d_tp=2, lagging=True, dup=1),
    Scope(requests=2, same_product=True, p_restart=1, d_restart=1),
    Scope(chunks=2, done_is_remote=False, err=1, dup=1),
    Scope(pulls=True, drop=1, err=1, sync=1, unreachable=1),
    Scope(dialect=VLLM_COMPAT, p_tp=2, dup=1, prefill_abort=1),
    Scope(dialect=VLLM_COMPAT, pulls=True, requests=2, sync=1),
    Scope(method="cpu-staged", requests=2, pool=1, p_pool=1, prefill_abort=1, err=1),
    Scope(method="p2p-nccl-get", pulls=True, requests=2, p_pool=1, withdraw=1),
]
WHOLE = [
    Scope(dup=1, deadline=0, stall=0),
    Scope(method="cpu-staged", requests=2, pool=1, p_pool=1, abort=0, deadline=0, stall=0),
]


def wander(scope: Scope, choices: list[int]) -> list[str]:
    """The names of a random path."""
    world = relation(scope)
    state = world.turns.start()
    walked = []
    for choice in choices:
        moves = world.moves(state)
        if not moves:
            break
        move = moves[choice % len(moves)]
        walked.append(names.name(world, state, move))
        state = world.apply(state, move)
    return walked


PATHS = st.tuples(st.sampled_from(SCOPES), st.lists(st.integers(0, 10_000), max_size=30))


@given(PATHS)
def test_a_replay_repeats_its_counterexample(path: tuple[Scope, list[int]]) -> None:
    scope, choices = path
    walked = wander(scope, choices)
    counterexample = decode(encode(record(relation(scope), walked)))
    assert counterexample.moves == walked
    replayed = strict(relation(scope), counterexample)
    assert replayed.mismatch is None
    assert replayed.confirms(counterexample)
    assert replayed.applied == tuple(walked)
    assert lenient(relation(scope), walked) == replayed


@given(PATHS, st.data())
def test_leniently_what_is_impossible_is_skipped(path: tuple[Scope, list[int]], data: st.DataObject) -> None:
    """And what was done is a story of its own: this is what shrinking rests on."""
    scope, choices = path
    walked = wander(scope, choices)
    kept = data.draw(st.lists(st.sampled_from(walked), unique=True)) if walked else []
    world = relation(scope)
    once = lenient(world, [*kept, "deliver nothing"])
    assert len(once.applied) + len(once.skipped) == len(kept) + 1
    again = lenient(world, once.applied)
    assert not again.skipped
    assert again == attrs.evolve(once, skipped=())


@pytest.mark.parametrize("scope", WHOLE, ids=["frames", "memories"])
def test_digests_do_not_depend_on_the_order_of_values(scope: Scope) -> None:
    walked = wander(scope, list(range(100, 130)))
    used = relation(scope)
    explore(used)
    assert record(used, walked) == record(relation(scope), walked)


@pytest.mark.parametrize("scope", WHOLE, ids=["frames", "memories"])
def test_states_have_one_digest_each(scope: Scope) -> None:
    """Of a whole scope: 64 bits suffice, and nothing of a state is left out."""
    world = relation(scope)
    seen = {world.turns.start()}
    level = list(seen)
    while level:
        after = {world.apply(state, move) for state in level for move in world.moves(state)} - seen
        seen |= after
        level = sorted(after)
    assert len(seen) > 1000
    assert len({digest(world, state) for state in seen}) == len(seen)


WANDERING = """
import random
from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.counterexamples import replay
from pdflow_sim.check.counterexamples import counterexample
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import Scope

for scope in (Scope(requests=2, d_tp=2, dup=2, lose=1, lagging=True), Scope(pulls=True, sync=2, p_restart=1)):
    for seed in range(5):
        world, walked, rng = relation(scope), [], random.Random(seed)
        state = world.turns.start()
        while len(walked) < 60 and (moves := world.moves(state)):
            move = rng.choice(moves)
            walked.append(names.name(world, state, move))
            state = world.apply(state, move)
        print(counterexample.encode(replay.record(world, walked)))
"""


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", WANDERING],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count('"after"') > 150


# Where it differs.


def counterexample(*moves: str, scope: Scope | None = None) -> CounterexampleFile:
    world = relation(scope or Scope(dup=1))
    recorded = record(world, moves)
    assert recorded.moves == list(moves)
    return recorded


def with_step(old: CounterexampleFile, k: int, move: str) -> CounterexampleFile:
    steps = list(old.steps)
    steps[k - 1] = ReplayStep(move=move, after=steps[k - 1].after)
    return msgspec.structs.replace(old, steps=tuple(steps))


def test_a_move_that_is_not_possible_is_named_with_what_is() -> None:
    recorded = counterexample("finish x0", f"decode {REQUEST}", f"admit {REQUEST}", "handshake D.r0 -> P.r0")
    mismatch = strict(relation(recorded.scope), with_step(recorded, 3, "admit u0-d000000")).mismatch
    assert mismatch is not None
    assert (mismatch.step, mismatch.expected) == (3, "admit u0-d000000")
    assert f"admit {REQUEST}" in mismatch.possible
    assert mismatch.digests == (recorded.steps[1].after, recorded.steps[1].after)
    assert str(mismatch).startswith(
        f"step 3: expected admit u0-d000000; it is not possible now (did you mean admit {REQUEST}?)\n"
        f"  possible moves:\n    admit {REQUEST}\n    abort {REQUEST}\n"
    )


def test_the_first_state_that_differs_is_named_with_both_digests() -> None:
    recorded = counterexample("finish x0", f"decode {REQUEST}", f"admit {REQUEST}")
    other = with_step(recorded, 2, "timer LEASE x0 at P.r0")
    replayed = strict(relation(recorded.scope), other)
    mismatch = replayed.mismatch
    assert mismatch is not None
    assert (mismatch.step, mismatch.expected) == (2, "timer LEASE x0 at P.r0")
    assert mismatch.digests is not None
    assert mismatch.digests[0] == recorded.steps[1].after != mismatch.digests[1]
    assert replayed.applied == ("finish x0", "timer LEASE x0 at P.r0")
    assert "it leads to another state than recorded" in str(mismatch)
    assert f"{recorded.steps[1].after} recorded" in str(mismatch)
    assert not replayed.confirms(other)


def test_a_start_that_differs_is_step_0() -> None:
    recorded = msgspec.structs.replace(counterexample("finish x0"), start="0" * 16)
    mismatch = strict(relation(recorded.scope), recorded).mismatch
    assert mismatch is not None
    assert str(mismatch).startswith("step 0: expected the state before the first step; it leads to another state")


def test_steps_without_digests_are_not_compared() -> None:
    recorded = counterexample("finish x0", f"decode {REQUEST}")
    bare = msgspec.structs.replace(recorded, start=None, steps=tuple(ReplayStep(move=move) for move in recorded.moves))
    assert strict(relation(recorded.scope), bare).confirms(bare)


def test_steps_beyond_the_last_possible_move_are_a_mismatch() -> None:
    scope = Scope(abort=0, deadline=0, stall=0)
    recorded = counterexample("finish x0", "timer LEASE x0 at P.r0", scope=scope)
    longer = msgspec.structs.replace(recorded, steps=(*recorded.steps, *(ReplayStep(move="restart P"),) * 2))
    assert "it is not possible now" in str(strict(relation(scope), longer).mismatch)


def test_another_verdict_than_the_recorded_one_is_no_confirmation() -> None:
    recorded = counterexample("finish x0")
    claims = msgspec.structs.replace(recorded, verdict=Verdict(invariant="S2", what="x0 is released under a WRITE"))
    replayed = strict(relation(recorded.scope), claims)
    assert replayed.mismatch is None
    assert replayed.verdict is None
    assert not replayed.confirms(claims)


# A planted bug.


@pytest.fixture
def lease_frees_under_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(producer_rules.RULES, (IN_FLIGHT, LeaseEnded), expired_unclaimed)


@pytest.mark.usefixtures("lease_frees_under_a_write")
def test_the_shortest_counterexample_of_a_planted_bug_replays_to_the_same_verdict() -> None:
    world = relation(Scope())
    found = shortest(world)
    assert found is not None
    recorded = decode(encode(record(world, named(world, found.moves), mutant="lease frees under a write")))
    assert recorded.verdict == Verdict(invariant=found.broken.name, what=found.broken.what)
    assert len(recorded.steps) == len(found.moves)
    assert recorded.steps[-1].after is None
    replayed = strict(relation(Scope()), recorded)
    assert replayed.verdict == recorded.verdict
    assert replayed.confirms(recorded)
    # Other budgets, the same names: a mutant's story told in a larger scope.
    assert lenient(relation(Scope(drop=1, dup=1)), recorded.moves).verdict == recorded.verdict


def test_without_its_mutant_a_replay_reports_the_step_where_it_differs(lease_frees_under_a_write, monkeypatch) -> None:
    world = relation(Scope())
    found = shortest(world)
    recorded = record(world, named(world, found.moves))
    monkeypatch.undo()
    replayed = strict(relation(Scope()), recorded)
    assert replayed.mismatch is None
    assert replayed.verdict is None
    assert not replayed.confirms(recorded)


@pytest.mark.usefixtures("lease_frees_under_a_write")
def test_a_replay_that_continues_after_its_violation_is_a_mismatch() -> None:
    world = relation(Scope())
    found = shortest(world)
    assert found is not None
    recorded = record(world, named(world, found.moves))
    longer = msgspec.structs.replace(recorded, steps=(*recorded.steps, ReplayStep(move="finish x0")))
    mismatch = strict(relation(Scope()), longer).mismatch
    assert str(mismatch) == (
        f"step {len(recorded.steps)}: expected timer LEASE x0 at P.r0; "
        "more steps are recorded, but this violates S2: x0 is released under a WRITE"
    )


# What was found once.


@pytest.mark.parametrize("file", REPLAYS, ids=lambda path: path.stem)
def test_what_was_found_once_ends_well(file: Path) -> None:
    recorded = read(file)
    assert recorded.mutant is None, "a mutant's story belongs to the mutants' tests"
    assert recorded.information.note, "one line on what was wrong"
    replayed = strict(relation(recorded.scope), recorded)
    assert replayed.mismatch is None, replayed.mismatch
    assert replayed.verdict is None
    assert replayed.confirms(recorded)


def test_there_are_counterexamples_to_replay() -> None:
    assert len(REPLAYS) >= 2
