"""Ranks over KV that somebody else has allocated, as vLLM has: what one has, the other gets, through real streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, Final

import attrs
import msgspec
import numpy as np
import pytest
import trio

from pdflow.layout.shapes import KvShape, LayoutError, MlaDims
from pdflow.layout.strided import strided_memory
from pdflow.methods.lanes import LaneRules
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import PostRead, PostWrite, ReadWord
from pdflow.protocol.events import ReadEnded, WordRead, WriteEnded
from pdflow.protocol.ids import EngineInfo, LeaseWord, Op, Reg, Shards
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Allocation
from pdflow_runtime.nodes.rank_memory import WORD_BYTES, AdoptedMemory
from pdflow_runtime.nodes.ranks import LayoutBook, Rank, RankMetadata
from pdflow_runtime.transports.adopting import Segment, address_of, own_start
from pdflow_runtime.transports.base import MakeTransport, TransportError
from pdflow_runtime.transports.nixl import INSTALL, NixlTransport
from pdflow_runtime.transports.shm import ShmTransport
from pdflow_runtime.transports.tcp import TcpTransport

TOKENS: Final = 16
BLOCKS: Final = 8
SHAPE: Final = KvShape(3, 2, 8, 1, TOKENS, packed=True)
CELL: Final = SHAPE.cell_bytes
LAYOUTS: Final = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4)}
"""Physical orders of the axes [L, B, H, N, C]."""
NIXL = pytest.param(
    NixlTransport,
    marks=(pytest.mark.nixl, pytest.mark.skipif(find_spec("nixl") is None, reason=f"no NIXL: {INSTALL}")),
    id="nixl",
)


class Engine:
    """The KV of one rank in an engine's own allocations: one, or one for each layer. `kv`: [L, B, H, N, C]."""

    def __init__(self, layout: str, heads: int, *, opaque: bool = False, interior: str = "", block_size: int = TOKENS):
        layers = SHAPE.num_layers
        order = LAYOUTS[layout]
        logical = (layers, BLOCKS, heads, block_size, CELL)
        whole = np.zeros([logical[axis] for axis in order], np.uint8)
        self.kv: Any = whole.transpose(np.argsort(order))
        if layout.startswith("L"):
            self.allocations = [memoryview(np.zeros(layer.size, np.uint8)) for layer in whole]
            physical = [
                np.frombuffer(allocation, np.uint8).reshape(layer.shape)
                for allocation, layer in zip(self.allocations, whole, strict=True)
            ]
            within = [axis - 1 for axis in order if axis]
            self.kv = [layer.transpose(np.argsort(within)) for layer in physical]
            bases = [at * len(self.allocations[0]) for at in range(layers)]
        else:
            self.allocations = [memoryview(whole.reshape(-1))]
            bases = [layer * self.kv.strides[0] for layer in range(layers)]
        block, head, token, _ = self.kv[0].strides
        memory = strided_memory(
            bases,
            block,
            head,
            token,
            num_blocks=BLOCKS,
            block_size=block_size,
            num_heads=heads,
            cell_bytes=CELL,
            opaque=opaque,
        )
        segments = tuple(Segment(address_of(allocation), len(allocation)) for allocation in self.allocations)
        self.adopted = AdoptedMemory(memory, segments, interior)

    def fill(self, first_head: int) -> None:
        """Mark each cell with its layer, block, head and token."""
        for at, layer in enumerate(self.kv):
            blocks, heads, tokens, _ = layer.shape
            layer[..., 0] = at + 1
            layer[..., 1] = np.arange(blocks)[:, None, None]
            layer[..., 2] = first_head + np.arange(heads)[None, :, None]
            layer[..., 3] = np.arange(tokens)[None, None, :]


class AdoptingRank(Rank):
    """A rank of an engine of this TP, whose endpoint takes note."""

    def __init__(self, engine: str, tp: int, number: int, kv: Engine, transport: MakeTransport) -> None:
        self.events: list[Any] = []
        info = EngineInfo(engine, Shards(tp, 1, kv.adopted.memory.block_size))
        shape = msgspec.structs.replace(SHAPE, block_size=kv.adopted.memory.block_size)
        layouts = LayoutBook(SHAPE, "push", "exactly-once")
        super().__init__(info, number, shape, BLOCKS, layouts, transport, self.events.append, 1, adopted=kv.adopted)

    async def until(self, event: Any) -> None:
        with trio.fail_after(60):
            while event not in self.events:
                await trio.sleep(0.001)


def registration(d_tp: int, blocks: Sequence[int], start: int, tokens: int) -> tuple[Reg, Register]:
    reg = Reg("d", 7, 1, "r")
    return reg, Register(reg, "x", 0, Shards(d_tp, 1, TOKENS), Allocation(5, tuple(blocks)), start, tokens, 0, 1, 0)


@asynccontextmanager
async def connected(*ranks: AdoptingRank) -> AsyncIterator[None]:
    """All of these ranks run, and each of P's and of D's knows all of the other's."""
    async with trio.open_nursery() as nursery:
        for rank in ranks:
            await nursery.start(rank.transport.run)
        for one in ranks:
            for other in ranks:
                if one.address[0] != other.address[0]:
                    await one.connect(other.address, other.metadata_for(one.address))
        yield
        for rank in ranks:
            await rank.transport.aclose()


P_BLOCKS: Final = (5, 6, 1, 3)
D_BLOCKS: Final = (2, 3, 7)


def check(d: Engine, first_head: int, start: int, tokens: int, *, whole: bool) -> None:
    """D has the prompt's tokens from `start` on, and zeroes everywhere else; `whole`: the last block is P's to its
    end."""
    source, target = Engine("LBHNC", 2), Engine("LBHNC", d.kv[0].shape[1])
    source.fill(0)
    heads = slice(first_head, first_head + d.kv[0].shape[1])
    for at, block in enumerate(D_BLOCKS):
        left = TOKENS if whole else min(TOKENS, tokens - at * TOKENS)
        for layer in range(SHAPE.num_layers):
            expected = source.kv[layer][P_BLOCKS[start // TOKENS + at], heads, :left]
            target.kv[layer][block, :, :left] = expected
    for layer in range(SHAPE.num_layers):
        assert (d.kv[layer] == target.kv[layer]).all()


@pytest.mark.trio
@pytest.mark.parametrize("transport", [TcpTransport, NIXL])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("p_layout", "d_layout", "opaque"),
    [("LBHNC", "LBHNC", True), ("LBHNC", "BLHNC", False), ("LBNHC", "LBNHC", False), ("BLHNC", "BLHNC", True)],
)
async def test_a_prompt_goes_from_an_engine_s_tensors_into_another_s(
    transport: MakeTransport, p_tp: int, d_tp: int, p_layout: str, d_layout: str, opaque: bool
) -> None:
    start, tokens = TOKENS, 2 * TOKENS + 5
    p_kv = [Engine(p_layout, 2 // p_tp, opaque=opaque, interior="CPU_ATTN float32") for _ in range(p_tp)]
    d_kv = [Engine(d_layout, 2 // d_tp, opaque=opaque, interior="CPU_ATTN float32") for _ in range(d_tp)]
    for number, kv in enumerate(p_kv):
        kv.fill(number)
    p = [AdoptingRank("p", p_tp, number, kv, transport) for number, kv in enumerate(p_kv)]
    d = [AdoptingRank("d", d_tp, number, kv, transport) for number, kv in enumerate(d_kv)]
    reg, register = registration(d_tp, D_BLOCKS, start, tokens)
    pairs = {(p_rank, d_rank) for p_rank in range(p_tp) for d_rank in range(d_tp) if 1 in (p_tp, d_tp)}
    pairs = pairs or {(number, number) for number in range(p_tp)}
    async with connected(*p, *d):
        for p_rank, d_rank in sorted(pairs):
            op, done = Op(reg, p_rank, d_rank), Done(reg, p_rank, 5, 1, 1)
            p[p_rank].write(PostWrite(op, f"d.r{d_rank}", Allocation(3, P_BLOCKS), register, 1, done))
            await p[p_rank].until(WriteEnded(op, True))
        for number, kv in enumerate(d_kv):
            check(kv, number if d_tp == 2 else 0, start, tokens, whole=opaque)
            kv.kv[0][:] = 0
        for p_rank, d_rank in sorted(pairs):
            op = Op(reg, p_rank, d_rank)
            d[d_rank].read(PostRead(op, f"p.r{p_rank}", P_BLOCKS, register, 1, None))
            await d[d_rank].until(ReadEnded(op, True))
        for number, kv in enumerate(d_kv):
            check(kv, number if d_tp == 2 else 0, start, tokens, whole=opaque)


@pytest.mark.trio
@pytest.mark.parametrize("transport", [TcpTransport, NIXL])
async def test_lease_words_lie_beside_the_engine_s_tensors(transport: MakeTransport) -> None:
    p_kv, d_kv = Engine("LBHNC", 2), Engine("LBHNC", 2)
    p, d = AdoptingRank("p", 1, 0, p_kv, transport), AdoptingRank("d", 1, 0, d_kv, transport)
    assert p.words_at == own_start(p_kv.adopted.segments)
    async with connected(p, d):
        reg = Reg("d", 7, 1, "r")
        for index in (0, BLOCKS, BLOCKS + 3):
            lease_word = LeaseWord(index, 1000 + index)
            op = Op(reg, 0, index)
            for rank_does, value in ((p.expose, lease_word.value), (p.bump, 0)):
                rank_does(lease_word)
                d.read_word(ReadWord(op, "p.r0", index))
                await d.until(WordRead(op, value))
        assert not any(map(any, p_kv.allocations))


@pytest.mark.trio
async def test_a_piece_that_begins_within_an_opaque_block_brings_all_of_that_block() -> None:
    p_kv, d_kv = (Engine("LBHNC", 2, opaque=True) for _ in range(2))
    p, d = AdoptingRank("p", 1, 0, p_kv, TcpTransport), AdoptingRank("d", 1, 0, d_kv, TcpTransport)
    for rank in (p, d):
        rank.transfers.adopt(LaneRules(in_layers=False, as_offered=True))
    tokens = 2 * TOKENS + 5
    reg, register = registration(1, D_BLOCKS, TOKENS, tokens)
    op, done = Op(reg, 0, 0), Done(reg, 0, 5, 1, 1)
    async with connected(p, d):
        p.write(PostWrite(op, "d.r0", Allocation(3, P_BLOCKS), register, 1, done))
        for start, stop in ((0, TOKENS + 7), (TOKENS + 7, TOKENS + 9), (TOKENS + 9, TOKENS + tokens)):
            if stop == TOKENS + tokens:
                p_kv.fill(0)  # The prompt is computed meanwhile.
            p.transfers.offer("x", Piece(0, start, stop))
            await trio.testing.wait_all_tasks_blocked()
        await p.until(WriteEnded(op, True))
        check(d_kv, 0, TOKENS, tokens, whole=True)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            Engine("LBHNC", 2, opaque=True, interior="CPU_ATTN float32 avx512"),
            "blocks differ inside: p has those of CPU_ATTN float32 avx512, d.r0 of CPU_ATTN float32 amx: give both",
        ),
        (
            Engine("LBHNC", 2, opaque=True),
            "blocks differ inside: p has those of pdflow's own engine, d.r0 of CPU_ATTN float32 amx: give both",
        ),
        (
            Engine("LBHNC", 2, interior="CPU_ATTN float32 amx"),
            "p keeps blocks of 16 tokens in the order HND, d.r0 of 16 in opaque: give both engines one KV cache layout",
        ),
        (
            Engine("LBHNC", 2, opaque=True, interior="CPU_ATTN float32 amx", block_size=32),
            "p keeps blocks of 32 tokens in the order opaque, d.r0 of 16 in opaque: give both engines",
        ),
        (Engine("LBHNC", 2, opaque=True, interior="a\nb"), "p describes a KV memory that does not fit this model"),
        (Engine("LBHNC", 2, opaque=True, interior="n" * 300), "p describes a KV memory that does not fit this model"),
    ],
)
async def test_ranks_whose_blocks_differ_inside_refuse_each_other(theirs: Engine, message: str) -> None:
    p = AdoptingRank("p", 1, 0, theirs, TcpTransport)
    d = AdoptingRank("d", 1, 0, Engine("LBHNC", 2, opaque=True, interior="CPU_ATTN float32 amx"), TcpTransport)
    with pytest.raises(ValueError, match=message) as caught:
        await d.connect("p", p.metadata_for("d.r0"))
    assert "\n" not in str(caught.value)
    assert not d.peers
    for rank in (p, d):
        await rank.transport.aclose()


def writes_as(digest: bytes) -> Engine:
    """Return an engine whose interior has this digest."""
    engine = Engine("LBHNC", 2)
    engine.adopted = attrs.evolve(engine.adopted, interior_digest=digest)
    return engine


@pytest.mark.trio
@pytest.mark.parametrize("theirs", [b"", b"a"])
async def test_ranks_that_write_blocks_alike_accept_each_other_and_one_of_which_that_is_not_known(
    theirs: bytes,
) -> None:
    p = AdoptingRank("p", 1, 0, writes_as(theirs), TcpTransport)
    d = AdoptingRank("d", 1, 0, writes_as(b"a"), TcpTransport)
    async with connected(p, d):
        assert d.peers["p.r0"].interior_digest == theirs


@pytest.mark.trio
async def test_ranks_that_write_blocks_otherwise_refuse_each_other() -> None:
    p = AdoptingRank("p", 1, 0, writes_as(b"b"), TcpTransport)
    d = AdoptingRank("d", 1, 0, writes_as(b"a"), TcpTransport)
    with pytest.raises(ValueError, match=r"p and d\.r0 store the same keys and values as different bytes"):
        await d.connect("p", p.metadata_for("d.r0"))
    assert not d.peers
    for rank in (p, d):
        await rank.transport.aclose()


@pytest.mark.trio
async def test_token_granular_blocks_may_differ_in_size_and_one_head_in_order() -> None:
    p = AdoptingRank("p", 1, 0, Engine("LBNHC", 2, block_size=32), TcpTransport)
    d = AdoptingRank("d", 2, 1, Engine("LBNHC", 1), TcpTransport)
    assert (p.memory.order, d.memory.order) == ("NHD", "HND")
    async with connected(p, d):
        assert (p.peers["d.r1"].memory, d.peers["p.r0"].memory) == (d.memory, p.memory)


def test_mla_is_adopted_by_each_rank_as_a_whole() -> None:
    shape = KvShape(2, 128, 8, 1, 4, MlaDims(6, 2))
    kv = np.zeros((2, BLOCKS, 1, 4, 8), np.uint8)
    memory = strided_memory(
        [0, kv.strides[0]], *kv.strides[1:4], num_blocks=BLOCKS, block_size=4, num_heads=1, cell_bytes=8
    )
    adopted = AdoptedMemory(memory, (Segment(kv.ctypes.data, kv.nbytes),))
    rank = Rank(
        EngineInfo("p", Shards(4, 1, 4)),
        3,
        shape,
        BLOCKS,
        LayoutBook(shape, "push", "exactly-once"),
        TcpTransport,
        lambda event: None,
        1,
        adopted=adopted,
    )
    assert rank.kv_bytes == kv.nbytes
    trio.run(rank.transport.aclose)


WRONG: Final[list[tuple[dict[str, Any], str]]] = [
    ({"num_blocks": 7}, "num_blocks is 7 in the memory that is adopted, and 8 in the model's rank"),
    ({"block_size": 8}, "block_size is 8 in the memory"),
    ({"num_heads": 1}, "num_heads is 1 in the memory"),
    ({"num_layers": 2}, "num_layers is 2 in the memory"),
    ({"tensors_per_layer": 2}, "tensors_per_layer is 2 in the memory"),
    ({"cell_bytes": 8}, "cell_bytes is 8 in the memory"),
]


def made(adopted: AdoptedMemory, transport: Any = TcpTransport, **how: Any) -> Rank:
    layouts = LayoutBook(SHAPE, "push", "exactly-once")
    info = EngineInfo("p", Shards(1, 1, TOKENS))
    return Rank(info, 0, SHAPE, BLOCKS, layouts, transport, lambda event: None, 1, adopted=adopted, **how)


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_memory_of_another_shape_is_not_adopted(wrong: dict[str, Any], message: str) -> None:
    good = Engine("LBHNC", 2).adopted
    with pytest.raises(LayoutError, match=message):
        made(AdoptedMemory(msgspec.structs.replace(good.memory, **wrong), good.segments))


def test_a_region_must_lie_within_one_segment() -> None:
    kv = Engine("LBHNC", 2)
    good, layer = kv.adopted, len(kv.allocations[0])
    for bases in ((0, layer, 2 * layer + 1), (-1, layer, 2 * layer), (0, layer - 8, 2 * layer), (0, layer, 3 * layer)):
        with pytest.raises(LayoutError, match="are not within one of the 3 segments"):
            AdoptedMemory(msgspec.structs.replace(good.memory, region_bases=bases), good.segments)
    with pytest.raises(LayoutError, match="are not within one of the 0 segments"):
        AdoptedMemory(good.memory, ())


def test_nothing_is_staged_beside_adopted_memory_nor_is_that_read_here() -> None:
    kv = Engine("LBHNC", 2)
    with pytest.raises(ValueError, match="adopted KV memory has no staging memory"):
        made(kv.adopted, staging_factory=lambda memory, address: None)
    rank = made(kv.adopted)
    with pytest.raises(ValueError, match=r"p\.r0 has adopted its memory: only the memory's owner reads and writes it"):
        rank.view[0]
    trio.run(rank.transport.aclose)


def test_a_transport_that_adopts_nothing_is_one_sentence() -> None:
    with pytest.raises(
        TransportError, match="shm cannot adopt memory: it shares only what it has allocated; use nixl, tcp"
    ):
        made(Engine("LBHNC", 2).adopted, ShmTransport)


def test_peers_are_told_where_words_lie_and_what_the_interior_is() -> None:
    kv = Engine("LBHNC", 2, interior="CPU_ATTN")
    rank = made(kv.adopted, slots=5)
    metadata = msgspec.msgpack.decode(rank.metadata_for("d.r0"), type=RankMetadata)
    assert (metadata.memory, metadata.interior, metadata.slots) == (kv.adopted.memory, "CPU_ATTN", 5)
    assert metadata.words_at == own_start(kv.adopted.segments)
    assert metadata.words_at % WORD_BYTES == 0
    trio.run(rank.transport.aclose)
