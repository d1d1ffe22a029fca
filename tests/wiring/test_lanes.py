"""The simulated and the live rank post the same pieces in the same order, and a stop cuts the same.

One script of operations, offers, ends and stops is played to both: to the simulator's shipping over a fabric on which
nothing moves until the script says so, and to the live rank's orders over such a transport. What counts as posted is
seen where both ask for it, in `Shipment.next`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.methods.catalogue import METHODS
from pdflow.methods.guards import Loss, loss_of
from pdflow.methods.lanes import lane_rules
from pdflow.methods.method import AS_PUBLISHED, Method, PipelinePolicy
from pdflow.methods.shipment import Piece, Shipment, whole
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import ReadEnded, WriteEnded, WriteStopped
from pdflow.protocol.ids import Op, Reg, Shards
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Allocation
from pdflow.scenario.reading.load import load
from pdflow.version import compiled
from pdflow.workload.rng import Rng, Stream
from pdflow_runtime.nodes.transfers import InFlightTransfers, TransferPlan
from pdflow_sim.build import build
from pdflow_sim.network.shipping import Shipping

pytestmark = pytest.mark.skipif(compiled(), reason="what is compiled cannot be watched")

FILE = Path(__file__).parents[1] / "sim/small.toml"
LAYERS = 3
OPS = 6
SCRIPTS = 25


@attrs.frozen
class Case:
    name: str
    dialect: str
    progressive: bool = False
    workers: int | None = None

    @property
    def method(self) -> Method:
        return METHODS[self.name].adapted(self.progressive, False, self.workers)

    @property
    def pipeline_policy(self) -> PipelinePolicy:
        return self.method.pipeline_policy(self.dialect)

    @property
    def overrides(self) -> list[str]:
        settings = {"transfer.method": self.name, "transfer.dialect": self.dialect, "model.num_layers": LAYERS}
        settings["transfer.progressive"] = str(self.progressive).lower()
        if self.pipeline_policy.one_pair:
            settings |= {"pool.p.replicas": 1, "pool.d.replicas": 1}
        if self.workers is not None:
            settings["transfer.num_workers"] = self.workers
        return [f"{key}={value}" for key, value in settings.items()]

    def __str__(self) -> str:
        terms = [self.name, self.dialect] + ["progressive"] * self.progressive
        return " ".join(terms if self.workers is None else [*terms, f"{self.workers} workers"])


CASES = [Case(name, dialect) for name in METHODS for dialect in ("strict", AS_PUBLISHED)]
CASES += [
    Case("nixl-push", "strict", progressive=True),
    Case("mooncake-v1", "strict", workers=1),
    Case("mooncake-v1", "strict", progressive=True, workers=1),
    Case("mooncake-v1", AS_PUBLISHED, progressive=True, workers=2),
]


def stop_of(i: int) -> int:
    """Each operation ends at another token, by which its pieces are known."""
    return 16 * (i + 1)


def effect_of(i: int, method: Method) -> PostWrite | PostRead:
    reg = Reg("d-0", 7, i + 1, f"r{i}.0")
    registration = Register(reg, xid_of(i), 0, Shards(1, 1, 16), Allocation(i + 1, (0,)), 0, stop_of(i), 0, 1, 0)
    op, allocation, peer = Op(reg, 0, 0), Allocation(1, tuple(range(OPS))), i % (1 if method.published.one_pair else 2)
    if method.pulls:
        return PostRead(op, f"p-{peer}.r0", allocation.blocks, registration, 64, None)
    return PostWrite(op, f"d-{peer}.r0", allocation, registration, 64, Done(reg, 0, i + 1, 64, 1))


def xid_of(i: int) -> str:
    return "xy"[i // 2 % 2]


class Posted:
    """What has been posted, in order, by whoever is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[int, Piece]] = []
        find = Shipment.next

        def found(shipment: Shipment) -> Piece | None:
            piece = find(shipment)
            if piece is not None:
                self.log.append((shipment.stop // 16 - 1, piece))
            return piece

        monkeypatch.setattr(Shipment, "next", found)

    def take(self) -> list[tuple[int, Piece]]:
        log, self.log = self.log, []
        return log


class Simulated:
    def __init__(self, case: Case) -> None:
        self.method = case.method
        world = self.world = build(load(FILE, overrides=case.overrides))
        if world.shipping is None:
            assert not self.method.is_carried(case.pipeline_policy)
            world.shipping = Shipping(world.fabric, self.method, case.pipeline_policy, 0, 1)
        self.endings: dict[int, str] = {}
        self.air: dict[tuple[int, Piece], Any] = {}
        fabric: Any = world.fabric
        fabric.begin = self.begin
        fabric.copy = lambda port, path, nbytes, latency_ns, then: then(True)
        fabric.land = lambda flight: self.end_of(flight.op, "sent")
        fabric.fail = lambda flight: self.end_of(flight.op, "failed")
        for node in world.prefills:
            node.receive = self.received
        for i in range(OPS):
            world.records.add(0, stop_of(i), 1)

    def begin(self, flight: Any) -> None:
        in_flight = flight.then.__self__
        self.air[flight.op.reg.seq - 1, in_flight.piece] = flight.then

    def received(self, port: Any, event: Any) -> None:
        assert type(event) is WriteStopped
        self.end_of(event.op, "stopped")

    def end_of(self, op: Op, how: str) -> None:
        assert op.reg.seq - 1 not in self.endings
        self.endings[op.reg.seq - 1] = how

    def post(self, i: int, effect: PostWrite | PostRead) -> None:
        fabric = self.world.fabric
        if type(effect) is PostRead:
            fabric.read(fabric.ports["d-0.r0"], effect, i)
        else:
            assert type(effect) is PostWrite
            fabric.write(fabric.ports["p-0.r0"], effect, i)

    def offer(self, xid: str, piece: Piece) -> None:
        self.world.shipping.offer("p-0.r0", xid, piece)

    def stop(self, op: Op) -> None:
        self.world.shipping.stop(op)

    def end(self, key: tuple[int, Piece], ok: bool) -> None:
        """A piece of several tensors passes the wire several times."""
        while (then := self.air.pop(key, None)) is not None:
            then(ok)
            self.world.clock.run()


class Live:
    """Also the transport of its orders."""

    name = "scripted"
    done_means = "remote"
    fences = "revoke"

    def __init__(self, case: Case) -> None:
        self.method = case.method
        self.endings: dict[int, str] = {}
        self.air: dict[tuple[int, Piece], int] = {}
        self.latest: tuple[int, Piece]
        transport: Any = self
        self.transfers = InFlightTransfers(transport, count(1), self.plan, self.put, 1, lambda peer, then: None)
        self.transfers.adopt(lane_rules(self.method, case.pipeline_policy))

    def plan(self, op: Op, *args: Any) -> TransferPlan:
        def pieces(layer: int | None, first: int, last: int) -> list[Any]:
            self.latest = op.reg.seq - 1, Piece(layer or 0, first, last)
            return []

        return TransferPlan(LAYERS, pieces)

    def write(self, number: int, *args: Any) -> None:
        self.air[self.latest] = number

    read = write

    def put(self, event: Any) -> None:
        i = event.op.reg.seq - 1
        assert i not in self.endings
        if type(event) is WriteStopped:
            self.endings[i] = "stopped"
        else:
            assert type(event) is WriteEnded or type(event) is ReadEnded
            self.endings[i] = "sent" if event.ok else "failed"

    def post(self, i: int, effect: PostWrite | PostRead) -> None:
        if type(effect) is PostRead:
            self.transfers.read(effect, "d-0.r0")
        else:
            assert type(effect) is PostWrite
            self.transfers.write(effect, "p-0.r0")

    def offer(self, xid: str, piece: Piece) -> None:
        self.transfers.offer(xid, piece)

    def stop(self, op: Op | int) -> None:
        """Of an operation, as the script says; of one of the transport's, as the orders say then: it is too late."""
        if isinstance(op, Op):
            self.transfers.stop(op)

    def end(self, key: tuple[int, Piece], ok: bool) -> None:
        self.transfers.ended(self.air.pop(key), ok)


Side: TypeAlias = Simulated | Live
Play: TypeAlias = Callable[[Any, Any], None]


class Script:
    """One random course of events at one rank, each played to both, which then must have posted the same."""

    def __init__(self, case: Case, rng: Stream, posted: Posted) -> None:
        self.rng, self.posted = rng, posted
        self.method, self.rules = case.method, lane_rules(case.method, case.pipeline_policy)
        self.loses = loss_of(case.pipeline_policy.guards, False) is Loss.ENDS
        """Otherwise what is lost is skipped, which no live rank does."""
        self.simulated, self.live = Simulated(case), Live(case)
        self.effects: list[PostWrite | PostRead] = []
        self.taken: list[tuple[int, Piece]] = []
        self.truncated = 0
        """Stops that came before all of their operation had been posted."""
        self.offers = {xid: self.pieces() for xid in "xy"} if self.rules.as_offered else {}

    def pieces(self) -> list[Piece]:
        """All of a prompt, in chunks and layer by layer."""
        if not self.rules.in_layers:
            return whole(1, stop_of(OPS))
        bounds = [0, 24, 56, stop_of(OPS)]
        return [Piece(layer, *ends) for ends in pairwise(bounds) for layer in range(LAYERS)]

    def good(self) -> Iterator[tuple[Play, Any]]:
        if len(self.effects) < OPS:
            yield self.post, len(self.effects)
        for xid, pieces in self.offers.items():
            if pieces:
                yield self.offer, (xid, pieces[0])
        for key in self.simulated.air:
            yield self.end, key

    def bad(self) -> Iterator[tuple[Play, Any]]:
        for key in self.simulated.air if self.loses else ():
            yield self.lose, key
        for i, effect in enumerate(self.effects):
            if i not in self.simulated.endings and type(effect) is PostWrite:
                yield self.stop, effect.op

    def step(self, stops: bool) -> bool:
        """Play one; whether there was any."""
        good, bad = list(self.good()), list(self.bad()) if stops else []
        among = bad if bad and not self.rng.below(6) else good
        if not among:
            return False
        play, arg = among[self.rng.below(len(among))]
        if play == self.post:
            self.effects.append(effect_of(arg, self.method))
        elif play == self.offer:
            self.offers[arg[0]].pop(0)
        elif play == self.stop:
            self.truncated += self.is_truncated(arg.reg.seq - 1)
        play(self.simulated, arg)
        self.simulated.world.clock.run()
        taken = self.posted.take()
        play(self.live, arg)
        assert self.posted.take() == taken
        assert self.simulated.endings == self.live.endings
        assert self.simulated.air.keys() <= self.live.air.keys()
        self.taken += taken
        return True

    def is_truncated(self, i: int) -> bool:
        """Whether not all of an operation has been posted."""
        posted = sum(piece.stop - piece.start for key, piece in self.taken if key == i)
        return posted < (LAYERS if self.rules.in_layers else 1) * stop_of(i)

    # What can happen.

    def post(self, side: Side, i: int) -> None:
        side.post(i, self.effects[i])

    def offer(self, side: Side, arg: tuple[str, Piece]) -> None:
        side.offer(*arg)

    def end(self, side: Side, key: tuple[int, Piece]) -> None:
        side.end(key, True)

    def lose(self, side: Side, key: tuple[int, Piece]) -> None:
        side.end(key, False)

    def stop(self, side: Side, op: Op) -> None:
        side.stop(op)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.trio
async def test_both_post_the_same_and_a_stop_truncates_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    posted = Posted(monkeypatch)
    truncated = 0
    for number in range(SCRIPTS):
        script = Script(case, Rng(16).stream(f"{case} {number}"), posted)
        while script.step(stops=number % 2 > 0):
            pass
        assert len(script.live.endings) == OPS
        assert not len(script.live.transfers)
        truncated += script.truncated
    width = script.rules.reads if case.method.pulls else script.rules.writes
    waits = script.rules.as_offered or (width is not None and width < OPS)
    assert bool(truncated) == (waits and not case.method.pulls)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_fabric_alone_carries_goes_whole_and_at_once(case: Case) -> None:
    """It posts no pieces, and asks nobody for a lane."""
    if build(load(FILE, overrides=case.overrides)).shipping is None:
        rules = lane_rules(case.method, case.pipeline_policy)
        assert not rules.in_layers
        assert not rules.as_offered
        assert rules.writes is rules.reads is None
