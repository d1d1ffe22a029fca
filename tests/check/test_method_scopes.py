"""Every transfer method has scopes; what test_scopes.py cannot ask of them."""

from __future__ import annotations

import attrs
import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.serving import staged_sending
from pdflow.workload.rng import Rng, Stream
from pdflow_sim.check.counterexamples.names import find
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.method_scopes import BY_METHOD, COUNTS, repeats_another
from pdflow_sim.check.scopes.scope import ENDLESS, Scope
from pdflow_sim.check.search.liveness import live
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state.symmetry import Symmetry


def test_every_method_is_explored() -> None:
    assert {named.scope.method for named in BY_METHOD} == set(METHODS)
    assert set(BY_METHOD) <= set(SCOPES)
    assert {named.name for named in BY_METHOD} >= {name for name in COUNTS if name.split(",")[0] in METHODS}


def test_scopes_that_repeat_those_of_another_method_are_nightly() -> None:
    """Each has exactly as many states and transitions as its counterpart, which is searched by day."""
    others = {"mooncake-v1": "nixl-push", "p2p-nccl-put-async": "cpu-staged"}
    repeated = [named for named in BY_METHOD if repeats_another(METHODS[named.scope.method], named.name)]
    assert len(repeated) == 13
    by_day = {named.name for named in BY_METHOD if not named.nightly}
    for named in repeated:
        assert named.nightly
        other = named.name.replace(named.scope.method, others[named.scope.method])
        assert COUNTS[named.name] == COUNTS[other]
        assert other in by_day or other.endswith("repeated CANCEL")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "nixl-pull"}, "method=nixl-pull needs pulls=true"),
        ({"method": "cpu-staged", "hit_tokens": 16}, "moves whole prompts"),
        ({"method": "cpu-staged", "horizon": ENDLESS}, "excludes horizon"),
        ({"method": "cpu-staged", "chunks": 2}, "attempts and chunks"),
        ({"method": "p2p-nccl-put", "p_pool": 1}, "has space for all prompts at P"),
    ],
)
def test_what_has_no_meaning_with_a_method_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relation(Scope(**wrong))


def test_requests_of_a_method_are_not_taken_for_one_another() -> None:
    """They queue for room in turn, which a renaming would have to know."""
    assert Symmetry(relation(Scope(requests=2)).space).others
    assert not Symmetry(relation(Scope(method="cpu-staged", requests=2)).space).others


def test_what_a_small_memory_holds_waits_for_the_engine() -> None:
    """A Commit gives no room back: the KV has yet to be loaded into blocks."""
    world = relation(
        Scope(method="p2p-nccl-put", requests=2, pool=1, **dict.fromkeys(("abort", "deadline", "stall"), 0))
    )
    state = world.turns.start()
    for name in (
        "finish x0",
        "decode u0-d0000000",
        "decode u1-d0000001",
        "room D",
        "handshake D.r0 -> P.r0",
        "deliver Register u0-d0000000 D.r0 -> P.r0",
        "handshake P.r0 -> D.r0",
        "read PostWrite u0-d0000000 r0->r0 by P.r0 layer 0 from 0",
        "land PostWrite u0-d0000000 r0->r0 by P.r0 layer 0 from 0",
        "read PostWrite u0-d0000000 r0->r0 by P.r0 layer 1 from 0",
        "land PostWrite u0-d0000000 r0->r0 by P.r0 layer 1 from 0",
        "notice PostWrite u0-d0000000 r0->r0 by P.r0",
    ):
        move = find(world, state, name)
        assert move is not None, name
        state = world.apply(state, move)
    assert find(world, state, "room D") is None
    loaded = find(world, state, "load u0-d0000000")
    assert loaded is not None
    assert find(world, world.apply(state, loaded), "room D") is not None


def test_two_full_memories_would_wait_for_each_other_if_p_had_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """P's room is x1's, D's is u0's, until a deadline comes. So P's comes with the WRITE."""
    scope = next(named.scope for named in BY_METHOD if named.name == "cpu-staged, two requests and no timer")
    monkeypatch.setattr(staged_sending, "comes_with_the_write", lambda *_: False)
    found = shortest(relation(scope))
    assert found is not None
    assert found.broken.name == "L1"


SEVERAL = ("drop", "dup", "err", "abort", "prefill_abort", "withdraw", "preempt")
SELDOM = ("unreachable", "lose", "p_restart", "d_restart")
UNASKED = (
    *("timer", "drop", "lose", "restart", "abort", "cancel prefill", "abort prefill", "preempt", "error", "withdraw"),
    *("unreachable", "duplicate", "delay"),
)


def cluster(rng: Stream) -> Scope:
    """Larger than any scope that is searched whole."""
    of = [named.scope for named in BY_METHOD if named.name.endswith("two requests")]
    return attrs.evolve(
        of[rng.below(len(of))],
        requests=1 + rng.below(3),
        p_tp=1 + rng.below(2),
        d_tp=2,
        d_engines=1 + rng.below(2),
        pool=rng.below(3),
        late=rng.below(3) == 0,
        decodes=rng.below(3) == 0,
        lagging=rng.below(3) == 0,
        done_is_remote=rng.below(3) > 0,
        sync=1,
        **{fault: rng.below(3) for fault in SEVERAL},
        **{fault: rng.below(5) // 4 for fault in SELDOM},
    )


def test_nothing_breaks_in_larger_clusters_and_everything_ends() -> None:
    """Random schedules; what nobody asks for comes seldom."""
    rng = Rng(18332).stream("methods")
    for _ in range(50):
        world = relation(cluster(rng))
        for _ in range(10):
            state = world.turns.start()
            for _ in range(10 + rng.below(60)):
                moves = world.moves(state)
                if rng.below(6):
                    moves = [move for move in moves if move[0] not in UNASKED] or moves
                if moves:
                    state = world.apply(state, moves[rng.below(len(moves))])
            live(world, [state])
