"""Groups that make room for others: never too many, never one in use, and always the one idle for longest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.methods.nccl.table import Groups, OpenGroup, Use

P, D = ("p0", "p1", "p2"), ("d0", "d1", "d2", "d3")
RANKS = (*P, *D)


class ByHand:
    """The same by lists: a group is its ranks, with when it was last let go of and how many use it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.users: dict[tuple[str, str], int] = {}
        self.last: dict[tuple[str, str], int] = {}
        self.gone: set[tuple[str, str]] = set()
        self.time = 0

    def of(self, rank: str) -> list[tuple[str, str]]:
        return [ranks for ranks in self.users if rank in ranks]

    def use(self, p: str, d: str) -> tuple[bool, bool, set[tuple[str, str]]] | str:
        if (p, d) in self.users:
            self.users[p, d] += 1
            return (False, False, set())
        victims = set()
        for rank in (p, d):
            mine = self.of(rank)
            if len(mine) >= self.most:
                idle = [ranks for ranks in mine if not self.users[ranks]]
                if not idle:
                    return rank
                victims.add(min(idle, key=lambda ranks: self.last[ranks]))
        for ranks in victims:
            del self.users[ranks]
        again = (p, d) in self.gone
        self.gone = (self.gone | victims) - {(p, d)}
        self.users[p, d] = 1
        return (True, again, victims)

    def done(self, ranks: tuple[str, str]) -> None:
        self.time += 1
        self.users[ranks] -= 1
        self.last[ranks] = self.time

    def died(self, dead: str) -> None:
        for ranks in self.of(dead):
            del self.users[ranks]
        self.gone = {ranks for ranks in self.gone if dead not in ranks}


STEPS = st.one_of(
    st.tuples(st.just("use"), st.sampled_from(P), st.sampled_from(D)),
    st.tuples(st.just("use"), st.sampled_from(P), st.sampled_from(D)),
    st.tuples(st.just("done"), st.integers(0, 20), st.none()),
    st.tuples(st.just("die"), st.sampled_from(RANKS), st.none()),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(most=st.integers(1, 3), steps=st.lists(STEPS, max_size=60))
def test_it_is_the_least_recently_used_that_goes(most: int, steps: list[tuple[str, str | int, str | None]]) -> None:
    it, hand = Groups(most), ByHand(most)
    at_work: list[OpenGroup] = []
    for what, first, other in steps:
        if what == "use":
            found, expected = it.use(str(first), str(other)), hand.use(str(first), str(other))
            if isinstance(found, Use):
                assert (found.made, found.again, set(found.closed)) == expected
                at_work.append(found.group)
            else:
                assert found == expected
        elif what == "done" and at_work:
            group = at_work.pop(int(first) % len(at_work))
            there = it.open.get(group.ranks) is group
            assert it.done(group) == (there and not group.users)
            if there:
                hand.done(group.ranks)
        elif what == "die":
            assert set(it.died({str(first)})) == {rank for ranks in hand.of(str(first)) for rank in ranks}
            hand.died(str(first))
        assert {ranks: group.users for ranks, group in it.open.items()} == hand.users
        assert Counter(rank for ranks in it.open for rank in ranks) == Counter(it.counts)
        assert max(it.counts.values(), default=0) <= most
        for group in at_work:
            assert group.users > 0
        for rank in RANKS:
            mine = hand.of(rank)
            assert it.has_room(rank) == (len(mine) < most or not all(hand.users[ranks] for ranks in mine))


def test_one_goes_from_both_its_ranks() -> None:
    it = Groups(1)
    first = it.use("p0", "d0")
    assert isinstance(first, Use)
    assert it.use("p0", "d1") == "p0", "in use"
    assert it.done(first.group)
    second = it.use("p0", "d1")
    assert isinstance(second, Use)
    assert second.closed == (("p0", "d0"),)
    assert it.counts == {"p0": 1, "d0": 0, "d1": 1}
    assert isinstance(it.use("p1", "d0"), Use), "d0 has room"


def test_an_operation_ends_once() -> None:
    it = Groups(1)
    use = it.use("p0", "d0")
    assert isinstance(use, Use)
    it.done(use.group)
    with pytest.raises(AssertionError, match="an operation ends once"):
        it.done(use.group)


def test_a_process_that_replaces_a_dead_one_has_met_no_peer() -> None:
    it = Groups(1)
    for d_rank in ("d0", "d1"):
        use = it.use("p0", d_rank)
        assert isinstance(use, Use)
        it.done(use.group)
    it.died({"d0"})
    use = it.use("p0", "d0")
    assert isinstance(use, Use)
    assert (use.made, use.again) == (True, False)
