"""One rank's WRITEs and READs: their pieces are posted at the transport, and the endpoint is told how each has ended.

In what pieces an operation goes, which is posted next, and what a stop still cuts, `pdflow/methods/lanes.py` says, as
in simulations.

Where the transport's DONE is local, a piece counts as landed when a flush behind it has ended: otherwise the notice,
which goes with the last piece, could arrive before the bytes of another. The last piece counts as landed at its DONE,
since no notice follows it. What that DONE means the endpoint judges: it flushes before it says SENT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import attrs

from pdflow.layout.descriptors import Descriptor
from pdflow.layout.shapes import LayoutError
from pdflow.methods.lanes import LaneRules, Lanes
from pdflow.methods.shipment import Piece, ShipmentEnd
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import ReadEnded, WriteEnded, WriteStopped
from pdflow.protocol.ids import Op
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Address, Instant, Xid
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.notifications import notice_of

if TYPE_CHECKING:
    from pdflow_runtime.observe.event_log import EventLog
    from pdflow_runtime.observe.metrics import TransferMeter
    from pdflow_runtime.transports.base import Transport

log = logging.getLogger(__name__)


class TransferPlan(NamedTuple):
    """Where the bytes of one operation are, and where they go."""

    layers: int
    """Of P's rank, that go."""
    pieces: Callable[[int | None, int, int], list[Descriptor]]
    """Of one of these layers or of all, from a token to another."""


FindWay: TypeAlias = Callable[[Op, Address, Address, Sequence[int], Register], TransferPlan]
"""From a rank to a rank: P's blocks, and what D has granted. KeyError if the other one has not said how it is reached,
LayoutError if nothing can go between the two."""


@attrs.define(eq=False, kw_only=True)
class OpenTransfer:
    """One operation under way."""

    effect: PostWrite | PostRead
    peer: Address
    way: TransferPlan
    begun_ns: Instant
    posted_ns: Instant = 0
    nbytes: int = 0
    descriptors: int = 0
    unproved: list[int] = attrs.field(factory=list)
    """Pieces whose DONE was local, and that no flush has been begun for."""
    flushing: bool = False
    cut_off: bool = False
    """Its peer was fenced, or is gone: it ends as failed unless all has landed."""


class InFlightTransfers:
    """Args: `numbers`: by which the transport knows operations; `put` hands an event to the rank's endpoint;
    `incarnation` is its own; `flush` has the transport flush a peer, and calls back with how that ended."""

    def __init__(
        self,
        transport: Transport,
        numbers: Iterator[int],
        find_way: FindWay,
        put: Callable[[Any], None],
        incarnation: int,
        flush: Callable[[Address, Callable[[bool], None]], None],
    ) -> None:
        self.meter: TransferMeter | None = None
        self.event_log: EventLog | None = None
        self.bytes_posted = 0
        self._transport: Final = transport
        self._find_way: Final = find_way
        self._put: Final = put
        self._incarnation: Final = incarnation
        self._numbers: Final = numbers
        self._flush: Final = flush
        self._lanes: Lanes[OpenTransfer] = Lanes(LaneRules())
        self._open: dict[Op, OpenTransfer] = {}
        self._under_way: dict[int, tuple[OpenTransfer, Piece]] = {}
        """By the number that the transport knows."""
        self._pumping = self._look = False

    def __len__(self) -> int:
        """Operations under way."""
        return len(self._open)

    @property
    def rules(self) -> LaneRules:
        return self._lanes.rules

    def adopt(self, rules: LaneRules) -> None:
        """How its method posts; before the first operation."""
        assert not self._open
        self._lanes = Lanes(rules)

    # The endpoint's effects.

    def write(self, effect: PostWrite, me: Address) -> None:
        assert isinstance(effect.notice, Done), "only strict is spoken here"
        self._begin(effect, effect.to, effect.source.blocks, p=me, d=effect.to)

    def read(self, effect: PostRead, me: Address) -> None:
        self._begin(effect, effect.source, effect.blocks, p=effect.source, d=me)

    def _begin(
        self, effect: PostWrite | PostRead, peer: Address, blocks: Sequence[int], *, p: Address, d: Address
    ) -> None:
        grant = effect.grant
        try:
            way = self._find_way(effect.op, p, d, blocks, grant)
        except (KeyError, LayoutError) as error:
            log.warning("a transfer with %s cannot be posted: %s", peer, error)
            self._put(over(effect, False))
            return
        start, stop = grant.token_start, grant.token_start + grant.num_tokens
        order = OpenTransfer(effect=effect, peer=peer, way=way, begun_ns=now_ns())
        self._open[effect.op] = order
        self._lanes.add(order, grant.xid, way.layers, start, stop, reads=type(effect) is PostRead)
        self._lanes.begin(order)
        self._pump()

    def stop(self, op: Op) -> None:
        """Post no more of it."""
        order = self._open.get(op)
        if order is not None:
            self._lanes.halt(order)
            for number, (other, _) in tuple(self._under_way.items()):
                if other is order:
                    self._transport.stop(number)
            self._judge(order)

    def cut_off(self, peer: Address) -> None:
        """Its fence comes next, or its memory is gone: post no more of what is between us."""
        orders = [order for order in self._open.values() if order.peer == peer]
        for order in orders:
            order.cut_off = True
            self._lanes.halt(order)
        for order in orders:
            self._judge(order)

    # What a prompt's node says.

    def offer(self, xid: Xid, piece: Piece) -> None:
        """This lies where it is sent from."""
        self._lanes.offer(xid, piece)
        self._pump()

    def withdraw(self, xid: Xid) -> None:
        """Nothing of it does any more."""
        self._lanes.withdraw(xid)

    # What the transport says of a number.

    def ended(self, number: int, ok: bool) -> None:
        """What nobody waits for was ended by a fence before."""
        known = self._under_way.get(number)
        if known is None:
            return
        order, _ = known
        if ok and self._may_be_overtaken(order):
            order.unproved.append(number)
            self._prove(order)
        else:
            self._ended_for_good([number], ok)

    def _may_be_overtaken(self, order: OpenTransfer) -> bool:
        """Whether a piece that is done here may land behind a notice. The last one is posted alone, with the notice."""
        local = self._transport.done_means == "local" and type(order.effect) is PostWrite
        return local and not self._lanes.all_posted(order)

    def _prove(self, order: OpenTransfer) -> None:
        """One flush at a time: what ends meanwhile is the next one's."""
        if order.flushing or not order.unproved:
            return
        order.flushing = True
        numbers, order.unproved = order.unproved, []

        def flushed(ok: bool) -> None:
            order.flushing = False
            self._ended_for_good(numbers, ok)
            self._prove(order)

        self._flush(order.peer, flushed)

    def _ended_for_good(self, numbers: Iterable[int], ok: bool) -> None:
        for number in numbers:
            order, piece = self._under_way.pop(number)
            if ok:
                self._lanes.landed(order, piece)
            else:
                self._lanes.lost(order, piece)
            self._judge(order)

    def recalled(self, number: int) -> None:
        """None of it has moved, and none will."""
        order, piece = self._under_way.pop(number)
        self._lanes.recall(order, piece)
        self._judge(order)

    # Pieces.

    def _pump(self) -> None:
        """Post what may be posted. The transport may tell of an end while it is told to begin: then look again."""
        self._look = True
        if self._pumping:
            return
        self._pumping = True
        while self._look:
            self._look = False
            while (found := self._lanes.next()) is not None:
                order, piece = found
                self._post(order, piece)
        self._pumping = False

    def _post(self, order: OpenTransfer, piece: Piece) -> None:
        effect, is_last = order.effect, self._lanes.all_posted(order)
        try:
            pieces = order.way.pieces(piece.layer if self.rules.in_layers else None, piece.start, piece.stop)
        except (KeyError, LayoutError) as error:
            log.warning("%s cannot be posted: %s", words(order), error)
            self._lanes.lost(order, piece)
            self._judge(order)
            return
        number = next(self._numbers)
        self._under_way[number] = (order, piece)
        order.posted_ns = now_ns()  # the transport may tell of its end while it is told to begin
        order.nbytes += sum([piece.length for piece in pieces])
        order.descriptors += len(pieces)
        if type(effect) is PostWrite:
            assert isinstance(effect.notice, Done)
            notice = notice_of(self._incarnation, effect.notice) if is_last else None
            self._transport.write(number, order.peer, pieces, effect.grant.target.generation, notice)
        else:
            self._transport.read(number, order.peer, pieces)
        if is_last:
            self._all_posted(order)

    def _all_posted(self, order: OpenTransfer) -> None:
        self.bytes_posted += order.nbytes
        order.posted_ns = now_ns()
        if self.meter is not None:
            self.meter.posted(order.nbytes, order.descriptors, order.posted_ns - order.begun_ns)
        if self.event_log is not None:
            self.event_log.passed(order.effect.op.reg.request_id, "xfer_post", order.posted_ns)

    def _judge(self, order: OpenTransfer) -> None:
        """Tell how the operation ended, if it has. There may be a lane for another."""
        ending = self._lanes.ending(order)
        op = order.effect.op
        if ending is not None:
            if self._open.get(op) is order:
                del self._open[op]
            self._note_ended(order, ending is ShipmentEnd.SENT)
            stopped = ending is ShipmentEnd.STOPPED and not order.cut_off
            self._put(WriteStopped(op) if stopped else over(order.effect, ending is ShipmentEnd.SENT))
        self._pump()

    def _note_ended(self, order: OpenTransfer, ok: bool) -> None:
        if self.meter is not None:
            self.meter.ended(order.begun_ns, ok)
        if self.event_log is not None and ok:
            request_id = order.effect.op.reg.request_id
            self.event_log.moved(order.begun_ns, order.posted_ns, request_id, order.nbytes, order.descriptors)


def over(effect: PostWrite | PostRead, ok: bool) -> WriteEnded | ReadEnded:
    return WriteEnded(effect.op, ok) if type(effect) is PostWrite else ReadEnded(effect.op, ok)


def words(order: OpenTransfer) -> str:
    return f"a {'WRITE to' if type(order.effect) is PostWrite else 'READ of'} {order.peer}"
