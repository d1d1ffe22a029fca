"""A rank's memory as peers describe theirs: what cannot be is refused when they meet, and harms nobody later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import RankMemory, rank_memory
from pdflow.layout.regions import KvRegion
from pdflow.layout.shapes import KvShape
from pdflow.methods.lanes import LaneRules
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import PostWrite
from pdflow.protocol.events import WriteEnded
from pdflow.protocol.ids import EngineInfo, Op, Reg, Shards
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Allocation
from pdflow_runtime.nodes.ranks import LayoutBook, Rank, RankMetadata
from pdflow_runtime.transports.base import Ended, PeerGone

SHAPE = KvShape(4, 2, 64, 4, 16)
MEMORY = rank_memory(SHAPE, 8, 1)


class Nowhere:
    """A transport that reaches everybody."""

    name = "nowhere"
    done_means = "remote"
    fences = "revoke"

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    async def connect(self, peer: str, description: bytes) -> None: ...

    def write(self, op: int, *args: Any) -> None:
        self.written.append(op)

    def __init__(self) -> None:
        self.written: list[int] = []


def rank(put: Callable[[Any], None] = lambda event: None, dtype: str = "") -> Rank:
    layouts = LayoutBook(SHAPE, "push", "exactly-once")
    transport: Any = lambda address, on_event: Nowhere()  # noqa: E731
    return Rank(EngineInfo("e", Shards(1, 1, 16)), 0, SHAPE, 8, layouts, transport, put, 1, dtype=dtype)


def described(
    memory: RankMemory,
    kv_region: KvRegion | None = None,
    slots: int = 9,
    shards: tuple[int, int, int] = (1, 1, 16),
    dtype: str = "",
) -> bytes:
    return msgspec.msgpack.encode(RankMetadata(memory, Shards(*shards), 0, slots, "nowhere", b"", kv_region, dtype))


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
@pytest.mark.parametrize("in_staging", [False, True])
@pytest.mark.trio
async def test_a_memory_that_cannot_be_is_refused(wrong: dict[str, Any], in_staging: bool) -> None:
    bad = msgspec.structs.replace(MEMORY, **wrong)
    here = rank()
    message = "p describes a KV memory that does not fit this model: give both engines one model"
    if "cell_bytes" in wrong and not in_staging:
        message = r"p keeps 3 bytes of KV for each token and head, e\.r0 256: give all engines one model\.kv_dtype"
    with pytest.raises(ValueError, match=message):
        await here.connect("p", described(MEMORY, KvRegion("pages", bad)) if in_staging else described(bad))
    assert not here.peers


@pytest.mark.parametrize(("theirs", "ours"), [("float16", "bfloat16"), ("float32", "bfloat16")])
@pytest.mark.trio
async def test_kv_in_another_dtype_is_refused_with_both_named(theirs: str, ours: str) -> None:
    here = rank(dtype=ours)
    with pytest.raises(ValueError, match=rf"p keeps KV in {theirs}, e\.r0 in {ours}: give all engines one model\.kv_"):
        await here.connect("p", described(MEMORY, dtype=theirs))
    await here.connect("p", described(MEMORY, dtype=ours))
    await here.connect("q", described(MEMORY))
    assert [*here.peers] == ["p", "q"], "one that does not say its dtype is known by its sizes"


@pytest.mark.trio
async def test_one_that_can_be_is_known_from_then_on() -> None:
    here = rank()
    with pytest.raises(ValueError, match="p describes a KV memory"):
        await here.connect("p", described(MEMORY, slots=0))
    await here.connect("p", described(MEMORY))
    assert here.peers["p"].memory == MEMORY


@pytest.mark.parametrize("shards", [(0, 1, 16), (1 << 40, 1, 16), (1, -1, 16), (1, 1, 0)])
@pytest.mark.trio
async def test_nor_one_that_is_sharded_as_none_can_be(shards: tuple[int, int, int]) -> None:
    here = rank()
    with pytest.raises(ValueError, match="p describes a KV memory"):
        await here.connect("p", described(MEMORY, shards=shards))
    assert not here.peers


@pytest.mark.trio
async def test_a_write_that_waits_for_pieces_ends_with_its_peer() -> None:
    events: list[Any] = []
    here = rank(events.append)
    here.transfers.adopt(LaneRules(in_layers=True, as_offered=True))
    reg, shards, weights = Reg("d", 7, 1, "r"), Shards(1, 1, 16), 1
    registration = Register(reg, "x", 0, shards, Allocation(5, (0,)), 0, 16, 0, weights, 0)
    op, done = Op(reg, 0, 0), Done(reg, 0, 5, 1, weights)
    written: list[int] = here.transport.written  # type: ignore[attr-defined]
    await here.connect("d.r0", described(MEMORY))
    here.write(PostWrite(op, "d.r0", Allocation(3, (2,)), registration, 1, done))
    here.transfers.offer("x", Piece(0, 0, 16))
    here.on_transport_event(Ended(written[0], True))
    here.on_transport_event(PeerGone("d.r0"))
    assert events == [WriteEnded(op, False)]
    await here.connect("d.r0", described(MEMORY))
    here.transfers.offer("x", Piece(1, 0, 16))
    assert len(written) == 1


@given(data=st.binary(max_size=60))
def test_bytes_that_describe_nothing_are_a_sentence(data: bytes) -> None:
    async def connect() -> None:
        with pytest.raises(ValueError, match="the HELLO of p does not describe its memory"):
            await rank().connect("p", data)

    trio.run(connect)
