"""Copies of many pieces: by one call for many layers of a block, or one for each piece, the same bytes arrive."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.transports import copying
from pdflow_runtime.transports.copying import WORTH_REPEATS, Copy, Mapped, repeats
from pdflow_runtime.transports.streams.messages import FEW_PIECES, PackedPieces, pack, unpack_pieces

REGION_BYTES = 64 << 10
SOURCE = Mapped(memoryview(random.Random(1).randbytes(REGION_BYTES)))


def checked(pieces: list[Descriptor]) -> PackedPieces:
    found = unpack_pieces(pack(pieces), REGION_BYTES, REGION_BYTES)
    assert isinstance(found, PackedPieces)
    return found


def layers(blocks: list[tuple[int, int, int]], count: int, source_stride: int, target_stride: int) -> list[Descriptor]:
    return [
        Descriptor(at + layer * source_stride, to + layer * target_stride, size)
        for layer in range(count)
        for at, to, size in blocks
    ]


def copied(pieces: list[Descriptor]) -> bytes:
    target = Mapped(memoryview(bytearray(REGION_BYTES)))
    Copy(None, "", 0, SOURCE, target, checked(pieces)).copy()
    return target.view.tobytes()


def one_by_one(pieces: list[Descriptor]) -> bytes:
    target = bytearray(REGION_BYTES)
    for at, to, size in pieces:
        target[to : to + size] = SOURCE.view[at : at + size]
    return bytes(target)


block = st.tuples(st.integers(0, 900), st.integers(0, 15).map(lambda index: 60 * index), st.integers(0, 60))
"""They do not overlap at the target: which of two would win is nobody's promise."""


@given(
    st.lists(block, max_size=9, unique_by=lambda found: found[1]),
    st.integers(0, 30),
    st.integers(0, 1100),
    st.integers(1000, 1100),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 900)), max_size=2),
)
def test_what_arrives_is_what_single_pieces_would_bring(
    blocks: list[tuple[int, int, int]], count: int, source_stride: int, target_stride: int, moved: list[tuple[int, int]]
) -> None:
    pieces = layers(blocks, count, source_stride, target_stride)
    for where, at in moved:
        if pieces:
            index = where % len(pieces)
            pieces[index] = pieces[index]._replace(source_address=at)
    assert copied(pieces) == one_by_one(pieces)


@pytest.mark.parametrize("count", [WORTH_REPEATS, 9, 32, 64])
def test_layers_of_a_prompt_are_seen_to_repeat(count: int) -> None:
    blocks = [(300, 0, 60), (0, 240, 120), (600, 60, 60), (360, 360, 60), (480, 600, 8)]
    assert repeats(checked(layers(blocks, count, 1000, 700))) == count


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        layers([(0, 0, 8)], FEW_PIECES, 100, 100),
        layers([(8 * number, 8 * number, 8) for number in range(6)], WORTH_REPEATS - 1, 100, 100),
        layers([(0, 0, 8)], 64, 0, 100),
        layers([(0, 0, 8)], 64, 100, 0),
        layers([(0, 0, 8), (16, 16, 8)], 64, 100, 100)[:-1],
        [*layers([(0, 0, 8), (16, 16, 8)], 64, 100, 100)[:-1], Descriptor(50_000, 50_000, 8)],
        [*layers([(0, 0, 8), (16, 16, 8)], 64, 100, 100)[:-1], Descriptor(6316, 6316, 7)],
        layers([(0, 0, 8)], 64, 100, 100)[::-1],
    ],
)
def test_what_does_not_repeat_is_not_taken_for_it(pieces: list[Descriptor]) -> None:
    assert repeats(checked(pieces)) == 1
    assert copied(pieces) == one_by_one(pieces)


class Halting(Copy):
    """Halted when it has looked so many times."""

    looks = 0

    @property
    def halted(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    @halted.setter
    def halted(self, _: bool) -> None:
        pass


@pytest.mark.parametrize("repeated", [True, False])
def test_between_batches_a_copy_can_be_halted(repeated: bool) -> None:
    blocks = [(60 * number, 60 * number, 60) for number in range(16)]
    pieces = layers(blocks, 32, 1000, 1000)
    if not repeated:
        random.Random(1).shuffle(pieces)
    target = Mapped(memoryview(bytearray(REGION_BYTES)))
    copy = Halting(None, "", 0, SOURCE, target, checked(pieces))
    copy.looks = 3
    copy.copy()
    arrived = np.frombuffer(target.view, np.uint8) != 0
    batch = 32 if repeated else 16
    assert 0 < arrived.sum() <= 3 * batch * 60
    assert not copy.landed


LARGE = [Descriptor(0, 5, 10_000), Descriptor(20_001, 20_002, 1001), Descriptor(30_000, 40_000, 1000)]


@pytest.mark.trio
@pytest.mark.parametrize("hands", [1, 2, 3])
async def test_large_pieces_are_shared_by_threads(hands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_BYTES", 1000), ("INLINE_BYTES", 0), ("HANDS", hands)):
        monkeypatch.setattr(copying, name, value)
    target = Mapped(memoryview(bytearray(REGION_BYTES)))
    copy = Copy(None, "", 0, SOURCE, target, checked(LARGE))
    await copy.run()
    assert copy.landed
    assert target.view.tobytes() == one_by_one(LARGE)


@pytest.mark.trio
async def test_between_large_pieces_a_copy_can_be_halted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_BYTES", 1000), ("INLINE_BYTES", 0), ("HANDS", 1)):
        monkeypatch.setattr(copying, name, value)
    target = Mapped(memoryview(bytearray(REGION_BYTES)))
    copy = Halting(None, "", 0, SOURCE, target, checked(LARGE))
    copy.looks = 1
    await copy.run()
    assert target.view.tobytes() == one_by_one(LARGE[:1])
    assert not copy.landed
