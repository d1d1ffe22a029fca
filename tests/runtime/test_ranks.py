"""A rank's memory as peers describe theirs: what cannot be is refused when they meet, and harms nobody later."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import RankMemory, rank_memory
from pdflow.layout.rooms import Room
from pdflow.layout.shapes import KvShape
from pdflow.protocol.ids import EngineInfo, Shards
from runtime.ranks import About, LayoutBook, Rank

SHAPE = KvShape(4, 2, 64, 4, 16)
MEMORY = rank_memory(SHAPE, 8, 1)


class Nowhere:
    """A transport that reaches everybody."""

    name = "nowhere"

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    async def connect(self, peer: str, about: bytes) -> None: ...


def rank() -> Rank:
    layouts = LayoutBook(SHAPE, "push", "exactly-once")
    transport: Any = lambda address, tell: Nowhere()  # noqa: E731
    about = (EngineInfo("e", Shards(1, 1, 16)), 0, SHAPE, 8, layouts, transport)
    return Rank(*about, lambda event: None, lambda peer: None)


def described(memory: RankMemory, room: Room | None = None, slots: int = 9) -> bytes:
    return msgspec.msgpack.encode(About(memory, Shards(1, 1, 16), 0, slots, "nowhere", b"", room))


WRONG: list[dict[str, Any]] = [
    {"block_size": 0},
    {"num_blocks": -1},
    {"num_layers": 1 << 40},
    {"tensors_per_layer": 1 << 40},
    {"num_heads": 0},
    {"cell_bytes": 3},
    {"region_bases": ()},
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.trio
async def test_a_memory_that_cannot_be_is_refused(wrong: dict[str, Any], beside: bool) -> None:
    bad = msgspec.structs.replace(MEMORY, **wrong)
    here = rank()
    with pytest.raises(ValueError, match="p describes a memory that no engine of this model has"):
        await here.meet("p", described(MEMORY, Room("pages", bad)) if beside else described(bad))
    assert not here.peers


@pytest.mark.trio
async def test_one_that_can_be_is_known_from_then_on() -> None:
    here = rank()
    with pytest.raises(ValueError, match="p describes a memory"):
        await here.meet("p", described(MEMORY, slots=0))
    await here.meet("p", described(MEMORY))
    assert here.peers["p"].memory == MEMORY


@given(data=st.binary(max_size=60))
def test_bytes_that_describe_nothing_are_a_sentence(data: bytes) -> None:
    async def meet() -> None:
        with pytest.raises(ValueError, match="p does not say how its memory is reached"):
            await rank().meet("p", data)

    trio.run(meet)
