"""S9: a corrupt peer sends frames that are valid and wrong; whatever they say, requests of other peers do not change.

The frames are any that the real decoder accepts, as a broken peer or a fault of memory could send: another
registration, rank, code, progress, `flushed`, floor, list, or a frame of the other role. Each run is made twice, with
the forged frames and without them: every effect that concerns the honest peer must be the same, at the same time.
Besides, no endpoint raises, timers and counts stay right (S10, S11), everything ends, and at rest nothing is left (L8).

Of the corrupt peer's own requests nothing is claimed but that they end: a false `flushed` or SENT breaks S1 or S3 for
the very registration that it names, since only P can say what it has written. And an xid is a capability: P is not told
which D a prompt is for, so that a D that knows another's xid may take, shorten or renew that prompt. Here a corrupt D
knows the xids of its own requests and names others that do not exist.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.consumer import rules
from pdflow.protocol.consumer.cell import bit_of
from pdflow.protocol.consumer.scheduler import ON as SCHEDULER_ON
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Note, SendLocal
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import HandshakeEnded, PairFailed, Received
from pdflow.protocol.ids import Reg, Shards, engine_of
from pdflow.protocol.invariants.accounting import miscounted
from pdflow.protocol.invariants.timers import too_late, unscheduled
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Disposition,
    Done,
    Fail,
    Progress,
    Register,
    RegisterAck,
    Release,
    Sync,
    SyncItem,
    SyncReply,
    Taken,
)
from pdflow.protocol.phases import ConsumerPhase
from pdflow.protocol.producer.frames import ON_FRAME, ProducerFrames
from pdflow.protocol.values import Allocation
from pdflow.protocol.wire.strict import decode_done, decode_frame, encode_frame
from pdflow.version import compiled
from tests.support.cluster import Cluster
from tests.support.endpoints import engine_info

HONEST, CORRUPT = "good", "bad"
MS = 1_000_000
TIMES_MS = (1, 150, 1_000, 2_500, 31_000)
HELD = ("WRITE", "READ", "handshake", "flush", "word")
Step = tuple[str, Any]
NUMBERING = rf"floor=\d+|seq=\d+(?=, request_id='{HONEST}')"
"""D numbers its registrations at all peers together, and has one floor: frames to one peer show how many others
have."""


class PairOfPeers(Cluster):
    """Two engines of one kind at one of the other; one of the two is corrupt. Request "good" is served by the honest
    one, "bad" by the corrupt one."""

    def __init__(self, corrupt_kind: str, pulls: bool, tp: int) -> None:
        two_p = corrupt_kind == "P"
        p = [engine_info(name, tp) for name in (("P0", "P1") if two_p else ("P0",))]
        d = [engine_info(name, tp) for name in (("D0",) if two_p else ("D0", "D1"))]
        super().__init__(p=tuple(p), d=tuple(d), pulls=pulls, watched=False)
        self.honest, self.corrupt, self.other = (f"{corrupt_kind}0", f"{corrupt_kind}1", "D0" if two_p else "P0")
        self.ends = {HONEST: ("P0", "D0"), CORRUPT: ("P1", "D0") if two_p else ("P0", "D1")}
        self.acts = {name: self.acts_of(name, pulls) for name in self.ends}
        self.seen: dict[str, list[tuple[int, str]]] = defaultdict(list)
        """By node, the time and the text of each effect that leaves the endpoints and concerns the honest peer. An
        answer to the corrupt peer may repeat the name of a request, and concerns its own registration of that name."""

        for peer, node in product(self.ranks_of(self.corrupt), self.ranks_of(self.other)):
            self.feed(node, HandshakeEnded(peer, True, self.incarnations[self.corrupt]))

    def ranks_of(self, engine: str) -> list[str]:
        return [node for node in self.endpoints if "." in node and engine_of(node) == engine]

    def acts_of(self, name: str, pulls: bool) -> Iterator[None]:
        """Perform one act of this request's engines after the other."""
        (p, d), xid, size = self.ends[name], f"x-{name}", 64
        first = 100 if name == HONEST else 200
        acts = [partial(self.prefill, xid, p), partial(self.finish, xid, p)]
        decode = partial(self.decode, name, xid, d, p)
        acts.insert(2 if pulls else 1, decode)
        for number, act in enumerate([*acts, lambda: self.admit_queued(name, d, size)]):
            self.generation = first + number
            act()
            yield

    def admit_queued(self, name: str, d: str, size: int) -> None:
        cell = self.endpoints[d].cells.get(name)
        if cell is not None and cell.phase is ConsumerPhase.QUEUED:
            self.admit(name, d, num_tokens=size)

    def concerns_honest(self, node: str, text: str) -> bool:
        named = HONEST in text and f"to='{self.corrupt}" not in text
        return named or engine_of(node) == self.honest or f"'{self.honest}" in text

    def observe(self, node: str, event: Any, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            text = re.sub(NUMBERING, "", repr(effect))
            if type(effect) not in (Note, SendLocal) and self.concerns_honest(node, text):
                self.seen[node].append((self.now, text))
        endpoint = self.endpoints[node]
        wrong = unscheduled(endpoint) or miscounted(endpoint) or too_late(endpoint, self.now)
        assert not wrong, f"after {event!r}, at {node}, {wrong}"

    def run_steps(self, steps: Sequence[Step], forges: bool) -> None:
        for kind, what in steps:
            if kind == "act":
                next(self.acts[what], None)
            elif kind == "carry":
                self.carry_one(*what)
            elif kind == "hold":
                self.holding ^= {what}
            elif kind == "time":
                self.pass_time(what * MS)
            elif forges:
                self.forge(*what)
        for name in self.ends:
            for _ in self.acts[name]:
                pass
        self.at_rest()

    def carry_one(self, honest: bool, number: int) -> None:
        mine = [item for item in self.pending if (self.corrupt in (item.node[:2], item.peer[:2])) != honest]
        if mine:
            self.carry_out(mine[number % len(mine)])

    def forge(self, sender: int, to: int, incarnation: int, message: Any) -> None:
        """Deliver a frame of the corrupt engine, if the decoder accepts it."""
        senders, receivers = self.ranks_of(self.corrupt), self.ranks_of(self.other)
        try:
            data = encode_frame(message)
        except LocalProtocolError:
            return  # no decoder accepts it
        read = decode_done(data) if isinstance(message, Done) else decode_frame(data)
        assert read == message
        known = self.incarnations[self.corrupt]
        event = Received(senders[sender % len(senders)], known + incarnation, read)
        self.feed(receivers[to % len(receivers)], event)


# Frames.

RANKS, NUMBERS = st.integers(0, 3), st.sampled_from((0, 1, 2, 3, 100, 101, 200, 203, 70_000, 2**32 - 1))
NAMES = st.sampled_from((HONEST, CORRUPT, "nobody"))
CODES, PROGRESS = st.sampled_from(list(Code)), st.sampled_from(list(Progress))


def regs(engines: tuple[str, ...]) -> st.SearchStrategy[Reg]:
    return st.builds(
        Reg, st.sampled_from(engines), st.sampled_from((201, 200)), st.sampled_from((1, 2, 3, 9, 70_000)), NAMES
    )


def frames_of_p() -> st.SearchStrategy[Any]:
    """Return the frames that a P sends."""
    reg = regs(("D0",))
    items = st.builds(SyncItem, reg, PROGRESS, CODES, st.booleans())
    return st.one_of(
        st.builds(RegisterAck, reg, RANKS, PROGRESS, st.sampled_from(((), (0,), (1,), (0, 1), (3,)))),
        st.builds(Done, reg, RANKS, NUMBERS, NUMBERS, NUMBERS),
        st.builds(Fail, reg, RANKS, CODES, st.booleans()),
        st.builds(CancelAck, reg, RANKS, st.sampled_from(list(Disposition)), st.booleans()),
        st.builds(SyncReply, st.integers(0, 4), st.lists(items, max_size=3).map(tuple)),
    )


def frames_of_d() -> st.SearchStrategy[Any]:
    """Return the frames that a D sends."""
    reg = regs(("D0", "D1"))
    xids = st.sampled_from((f"x-{CORRUPT}", "x-nobody"))
    shards = st.builds(Shards, st.integers(1, 3), st.integers(1, 2), st.sampled_from((8, 16, 32)))
    targets = st.builds(Allocation, NUMBERS, st.lists(st.integers(0, 9), max_size=6).map(tuple))
    tokens = st.sampled_from((0, 1, 16, 48, 64, 65))
    return st.one_of(
        st.builds(Register, reg, xids, RANKS, shards, targets, tokens, tokens, NUMBERS, NUMBERS, NUMBERS),
        st.builds(Cancel, reg, NUMBERS),
        st.builds(Release, xids),
        st.builds(Taken, xids, RANKS, st.integers(1, 3)),
        st.builds(
            Sync,
            st.integers(0, 4),
            NUMBERS,
            st.lists(xids, max_size=2).map(tuple),
            st.lists(reg, max_size=4).map(tuple),
        ),
    )


def steps() -> st.SearchStrategy[list[Step]]:
    frames = st.one_of(frames_of_p(), frames_of_d())
    forged = st.tuples(RANKS, RANKS, st.sampled_from((0, 0, 0, 0, 1, -1)), frames)
    return st.lists(
        st.one_of(
            st.tuples(st.just("act"), st.sampled_from((HONEST, CORRUPT))),
            st.tuples(st.just("carry"), st.tuples(st.booleans(), RANKS)),
            st.tuples(st.just("hold"), st.sampled_from(HELD)),
            st.tuples(st.just("time"), st.sampled_from(TIMES_MS)),
            st.tuples(st.just("forge"), forged),
            st.tuples(st.just("forge"), forged),
        ),
        max_size=30,
    )


def interferes(corrupt_kind: str, pulls: bool, tp: int, schedule: Sequence[Step]) -> str:
    """Return what differs for the honest peer; "" if nothing does."""
    runs = [PairOfPeers(corrupt_kind, pulls, tp) for _ in range(2)]
    for run, forges in zip(runs, (False, True), strict=True):
        run.run_steps(schedule, forges)
    without, forged = (run.seen for run in runs)
    for node in sorted({*without, *forged}):
        if without[node] != forged[node]:
            return f"{node}: {without[node]} without forged frames, {forged[node]} with them"
    return ""


@pytest.mark.parametrize("corrupt_kind", ["P", "D"])
@pytest.mark.parametrize("pulls", [False, True])
@given(tp=st.integers(1, 2), schedule=steps())
def test_a_corrupt_peer_changes_nothing_for_others(
    corrupt_kind: str, pulls: bool, tp: int, schedule: list[Step]
) -> None:
    assert interferes(corrupt_kind, pulls, tp, schedule) == ""


# A SYNC in another's name, and faults that the test must notice.


def registered() -> tuple[PairOfPeers, Reg]:
    """A P with a registration of D0, whose prompt is still being computed, and D1, which is corrupt."""
    run = PairOfPeers("D", pulls=False, tp=1)
    run.prefill("x-good", "P0")
    run.decode(HONEST, "x-good", "D0", "P0")
    run.admit(HONEST, "D0")
    run.run()
    (reg,) = (key for key in run.endpoints["P0.r0"].cells if isinstance(key, Reg))
    return run, reg


def test_a_sync_neither_renews_nor_reports_another_engines_registration() -> None:
    run, reg = registered()
    rank = run.endpoints["P0.r0"]
    until = rank.cells[reg].registration_until
    run.now += 100 * MS
    run.forge(0, 0, 0, Sync(1, 0, (), (reg,)))
    assert rank.cells[reg].registration_until == until
    assert [reply.items for reply in run.frames(SyncReply)] == [()]
    run.feed("P0.r0", Received("D0.r0", 201, Sync(1, 0, (), (reg,))))
    assert rank.cells[reg].registration_until == until + 100 * MS


def without_checking_names(self: ProducerFrames, sender: str, message: Any, now: int) -> Any:
    """A rank that takes the sender of a frame for the engine that the frame names."""
    return original(self, f"{message.reg.engine}.r{getattr(message, 'd_rank', 0)}", message, now)


original: Any = None
THEIRS = Reg("D0", 201, 1, HONEST)
OTHERS_TARGET = Register(THEIRS, "x-bad", 0, Shards(1, 1, 16), Allocation(1, (7, 8, 9, 5)), 0, 64, 7, 1, 1)
IN_FLIGHT: list[Step] = [("hold", "WRITE"), *[("act", HONEST)] * 4, ("time", 2_500)]
"""The honest request's WRITE is in flight, and stays so."""


@pytest.mark.parametrize("forged", [OTHERS_TARGET, Cancel(THEIRS, 1)])
def test_a_rank_that_acts_in_anothers_name_is_noticed(forged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule: list[Step] = [*IN_FLIGHT, ("forge", (0, 0, 0, forged))]
    assert interferes("D", False, 1, schedule) == ""
    monkeypatch.setitem(globals(), "original", ON_FRAME[type(forged)])
    monkeypatch.setitem(ON_FRAME, type(forged), without_checking_names)
    assert interferes("D", False, 1, schedule)


@pytest.mark.skipif(compiled(), reason="a compiled rule cannot be exchanged; the source's are")
def test_a_rank_that_counts_answers_of_any_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_any_engine(cell: Any, op: Any, sender: str) -> int:
        return bit_of(cell, op, f"{cell.params.prefill.engine}.r{op.p_rank}")

    schedule: list[Step] = [*IN_FLIGHT, ("forge", (0, 0, 0, Fail(THEIRS, 0, Code.IO, True)))]
    assert interferes("P", False, 1, schedule) == ""
    monkeypatch.setattr(rules, "bit_of", of_any_engine)
    assert "FAILED" in interferes("P", False, 1, schedule)


def test_a_rank_that_raises_on_an_unknown_registration_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def known_only(self: ConsumerScheduler, event: PairFailed, now: int) -> Any:
        return self.store.apply(self.store.cells[event.op.reg.request_id], event, now)

    schedule: list[Step] = [("forge", (0, 0, 0, Fail(Reg("D0", 201, 9, "nobody"), 0, Code.IO, True)))]
    assert interferes("P", False, 1, schedule) == ""
    monkeypatch.setitem(SCHEDULER_ON, PairFailed, known_only)
    with pytest.raises(KeyError):
        interferes("P", False, 1, schedule)
