"""Shrinking: stories of random runs come down to nearly the shortest, and their scopes to what they need."""

from __future__ import annotations

import attrs
import pytest

from pdflow.protocol.dialect import STRICT
from pdflow_sim.check.counterexamples.replay import lenient, named
from pdflow_sim.check.counterexamples.shrink import minimal, replay, shrink
from pdflow_sim.check.counterexamples.simpler import loosely, simpler
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.ordered import ordered
from pdflow_sim.check.scopes.scope import FaultKind, Scope
from pdflow_sim.check.search.campaign import WalkTask, walks
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.search.swarm import with_budget
from pdflow_sim.check.state.cluster import ScopeCluster
from tests.check.test_walk import (
    PLANTED,
    cancel_in_flight_is_answered_at_once,
    deadline_frees_at_once,
    failed_write_counts_as_sent,
    lease_frees_under_a_write,
)

RATIO = 1.3
"""How much longer than the shortest a shrunk story may be (issue 3)."""


def test_ddmin_leaves_what_is_needed() -> None:
    asked = []

    def breaks(names: list[str]) -> bool:
        asked.append(names)
        return {"c", "k", "p"} <= set(names)

    assert minimal("abcdefghijklmnopqrstuvwxyz", breaks) == ["c", "k", "p"]  # type: ignore[arg-type]
    assert len(asked) < 80
    assert minimal(["a"], lambda names: True) == ["a"]


@pytest.mark.parametrize(
    "plant",
    [
        lease_frees_under_a_write,
        deadline_frees_at_once,
        cancel_in_flight_is_answered_at_once,
        failed_write_counts_as_sent,
    ],
    ids=lambda plant: plant.__name__,
)
def test_counterexamples_shrink_to_nearly_the_shortest(plant) -> None:  # type: ignore[no-untyped-def]
    broken = dict(PLANTED)[plant]
    with plant():
        failure = walks(WalkTask(dialect=STRICT), range(1_000)).failures[broken]
        short = shrink(failure.scope, failure.names, broken, small=0)
        assert short.broken.name == broken
        again = replay(ordered(short.scope), short.names)
        assert again.broken is not None
        assert (again.names, again.broken.name) == (short.names, broken)
        best = shortest(relation(short.scope))
        assert best is not None
        assert len(short.names) <= RATIO * len(best.moves)
        confirmed = shrink(failure.scope, failure.names, broken)
        assert confirmed.shortest
        assert len(confirmed.names) == len(best.moves)
        # What another reads of it breaks as well.
        replayed = lenient(relation(confirmed.scope), confirmed.names)
        assert replayed.verdict is not None
        assert replayed.verdict.invariant == broken
        assert replayed.skipped == ()


def test_a_violation_while_everything_settles_is_recorded_to_its_end() -> None:
    """The run stopped before the violation: the story says the calm schedule's moves too."""
    scope = Scope(err=1, abort=0, deadline=0, stall=0)
    with failed_write_counts_as_sent():
        world = ordered(scope)
        counterexample = shortest(world)
        assert counterexample is not None
        names = named(world, counterexample.moves)
        shorter = replay(world, names[:-1])
        assert shorter.settling
        assert shorter.broken is not None
        assert shrink(scope, names[:-1], "S2", small=0).names[-1] == names[-1]


def test_a_counterexample_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="another version"):
        shrink(Scope(), ["finish x0"], "S1")


def test_smaller_scopes_are_smaller_and_their_counterexamples_in_their_names() -> None:
    scope = Scope(requests=3, p_tp=2, d_tp=2, chunks=2, lagging=True, drop=2)
    names = [
        "decode u2-d0000002",
        "handshake D.r1 -> P.r1",
        "deliver Register u2-d0000002 D.r1 -> P.r1",
        "land PostWrite u2-d0000002 r1->r0 by P.r1",
    ]
    seen = list(simpler(scope, names))
    fewer = [moves for smaller, moves in seen if smaller.requests == 2]
    assert [moves[0] for moves in fewer] == ["decode u1-d0000001", "decode u1-d0000001", "decode u2-d0000002"]
    assert ScopeCluster(attrs.evolve(scope, requests=2)).requests[1] == "u1-d0000001"
    one_rank = [moves for smaller, moves in seen if smaller.p_tp == 1]
    assert one_rank[0] == ["decode u2-d0000002"]
    assert one_rank[1][1:] == [
        "handshake D.r1 -> P.r0",
        "deliver Register u2-d0000002 D.r1 -> P.r0",
        "land PostWrite u2-d0000002 r0->r0 by P.r0",
    ]
    assert [smaller.drop for smaller, _ in seen if smaller.drop != 2] == [0, 1]
    assert with_budget(scope, (0,) * len(FaultKind)) == attrs.evolve(scope, drop=0, abort=0, deadline=0, stall=0)


def test_frames_are_alike_whatever_their_fields() -> None:
    assert loosely("deliver Sync #1 u0-d0000000, u1-d0000001 D.r0 -> P.r0") == "deliver Sync D.r0 -> P.r0"
    assert loosely("timer LEASE x0 at P.r0") == "timer LEASE x0 at P.r0"
