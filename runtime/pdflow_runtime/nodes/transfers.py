"""The WRITEs and READs of one rank: their pieces are posted at the transport, and each end is reported to the endpoint.

`pdflow/methods/lanes.py` decides, as in simulations, in what pieces an operation goes, which is posted next, and which
pieces a stop still cuts.

Where the transport's DONE is local, a piece counts as landed when a flush behind it has ended: otherwise the notice,
which goes with the last piece, could arrive before the bytes of another. The last piece counts as landed at its DONE,
since no notice follows it. What that DONE means is the endpoint's to decide: it flushes before it reports SENT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
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
from pdflow.protocol.values import Address, BlockTables, Instant, Xid
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.notifications import notification_of

if TYPE_CHECKING:
    from pdflow_runtime.observe.event_log import EventLog
    from pdflow_runtime.observe.transfer_samples import MeasuresTransfers
    from pdflow_runtime.transports.base import Transport

log = logging.getLogger(__name__)


class TransferPlan(NamedTuple):
    """The plan of one operation: its layers, and its pieces as descriptors of source and target."""

    layers: int
    """The number of layers of P's rank that are moved."""
    pieces: Callable[[int | None, int, int], list[Descriptor]]
    """Returns the descriptors of one of these layers, or of all, from a token to another."""


MakePlan: TypeAlias = Callable[[Op, Address, Address, BlockTables, Register], TransferPlan]
"""Plans an operation between P's rank and D's, given P's block tables and what D has granted. KeyError if the other
rank has not said how it is reached, LayoutError if nothing can go between the two."""


@attrs.define(eq=False, kw_only=True)
class OpenTransfer:
    """A WRITE or READ that has not ended."""

    effect: PostWrite | PostRead
    peer: Address
    plan: TransferPlan
    begun_ns: Instant
    posted_ns: Instant = 0
    nbytes: int = 0
    descriptors: int = 0
    unproved: list[int] = attrs.field(factory=list)
    """Pieces whose DONE was local, and for which no flush has been begun."""
    flushing: bool = False
    disconnected: bool = False
    """True if its peer was fenced, or is gone: it ends as failed unless all has landed."""


class InFlightTransfers:
    """The in-flight WRITEs and READs of one rank. Args: `numbers`: by which the transport knows operations; `put` hands
    an event to the rank's endpoint; `incarnation` is its own; `flush` has the transport flush a peer, and calls back
    with how that ended."""

    def __init__(
        self,
        transport: Transport,
        numbers: Iterator[int],
        make_plan: MakePlan,
        put: Callable[[Any], None],
        incarnation: int,
        flush: Callable[[Address, Callable[[bool], None]], None],
    ) -> None:
        self.meter: MeasuresTransfers | None = None
        self.event_log: EventLog | None = None
        self.bytes_posted = 0
        self._transport: Final = transport
        self._make_plan: Final = make_plan
        self._put: Final = put
        self._incarnation: Final = incarnation
        self._numbers: Final = numbers
        self._flush: Final = flush
        self._lanes: Lanes[OpenTransfer] = Lanes(LaneRules())
        self._open: dict[Op, OpenTransfer] = {}
        self._in_flight: dict[int, tuple[OpenTransfer, Piece]] = {}
        """Posted pieces by the number that the transport knows."""
        self._pumping = self._look = False

    def __len__(self) -> int:
        """Return the number of operations in flight."""
        return len(self._open)

    @property
    def rules(self) -> LaneRules:
        return self._lanes.rules

    def adopt(self, rules: LaneRules) -> None:
        """Set the rules by which its method posts; before the first operation."""
        assert not self._open
        self._lanes = Lanes(rules)

    # The endpoint's effects.

    def write(self, effect: PostWrite, me: Address) -> None:
        assert isinstance(effect.notification, Done), "live endpoints use the strict dialect"
        self._begin(effect, effect.to, effect.source.tables, p=me, d=effect.to)

    def read(self, effect: PostRead, me: Address) -> None:
        self._begin(effect, effect.source, effect.groups or (effect.blocks,), p=effect.source, d=me)

    def _begin(
        self, effect: PostWrite | PostRead, peer: Address, tables: BlockTables, *, p: Address, d: Address
    ) -> None:
        registration = effect.registration
        try:
            plan = self._make_plan(effect.op, p, d, tables, registration)
        except (KeyError, LayoutError) as error:
            log.warning("cannot post a transfer with %s: %s", peer, error)
            self._put(over(effect, False))
            return
        start, stop = registration.token_start, registration.token_start + registration.num_tokens
        transfer = OpenTransfer(effect=effect, peer=peer, plan=plan, begun_ns=now_ns())
        self._open[effect.op] = transfer
        self._lanes.add(transfer, registration.xid, plan.layers, start, stop, reads=type(effect) is PostRead)
        self._lanes.begin(transfer)
        self._pump()

    def stop(self, op: Op) -> None:
        """Post no more pieces of this operation."""
        transfer = self._open.get(op)
        if transfer is not None:
            self._lanes.halt(transfer)
            for number, (other, _) in tuple(self._in_flight.items()):
                if other is transfer:
                    self._transport.stop(number)
            self._finish_if_ended(transfer)

    def disconnect(self, peer: Address) -> None:
        """Post no more pieces of any operation with this peer: a fence comes next, or its memory is gone."""
        transfers = [transfer for transfer in self._open.values() if transfer.peer == peer]
        for transfer in transfers:
            transfer.disconnected = True
            self._lanes.halt(transfer)
        for transfer in transfers:
            self._finish_if_ended(transfer)

    # What a prompt's node says.

    def offer(self, xid: Xid, piece: Piece) -> None:
        """Offer a piece of a prompt, whose bytes now lie where they are sent from."""
        self._lanes.offer(xid, piece)
        self._pump()

    def withdraw(self, xid: Xid) -> None:
        """Withdraw all pieces of a prompt: its bytes lie there no more."""
        self._lanes.withdraw(xid)

    # What the transport says of a number.

    def ended(self, number: int, ok: bool) -> None:
        """Handle the transport's report that a piece has ended. A number that is not known belongs to an operation that
        a fence has ended."""
        known = self._in_flight.get(number)
        if known is None:
            return
        transfer, _ = known
        if ok and self._may_be_overtaken(transfer):
            transfer.unproved.append(number)
            self._prove(transfer)
        else:
            self._ended_for_good([number], ok)

    def _may_be_overtaken(self, transfer: OpenTransfer) -> bool:
        """True if a piece that is done here may land behind a notice. The last one is posted alone, with the notice."""
        local = self._transport.done_means == "local" and type(transfer.effect) is PostWrite
        return local and not self._lanes.all_posted(transfer)

    def _prove(self, transfer: OpenTransfer) -> None:
        """Flush the peer to prove that pieces have landed, one flush at a time: what ends meanwhile waits for the
        next."""
        if transfer.flushing or not transfer.unproved:
            return
        transfer.flushing = True
        numbers, transfer.unproved = transfer.unproved, []

        def flushed(ok: bool) -> None:
            transfer.flushing = False
            self._ended_for_good(numbers, ok)
            self._prove(transfer)

        self._flush(transfer.peer, flushed)

    def _ended_for_good(self, numbers: Iterable[int], ok: bool) -> None:
        for number in numbers:
            transfer, piece = self._in_flight.pop(number)
            if ok:
                self._lanes.landed(transfer, piece)
            else:
                self._lanes.lost(transfer, piece)
            self._finish_if_ended(transfer)

    def recalled(self, number: int) -> None:
        """Take back a piece of which nothing has moved, nor will."""
        transfer, piece = self._in_flight.pop(number)
        self._lanes.recall(transfer, piece)
        self._finish_if_ended(transfer)

    # Pieces.

    def _pump(self) -> None:
        """Post what may be posted. The transport may report an end from within a call: then look again."""
        self._look = True
        if self._pumping:
            return
        self._pumping = True
        while self._look:
            self._look = False
            while (found := self._lanes.next()) is not None:
                transfer, piece = found
                self._post(transfer, piece)
        self._pumping = False

    def _post(self, transfer: OpenTransfer, piece: Piece) -> None:
        effect, is_last = transfer.effect, self._lanes.all_posted(transfer)
        try:
            pieces = transfer.plan.pieces(piece.layer if self.rules.in_layers else None, piece.start, piece.stop)
        except (KeyError, LayoutError) as error:
            log.warning("cannot post %s: %s", describe_transfer(transfer), error)
            self._lanes.lost(transfer, piece)
            self._finish_if_ended(transfer)
            return
        number = next(self._numbers)
        self._in_flight[number] = (transfer, piece)
        transfer.posted_ns = now_ns()  # the transport may tell of its end while it is told to begin
        transfer.nbytes += sum([piece.length for piece in pieces])
        transfer.descriptors += len(pieces)
        if type(effect) is PostWrite:
            assert isinstance(effect.notification, Done)
            notification = notification_of(self._incarnation, effect.notification) if is_last else None
            self._transport.write(number, transfer.peer, pieces, effect.registration.target.generation, notification)
        else:
            self._transport.read(number, transfer.peer, pieces)
        if is_last:
            self._all_posted(transfer)

    def _all_posted(self, transfer: OpenTransfer) -> None:
        self.bytes_posted += transfer.nbytes
        transfer.posted_ns = now_ns()
        if self.event_log is not None:
            self.event_log.passed(transfer.effect.op.reg.request_id, "xfer_post", transfer.posted_ns)

    def _finish_if_ended(self, transfer: OpenTransfer) -> None:
        """Report how the operation ended, if it has. There may be a lane for another."""
        ending = self._lanes.ending(transfer)
        op = transfer.effect.op
        if ending is not None:
            if self._open.get(op) is transfer:
                del self._open[op]
            self._note_ended(transfer, ending is ShipmentEnd.SENT)
            stopped = ending is ShipmentEnd.STOPPED and not transfer.disconnected
            self._put(WriteStopped(op) if stopped else over(transfer.effect, ending is ShipmentEnd.SENT))
        self._pump()

    def _note_ended(self, transfer: OpenTransfer, ok: bool) -> None:
        if self.meter is not None and ok:
            self.meter.moved(transfer.begun_ns, transfer.posted_ns, transfer.nbytes, transfer.descriptors)
        elif self.meter is not None:
            self.meter.failed()
        if self.event_log is not None and ok:
            request_id = transfer.effect.op.reg.request_id
            self.event_log.moved(
                transfer.begun_ns, transfer.posted_ns, request_id, transfer.nbytes, transfer.descriptors
            )


def over(effect: PostWrite | PostRead, ok: bool) -> WriteEnded | ReadEnded:
    return WriteEnded(effect.op, ok) if type(effect) is PostWrite else ReadEnded(effect.op, ok)


def describe_transfer(transfer: OpenTransfer) -> str:
    return f"a {'WRITE to' if type(transfer.effect) is PostWrite else 'READ of'} {transfer.peer}"
