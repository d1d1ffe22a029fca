"""A shipment posts every token of every layer once, its last piece behind all others, and ends as it went."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.methods.shipment import Piece, Shipment, ShipmentEnd


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int, list[Piece]]:
    """Layers, start, stop, and the pieces of a prompt from its first token on, in some order that P may offer them."""
    layers, stop = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    start = draw(st.integers(0, stop - 1))
    pieces = []
    for layer in range(layers):
        ends = sorted({*draw(st.lists(st.integers(1, stop), max_size=4)), stop})
        pieces += [Piece(layer, before, end) for before, end in zip([0, *ends], ends, strict=False)]
    return layers, start, stop, draw(st.permutations(pieces))


@settings(max_examples=300, derandomize=True)
@given(split=splits(), data=st.data())
def test_everything_goes_once_and_the_last_piece_behind_all_others(
    split: tuple[int, int, int, list[Piece]], data: st.DataObject
) -> None:
    layers, start, stop, pieces = split
    shipment = Shipment(layers, start, stop)
    posted: Counter[tuple[int, int]] = Counter()
    in_flight: list[Piece] = []
    waiting = list(pieces)
    while waiting or in_flight:
        assert (shipment.ending() is None) == bool(in_flight or not shipment.all_posted)
        if waiting and (not in_flight or data.draw(st.booleans())):
            shipment.offer(waiting.pop(0))
        elif in_flight:
            shipment.landed(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        while (piece := shipment.next()) is not None:
            posted.update((piece.layer, token) for token in range(piece.start, piece.stop))
            assert not (shipment.all_posted and in_flight), "its notification would overtake data"
            in_flight.append(piece)
    assert shipment.ending() is ShipmentEnd.SENT
    assert posted == Counter({(layer, token): 1 for layer in range(layers) for token in range(start, stop)})


def test_a_piece_that_is_taken_back_can_be_posted_again() -> None:
    shipment, pieces = Shipment(2, 0, 8), [Piece(0, 0, 8), Piece(1, 0, 8)]
    for piece in pieces:
        shipment.offer(piece)
    assert shipment.next() == pieces[0]
    shipment.recall(pieces[0])
    assert shipment.ready == 1, "the last piece waits until the first has landed"
    for piece in pieces:
        assert shipment.next() == piece
        assert shipment.next() is None
        shipment.landed(piece)
    assert shipment.ending() is ShipmentEnd.SENT


@settings(max_examples=300, derandomize=True)
@given(split=splits(), data=st.data())
def test_what_is_halted_or_lost_posts_nothing_more_and_ends_with_what_is_under_way(
    split: tuple[int, int, int, list[Piece]], data: st.DataObject
) -> None:
    layers, start, stop, pieces = split
    shipment = Shipment(layers, start, stop)
    for piece in pieces[: data.draw(st.integers(0, len(pieces)))]:
        shipment.offer(piece)
    in_flight = []
    while (found := shipment.next()) is not None and data.draw(st.booleans()):
        in_flight.append(found)
    if found is not None:
        in_flight.append(found)
    loses = bool(in_flight) and data.draw(st.booleans())
    complete = shipment.all_posted and not loses
    if loses:
        shipment.lost()
        in_flight.pop()
    else:
        shipment.halt()
    for piece in pieces:
        shipment.offer(piece)
        assert shipment.next() is None
    for piece in in_flight:
        assert shipment.ending() is None
        shipment.landed(piece)
    expected = ShipmentEnd.FAILED if loses else ShipmentEnd.SENT if complete else ShipmentEnd.STOPPED
    assert shipment.ending() is expected


def test_a_fork_is_independent() -> None:
    shipment = Shipment(2, 0, 8)
    shipment.offer(Piece(0, 0, 8))
    other = shipment.fork()
    assert other.fingerprint() == shipment.fingerprint()
    posted = other.next()
    assert posted is not None
    assert shipment.next() == posted
    other.landed(posted)
    assert other.fingerprint() != shipment.fingerprint()


@settings(max_examples=200, derandomize=True)
@given(split=splits(), data=st.data())
def test_what_is_recalled_goes_again_and_nothing_twice(
    split: tuple[int, int, int, list[Piece]], data: st.DataObject
) -> None:
    layers, start, stop, pieces = split
    shipment = Shipment(layers, start, stop)
    for piece in pieces:
        shipment.offer(piece)
    landed: Counter[tuple[int, int]] = Counter()
    recalls = data.draw(st.integers(0, 5))
    while (found := shipment.next()) is not None:
        if recalls:
            recalls -= 1
            shipment.recall(found)
            assert not shipment.all_posted
            continue
        shipment.landed(found)
        landed.update((found.layer, token) for token in range(found.start, found.stop))
    assert shipment.ending() is ShipmentEnd.SENT
    assert landed == Counter({(layer, token): 1 for layer in range(layers) for token in range(start, stop)})
