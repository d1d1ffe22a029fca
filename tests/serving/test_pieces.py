"""Pieces that wait for room at D, as published: those of a request that ends make room for those behind them."""

from __future__ import annotations

from pdflow.methods.shipment import Piece
from pdflow.methods.staging import KvSize, PagedStaging
from pdflow.protocol.effects import Enqueue, FreeBlocks
from pdflow.protocol.values import Allocation
from pdflow.serving.effects import AcceptPiece, Admit, AskForRoom, GiveBackRoom, TakePiece
from pdflow.serving.events import PieceArrived, RoomDue
from pdflow.serving.pieces import QueueingLanding, name_of
from tests.serving.test_decode import DecodeBench

WHOLE = Piece(0, 0, 100)


def with_two_requests() -> tuple[DecodeBench, list[int]]:
    """Both are admitted at once, whatever there is room for: 112 tokens, which the first request's piece takes."""
    landing = QueueingLanding(PagedStaging(KvSize(1, 1), 16, 7), 1)
    bench = DecodeBench(landing)
    for kind in (TakePiece, AcceptPiece):
        bench.core.perform[kind] = bench.do
    for handle in ("r", "s"):
        bench.request(handle)
        assert bench.protocol(Enqueue(handle)) == [Admit(handle)]
    generations = list(landing.allocations)
    assert bench.role(PieceArrived("d.r0", generations[0], WHOLE)) == [AskForRoom()]
    assert bench.role(RoomDue()) == [TakePiece("d.r0", WHOLE), AcceptPiece(name_of(generations[0], WHOLE))]
    return bench, generations


def test_a_piece_that_waits_gets_the_room_of_a_request_that_ends() -> None:
    bench, (first, second) = with_two_requests()
    assert bench.role(PieceArrived("d.r0", second, WHOLE)) == [AskForRoom()]
    assert bench.role(RoomDue()) == []
    freed = bench.protocol(FreeBlocks(Allocation(first, ())))
    assert freed == [GiveBackRoom(Allocation(first, ())), AskForRoom()]
    assert bench.role(RoomDue()) == [TakePiece("d.r0", WHOLE), AcceptPiece(name_of(second, WHOLE))]


def test_a_piece_of_a_request_that_has_ended_waits_no_more() -> None:
    bench, (_, second) = with_two_requests()
    bench.role(PieceArrived("d.r0", second, WHOLE))
    bench.role(RoomDue())
    freed = bench.protocol(FreeBlocks(Allocation(second, ())))
    assert freed == [GiveBackRoom(Allocation(second, ())), AcceptPiece(name_of(second, WHOLE)), AskForRoom()]
    assert bench.role(RoomDue()) == []
    assert bench.role(PieceArrived("d.r0", second, WHOLE)) == [AcceptPiece(name_of(second, WHOLE))]
