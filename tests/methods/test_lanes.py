"""Lanes post in the order of their method, never more than there are lanes, and of what has been stopped nothing more.

Random schedules are played to `Lanes` and to a model that looks through all operations at every step.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.methods.catalogue import METHODS
from pdflow.methods.lanes import LaneRules, Lanes, lane_rules
from pdflow.methods.method import AS_PUBLISHED, Turns
from pdflow.methods.shipment import Piece, Shipment, ShipmentEnd, whole
from pdflow.version import compiled
from pdflow_sim.check.mutants.catalogue import MUTANTS

WIDTHS = st.sampled_from([1, 1, 2, 3, None])
RULES = st.builds(
    LaneRules,
    in_layers=st.booleans(),
    as_offered=st.booleans(),
    writes=WIDTHS,
    reads=WIDTHS,
    turns=st.sampled_from(Turns),
)


@attrs.define(eq=False)
class Known:
    """What the model keeps of an operation."""

    key: int
    xid: str
    reads: bool
    shipment: Shipment
    begun: bool = False
    seen: int = 0
    """Pieces that have their turn, posted or not."""
    posted: dict[Piece, bool] = attrs.field(factory=dict)
    """What is under way, and whether it has a lane."""

    @property
    def ready(self) -> int:
        """Asked of `next` alone."""
        trial, count = self.shipment.fork(), 0
        while self.begun and trial.next() is not None:
            count += 1
        return count


class Model:
    """The same rules, by looking at everything."""

    def __init__(self, rules: LaneRules) -> None:
        self.rules = rules
        self.known: dict[int, Known] = {}
        self.ready: dict[str, list[Piece]] = {}
        self.turns: list[Known] = []

    def under_way(self, reads: bool) -> int:
        return sum(sum(one.posted.values()) for one in self.known.values() if one.reads == reads)

    def free(self, reads: bool) -> bool:
        width = self.rules.reads if reads else self.rules.writes
        return width is None or self.under_way(reads) < width

    def look(self) -> None:
        """Who can post more than before has as many turns more."""
        for one in self.known.values():
            self.turns += [one] * max(0, one.ready - self.turns.count(one))

    def next(self, reads: bool) -> tuple[int, Piece] | None:
        self.turns = [one for one in self.turns if one.ready]
        line = self.turns if self.rules.turns is Turns.PIECE else list(self.known.values())
        for one in line:
            if one.reads == reads and one.ready and self.free(reads):
                piece = one.shipment.next()
                assert piece is not None
                one.posted[piece] = True
                if self.rules.turns is Turns.PIECE:
                    self.turns.remove(one)
                return one.key, piece
        return None


class Schedule:
    """Things that happen to a rank, drawn one by one, and what it posts then."""

    def __init__(self, data: st.DataObject, rules: LaneRules, *, kind: bool = True) -> None:
        self.data, self.rules = data, rules
        self.kind = kind
        """Nothing is stopped, nothing fails, and no sender goes."""
        self.lanes: Lanes[int] = Lanes(rules)
        self.model = Model(rules)
        self.to_offer = {xid: self._split() for xid in ("x", "y")}
        self.endings: dict[int, ShipmentEnd] = {}
        self.posted_order: list[Any] = []

    def _split(self) -> list[Piece]:
        """A prompt of 12 tokens: its pieces, in the order in which they are offered."""
        layers = 3 if self.rules.in_layers else 1
        bounds = sorted({self.data.draw(st.integers(1, 12)), 12})
        pieces = [Piece(layer, *ends) for layer in range(layers) for ends in zip([0, *bounds], bounds, strict=False)]
        return self.data.draw(st.permutations(pieces))

    def pick(self, among: list[Any]) -> Any:
        return among[self.data.draw(st.integers(0, len(among) - 1))]

    def step(self) -> None:
        """One thing happens, and all is posted that may be."""
        known = list(self.model.known.values())
        may = ["open"] * (len(known) + len(self.endings) < 5)
        may += ["begin"] * any(not one.begun for one in known)
        may += ["offer"] * any(self.to_offer.values())
        in_flight = [(one, piece) for one in known for piece in one.posted]
        may += ["land"] * (2 * bool(in_flight))
        if not self.kind:
            may += ["halt"] * bool(known) + ["lose", "release_lane"] * bool(in_flight)
        if not may:
            return
        verb = self.pick(may)
        if verb in ("land", "lose", "release_lane"):
            self.end(verb, *self.pick(in_flight))
        else:
            getattr(self, verb)()
        self.model.look()
        for reads in (False, True):
            while (expected := self.model.next(reads)) is not None:
                assert self.lanes.next() == expected
                self.posted_order.append(expected)
        assert self.lanes.next() is None
        self.check_endings()

    def open(self) -> None:
        key, xid, reads = (
            len(self.posted_order) + 100 * len(self.endings) + 1,
            self.pick(["x", "y"]),
            self.pick([False, True]),
        )
        while key in self.model.known or key in self.endings:
            key += 1
        start = self.data.draw(st.integers(0, 11))
        layers = 3 if self.rules.in_layers else 1
        one = self.model.known[key] = Known(key, xid, reads, Shipment(layers, start, 12))
        offered = self.rules.as_offered and not reads
        for piece in self.model.ready.get(xid, []) if offered else whole(layers, 12):
            one.shipment.offer(piece)
        self.lanes.add(key, xid, 3, start, 12, reads=reads)

    def begin(self) -> None:
        one = self.pick([one for one in self.model.known.values() if not one.begun])
        one.begun = True
        self.lanes.begin(one.key)

    def offer(self) -> None:
        xid = self.pick([xid for xid, pieces in self.to_offer.items() if pieces])
        piece = self.to_offer[xid].pop(0)
        self.model.ready.setdefault(xid, []).append(piece)
        for one in self.model.known.values():
            if one.xid == xid and self.rules.as_offered and not one.reads:
                one.shipment.offer(piece)
        self.lanes.offer(xid, piece)

    def halt(self) -> None:
        one = self.pick(list(self.model.known.values()))
        one.shipment.halt()
        self.lanes.halt(one.key)

    def end(self, verb: str, one: Known, piece: Piece) -> None:
        if verb == "release_lane":
            one.posted[piece] = False
            self.lanes.release_lane(one.key, piece)
            return
        del one.posted[piece]
        if verb == "land":
            one.shipment.landed(piece)
            self.lanes.landed(one.key, piece)
        else:
            one.shipment.lost()
            self.lanes.lost(one.key, piece)
        if self.data.draw(st.booleans()):
            # A second end of it, of whatever kind, is none.
            self.pick([self.lanes.landed, self.lanes.lost, self.lanes.release_lane, self.lanes.recall])(one.key, piece)

    def check_endings(self) -> None:
        for key, one in list(self.model.known.items()):
            ending = self.lanes.ending(key)
            assert ending is one.shipment.ending()
            if ending is not None:
                del self.model.known[key]
                self.endings[key] = ending
                assert self.lanes.ending(key) is None, "it is told once"
        assert len(self.lanes) == len(self.model.known)


@settings(max_examples=300, derandomize=True)
@given(rules=RULES, steps=st.integers(1, 60), data=st.data())
def test_operations_are_posted_by_the_rules(rules: LaneRules, steps: int, data: st.DataObject) -> None:
    schedule = Schedule(data, rules, kind=False)
    for _ in range(steps):
        schedule.step()
        for reads, width in enumerate((rules.writes, rules.reads)):
            assert width is None or schedule.model.under_way(bool(reads)) <= width


@settings(max_examples=200, derandomize=True)
@given(rules=RULES, data=st.data())
def test_all_is_sent_where_nothing_goes_wrong(rules: LaneRules, data: st.DataObject) -> None:
    schedule = Schedule(data, rules)
    while len(schedule.endings) < 5:
        schedule.step()
    assert set(schedule.endings.values()) == {ShipmentEnd.SENT}
    assert not len(schedule.lanes)


@settings(max_examples=200, derandomize=True)
@given(rules=RULES, before=st.integers(0, 30), after=st.integers(1, 30), data=st.data())
def test_a_fork_goes_on_as_the_other_would_and_changes_nothing_of_it(
    rules: LaneRules, before: int, after: int, data: st.DataObject
) -> None:
    schedule = Schedule(data, rules, kind=False)
    for _ in range(before):
        schedule.step()
    left, then = schedule.lanes, schedule.lanes.fingerprint()
    schedule.lanes = left.fork()
    assert schedule.lanes.fingerprint() == then
    for _ in range(after):
        schedule.step()
    assert left.fingerprint() == then


def test_states_with_other_futures_are_distinguished() -> None:
    """By what is open, what is under way, and whose turn comes."""
    rules = LaneRules(in_layers=True, writes=2, turns=Turns.PIECE)
    lanes = opened(rules, 2, 3)
    seen = [lanes.fingerprint()]
    for expected in (("a", Piece(0, 0, 8)), ("a", Piece(1, 0, 8))):
        assert lanes.next() == expected
        seen.append(lanes.fingerprint())
    lanes.release_lane("a", Piece(1, 0, 8))
    seen.append(lanes.fingerprint())
    lanes.halt("b")
    seen.append(lanes.fingerprint())
    other: Lanes[str] = Lanes(rules)
    for key in "ab":
        other.add(key, key, 3, 0, 8)
    for key in "ba":
        other.begin(key)
    seen.append(other.fingerprint())
    assert len(set(seen)) == len(seen)


def test_lanes_of_a_fork_are_its_own() -> None:
    lanes = opened(LaneRules(writes=1), 2, 1)
    found = lanes.next()
    assert found is not None
    other = lanes.fork()
    other.landed(*found)
    assert other.next() is not None
    assert lanes.next() is None


def opened(rules: LaneRules, ops: int, layers: int) -> Lanes[str]:
    """Operations a, b, c, of 8 tokens, that have all begun."""
    lanes: Lanes[str] = Lanes(rules)
    for key in "abcdef"[:ops]:
        lanes.add(key, key, layers, 0, 8)
        lanes.begin(key)
    return lanes


def posted(lanes: Lanes[str]) -> str:
    """Each piece is posted when the one before has landed: whose they are."""
    keys = ""
    while (found := lanes.next()) is not None:
        keys += found[0]
        lanes.landed(*found)
        lanes.ending(found[0])
    return keys


@pytest.mark.parametrize(
    ("turns", "order"),
    # The last piece of each could be posted only when its others had landed.
    [(Turns.OPERATION, "aaaabbbbcccc"), (Turns.PIECE, "aaabbbcccabc")],
)
def test_one_lane_is_taken_in_turns(turns: Turns, order: str) -> None:
    assert posted(opened(LaneRules(in_layers=True, writes=1, turns=turns), 3, 4)) == order


def a_stop_discards_waiting_pieces() -> None:
    """Of three operations of three pieces one piece has a lane; the first is stopped, and then the third."""
    lanes = opened(LaneRules(in_layers=True, writes=1), 3, 3)
    assert lanes.next() == ("a", Piece(0, 0, 8))
    assert lanes.next() is None
    lanes.halt("a")
    lanes.halt("c")
    assert lanes.ending("a") is None, "its first piece is under way"
    assert lanes.ending("c") is ShipmentEnd.STOPPED
    assert lanes.next() is None
    lanes.landed("a", Piece(0, 0, 8))
    assert lanes.ending("a") is ShipmentEnd.STOPPED
    assert posted(lanes) == "bbb"


def test_a_stop_discards_waiting_pieces() -> None:
    a_stop_discards_waiting_pieces()


@pytest.mark.skipif(compiled(), reason="a compiled machine cannot be patched")
@pytest.mark.parametrize("name", ["stop-cuts-nothing", "stop-cuts-posted-pieces", "posted-without-a-lane"])
def test_each_mutant_of_a_stop_is_noticed(name: str) -> None:
    with MUTANTS[name].applied(), pytest.raises(AssertionError):
        a_stop_discards_waiting_pieces()


def test_a_lane_that_its_sender_has_left_is_free_once() -> None:
    """Its piece is waited for, so its operation has not ended."""
    lanes = opened(LaneRules(writes=1), 3, 1)
    piece = Piece(0, 0, 8)
    assert lanes.next() == ("a", piece)
    lanes.release_lane("a", piece)
    lanes.release_lane("a", piece)
    assert lanes.next() == ("b", piece)
    lanes.lost("a", piece)
    lanes.lost("a", piece)
    assert lanes.next() is None, "b has the only lane"
    assert lanes.ending("a") is ShipmentEnd.FAILED
    lanes.landed("b", piece)
    assert lanes.next() == ("c", piece)


def test_what_is_recalled_waits_for_a_lane_again() -> None:
    lanes = opened(LaneRules(in_layers=True, writes=1), 2, 2)
    first = lanes.next()
    assert first is not None
    lanes.recall(*first)
    assert lanes.next() == first
    lanes.recall(*first)
    lanes.halt("a")
    assert lanes.ending("a") is ShipmentEnd.STOPPED
    assert posted(lanes) == "bb"


@pytest.mark.parametrize("turns", Turns)
def test_what_is_recalled_has_its_turn_where_nothing_else_was_left_to_post(turns: Turns) -> None:
    lanes = opened(LaneRules(turns=turns), 1, 1)
    only = lanes.next()
    assert only is not None
    assert lanes.next() is None
    lanes.recall(*only)
    assert lanes.next() == only


def test_what_was_offered_is_there_for_whoever_comes_later_until_it_is_withdrawn() -> None:
    lanes: Lanes[str] = Lanes(LaneRules(in_layers=True, as_offered=True))
    lanes.offer("x", Piece(0, 0, 8))
    for key in "ab":
        lanes.add(key, "x", 2, 0, 8)
        lanes.begin(key)
        assert lanes.next() == (key, Piece(0, 0, 8))
        assert lanes.next() is None
        lanes.landed(key, Piece(0, 0, 8))
    lanes.withdraw("x")
    lanes.offer("x", Piece(1, 0, 8))
    assert lanes.next() is None, "nothing of what comes now is of the same prompt"
    lanes.add("c", "x", 2, 0, 8)
    lanes.begin("c")
    assert lanes.next() == ("c", Piece(1, 0, 8))
    assert lanes.next() is None


def test_nothing_is_left_of_an_operation_that_has_ended() -> None:
    lanes: Lanes[str] = Lanes(LaneRules(as_offered=True))
    lanes.add("a", "x", 1, 0, 8)
    lanes.begin("a")
    lanes.offer("x", Piece(0, 0, 8))
    assert lanes.next() == ("a", Piece(0, 0, 8))
    lanes.landed("a", Piece(0, 0, 8))
    assert lanes.ending("a") is ShipmentEnd.SENT
    assert lanes.leftovers() == {"prompts with pieces": 1}, "until the prompt is withdrawn"


@pytest.mark.parametrize("dialect", ["strict", AS_PUBLISHED])
@pytest.mark.parametrize("name", METHODS)
def test_rules_follow_from_what_a_method_is(name: str, dialect: str) -> None:
    method = METHODS[name]
    pipeline_policy = method.pipeline_policy(dialect)
    rules = lane_rules(method, pipeline_policy)
    assert (rules.writes, rules.reads) == (pipeline_policy.sending_lanes, pipeline_policy.receiving_lanes)
    queues = name == "mooncake-v0" or name.startswith("p2p-nccl")
    assert (rules.turns is Turns.PIECE) == (queues and dialect == AS_PUBLISHED)
    assert rules.in_layers == (name == "cpu-staged" or name.startswith("p2p-nccl"))
    assert rules.as_offered == (name == "cpu-staged" or name.startswith("p2p-nccl-put"))
    early = method.adapted(True, False)
    assert lane_rules(early, early.pipeline_policy(dialect)).as_offered == (rules.as_offered or not method.pulls)
