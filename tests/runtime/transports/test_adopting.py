"""Memory that somebody else has allocated: where it lies in a region, and that no piece crosses a border of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports import nixl
from pdflow_runtime.transports.adopting import Segment, address_of, adopt, own_start
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import Ended, PeerGone, TransportError, TransportEvent, WordArrived
from pdflow_runtime.transports.registered import MemoryTable, of_one_kind
from pdflow_runtime.transports.segments import MAX_SEGMENTS, DescribedSegment, SegmentMap, parse_segments
from pdflow_runtime.transports.streams.messages import (
    FEW_PIECES,
    AgentHello,
    Description,
    PackedPieces,
    ReadRequest,
    ReadWordRequest,
    Write,
    extent_of,
    frame,
    pack,
    parse,
    parse_description,
    unpack_pieces,
)
from pdflow_runtime.transports.streams.stream import OutgoingMessage
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.transports.agents import (
    ADOPTED,
    BORDERS,
    BY_KERNELS,
    KINDS,
    NIXL,
    TIMEOUT_S,
    Segmented,
    agents,
    pair,
)

SIZES = (4099, 16, 70_000)
"""They end within a page: between them and the agent's own memory is a gap."""
OWN = own_start([Segment(0, size) for size in SIZES])
OWN_BYTES = 100


@pytest.fixture(params=["tcp", NIXL, BY_KERNELS[0]])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@attrs.define
class Adopted:
    """An agent over three segments, with what it has told."""

    transport: StreamAgent
    foreign: list[bytearray]
    own: memoryview
    events: list[TransportEvent]

    async def until(self, event: TransportEvent) -> None:
        with trio.fail_after(TIMEOUT_S):
            while event not in self.events:
                await trio.sleep(0.001)

    def filled(self) -> None:
        for number, memory in enumerate(self.foreign, start=1):
            memory[:] = bytes([number]) * len(memory)
        self.own[:] = b"\xff" * len(self.own)

    def is_zero(self) -> bool:
        return not any(map(any, (*self.foreign, self.own)))


def adopted(kind: str, name: str, own_bytes: int = OWN_BYTES) -> Adopted:
    events: list[TransportEvent] = []
    transport = KINDS[kind](name, events.append)
    foreign = [bytearray(size) for size in SIZES]
    segments = [Segment(address_of(memoryview(memory)), len(memory)) for memory in foreign]
    return Adopted(transport, foreign, adopt(transport, segments, own_bytes), events)


async def connected(kind: str, nursery: trio.Nursery, *, one_way: bool = False) -> tuple[Adopted, Adopted]:
    p, d = adopted(kind, "p.r0"), adopted(kind, "d.r0")
    for agent in (p, d):
        await nursery.start(agent.transport.run)
    await p.transport.connect("d.r0", d.transport.describe())
    if not one_way:
        await d.transport.connect("p.r0", p.transport.describe())
    return p, d


async def closed(*both: Adopted) -> None:
    for agent in both:
        await agent.transport.aclose()


@pytest.mark.trio
async def test_offsets_count_through_the_segments_and_own_memory_is_on_the_next_page(kind: str) -> None:
    async with trio.open_nursery() as nursery:
        p, d = await connected(kind, nursery)
        assert not any(d.own)
        assert address_of(d.own) % mmap.PAGESIZE == 0
        assert (OWN, len(d.own)) == (77_824, OWN_BYTES)
        p.filled()
        pieces = [(4099 + 3, 0, 7), (4099 + 16, 4099, 16), (5, OWN - 4000, 9), (OWN, OWN + 50, 50)]
        p.transport.write(1, "d.r0", [Descriptor(*piece) for piece in pieces], 1, b"n")
        await p.until(Ended(1, True))
        assert d.foreign[0][:8] == b"\2" * 7 + b"\0"
        assert d.foreign[1] == b"\3" * 16
        assert d.foreign[2][OWN - 4000 - 4115 :][:10] == b"\1" * 9 + b"\0"
        assert bytes(d.own) == bytes(50) + b"\xff" * 50
        d.transport.read(1, "p.r0", [Descriptor(4099, 8, 8)])
        await d.until(Ended(1, True))
        assert d.foreign[0][8:17] == b"\2" * 8 + b"\0"
        await closed(p, d)


@pytest.mark.trio
async def test_words_are_read_from_own_memory_and_from_segments(kind: str) -> None:
    async with trio.open_nursery() as nursery:
        p, d = await connected(kind, nursery)
        p.own[8:16] = (2**64 - 3).to_bytes(8, "little")
        p.foreign[1][5:13] = (77).to_bytes(8, "little")
        found = {OWN + 8: 2**64 - 3, 4104: 77, 0: 0}
        none = [4096, 4112, OWN - 8, OWN + 96, OWN + 100, OWN + 4, -8, 1 << 40]
        for op, (address, value) in enumerate([*found.items(), *((address, None) for address in none)]):
            d.transport.read_word(op, "p.r0", address)
            await d.until(WordArrived(op, value))
        await closed(p, d)


CROSSING = [
    (4098, 2),
    (0, 4099 + 17),
    (4099, 17),
    (4115 + 70_000 - 1, 2),
    (4115 + 70_000, 1),
    (OWN - 1, 1),
    (OWN - 1, 2),
    (OWN + 99, 2),
    (OWN + 100, 1),
]
"""Across a border, into the gap, within it, out of it, and beyond the end."""


@pytest.mark.trio
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("at", "length"), CROSSING)
async def test_a_piece_across_a_border_is_not_posted(kind: str, at: int, length: int, many: bool) -> None:
    async with trio.open_nursery() as nursery:
        p, d = await connected(kind, nursery)
        p.filled()
        fine = [Descriptor(0, 0, 8)] * (FEW_PIECES if many else 1)
        sound = 4115  # The third segment holds any of these lengths.
        for op, bad in enumerate((Descriptor(at, sound, length), Descriptor(sound, at, length))):
            p.transport.write(op, "d.r0", [*fine, bad], 1, b"n")
            d.transport.read(op, "p.r0", [*fine, bad])
            assert (p.events[-1], d.events[-1]) == (Ended(op, False), Ended(op, False))
        p.transport.write(9, "d.r0", fine, 1, None)
        await p.until(Ended(9, True))
        d.foreign[0][:8] = bytes(8)
        assert d.is_zero()
        await closed(p, d)


@pytest.mark.trio
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("at", "length"), CROSSING)
async def test_a_peer_that_names_one_ends_its_own_stream(
    kind: str, at: int, length: int, many: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        p, d = await connected(kind, nursery, one_way=True)
        p.filled()
        p.transport._links["d.r0"].stream.post(_crossing_write(at, length, many))
        await d.until(PeerGone("p.r0"))
        assert d.is_zero()
        assert len(d.events) == 1
        assert "closing the connection of p.r0: " in caplog.text
        assert any(
            reason in caplog.text for reason in ("a piece outside its source", "a piece that is not within one segment")
        )
        await closed(p, d)


def _crossing_write(at: int, length: int, many: bool) -> OutgoingMessage:
    pieces = [Descriptor(0, 0, 8)] * (FEW_PIECES if many else 1) + [Descriptor(4115, at, length)]
    return OutgoingMessage(frame(Write(1, 1, pack(pieces), b"n")), [memoryview(bytes(sum(p.length for p in pieces)))])


@pytest.mark.trio
@pytest.mark.parametrize(("at", "length"), CROSSING)
async def test_nor_is_one_read_over_tcp(at: int, length: int) -> None:
    async with trio.open_nursery() as nursery:
        p, d = await connected("tcp", nursery, one_way=True)
        request = ReadRequest(1, pack([Descriptor(at, 0, length)]))
        p.transport._links["d.r0"].stream.post(OutgoingMessage(frame(request)))
        await d.until(PeerGone("p.r0"))
        await closed(p, d)


@pytest.mark.trio
@pytest.mark.parametrize("address", [-8, 4096, OWN - 8, OWN + 96, 2**64 - 8])
async def test_a_word_outside_is_none_to_whoever_asks_over_tcp(address: int) -> None:
    d = adopted("tcp", "d.r0")
    d.filled()
    guest: Any = None
    serve: Callable[..., Any] = d.transport._serve_read
    answer = serve(guest, ReadWordRequest(1, address))
    assert parse(answer.views[0][4:]).value is None  # type: ignore[union-attr]
    await d.transport.aclose()


@pytest.mark.trio
async def test_memory_without_any_of_the_agent_s_own(kind: str) -> None:
    async with trio.open_nursery() as nursery:
        p, d = adopted(kind, "p.r0", 0), adopted(kind, "d.r0", 0)
        assert len(p.own) == 0
        for agent in (p, d):
            await nursery.start(agent.transport.run)
        await p.transport.connect("d.r0", d.transport.describe())
        p.filled()
        p.transport.write(1, "d.r0", [Descriptor(74_114, 74_114, 1)], 1, None)
        await p.until(Ended(1, True))
        assert d.foreign[2][-2:] == b"\0\3"
        p.transport.write(2, "d.r0", [Descriptor(0, 74_115, 1)], 1, None)
        assert p.events[-1] == Ended(2, False)
        await closed(p, d)


@pytest.mark.parametrize(
    ("kind", "name"), [("shm", "shm"), ("mooncake", "mooncake"), ("nccl", "nccl stand-in"), ("nowhere", "nowhere")]
)
def test_transports_that_adopt_nothing_name_those_that_do(kind: str, name: str) -> None:
    class Nowhere:
        name = "nowhere"

    transport: Any = Nowhere() if kind == "nowhere" else KINDS[kind]("p.r0", lambda event: None)
    with pytest.raises(TransportError) as caught:
        adopt(transport, [Segment(4096, 4096)], 4096)
    assert str(caught.value) == (
        f"transport {name} cannot adopt memory: it shares only what it has allocated; use nixl, tcp, or cuda-ipc for "
        "memory of a GPU"
    )


BAD: list[tuple[list[Segment], int, str]] = [
    ([], 64, "no segment to adopt"),
    ([Segment(4096, 0)], 64, "segment 0 of a memory has 0 bytes"),
    ([Segment(4096, 8), Segment(4096, -8)], 64, "segment 1 of a memory has -8 bytes"),
    ([Segment(-4096, 8)], 64, "segment 0 of a memory cannot begin at -4096"),
    ([Segment(2**64 - 8, 9)], 64, "segment 0 of a memory cannot begin at"),
    ([Segment(4096, 2**63)], 64, "segment 0 of a memory has"),
    ([Segment(4096, 8)] * (MAX_SEGMENTS + 1), 0, "a memory of 4097 segments"),
    ([Segment(4096, 8)], -1, "cannot allocate a region of -1 bytes"),
]


@pytest.mark.parametrize(("segments", "own_bytes", "message"), BAD)
def test_what_cannot_be_adopted_is_one_sentence(
    kind: str, segments: list[Segment], own_bytes: int, message: str
) -> None:
    transport = KINDS[kind]("p.r0", lambda event: None)
    with pytest.raises(TransportError, match=message) as caught:
        adopt(transport, segments, own_bytes)
    assert "\n" not in str(caught.value)


def test_tcp_does_not_adopt_a_gpu_s_memory() -> None:
    with pytest.raises(TransportError, match=r"tcp cannot move memory of a GPU \(a segment on GPU 1\); use nixl"):
        adopt(TcpTransport("p.r0", lambda event: None), [Segment(4096, 8), Segment(4096, 8, 1)], 64)


@pytest.mark.parametrize("kind", [NIXL])
def test_more_than_peers_read_is_refused_by_who_adopts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_HELLO_BYTES", 900)
    with pytest.raises(TransportError, match=r"of 3 segments has \d+ bytes; peers accept at most 900: adopt"):
        adopted(kind, "p.r0")


@pytest.mark.trio
async def test_as_many_segments_as_are_allowed(kind: str) -> None:
    async with trio.open_nursery() as nursery:
        memory = bytearray(MAX_SEGMENTS * 16)
        base = address_of(memoryview(memory))
        events: list[TransportEvent] = []
        many = KINDS[kind]("p.r0", events.append)
        adopt(many, [Segment(base + at * 16, 8) for at in range(MAX_SEGMENTS - 1)], 64)
        d = adopted(kind, "d.r0")
        for agent in (many, d.transport):
            await nursery.start(agent.run)
        await many.connect("d.r0", d.transport.describe())
        await d.transport.connect("p.r0", many.describe())
        memory[4000 * 16 : 4000 * 16 + 8] = b"12345678"
        many.write(1, "d.r0", [Descriptor(4000 * 8, 0, 8)], 1, None)
        await trio.sleep(0)
        d.transport.read(1, "p.r0", [Descriptor(4000 * 8, 4099, 8)])
        await d.until(Ended(1, True))
        with trio.fail_after(TIMEOUT_S):
            while not events:
                await trio.sleep(0.001)
        assert events == [Ended(1, True)]
        assert d.foreign[0][:8] == d.foreign[1][:8] == b"12345678"
        await many.aclose()
        await d.transport.aclose()


@pytest.mark.trio
@pytest.mark.parametrize("kind", [*ADOPTED, *BY_KERNELS[1:]])
async def test_own_memory_comes_last(kind: str) -> None:
    async with pair(kind) as (p, d):
        assert isinstance(p.memory, Segmented)
        assert p.memory.borders[:-1] == BORDERS[kind.partition(", ")[2]]
        start = p.memory.borders[-2]
        p.memory[start : start + 8] = b"own word"
        d.transport.read_word(1, "p.r0", start)
        await d.wait_for(WordArrived(1, int.from_bytes(b"own word", "little")))


# What peers say of their segments.

WRONG: list[tuple[Sequence[DescribedSegment], int]] = [
    ([DescribedSegment(0, 8)], 9),
    ([DescribedSegment(0, 8)], 7),
    ([DescribedSegment(1, 8)], 9),
    ([DescribedSegment(-1, 9)], 8),
    ([DescribedSegment(0, 0), DescribedSegment(0, 8)], 8),
    ([DescribedSegment(0, -8)], -8),
    ([DescribedSegment(0, 8), DescribedSegment(7, 8)], 15),
    ([DescribedSegment(8, 8), DescribedSegment(0, 8)], 8),
    ([DescribedSegment(0, 8, -1)], 8),
    ([DescribedSegment(0, 8, 2**64 - 8)], 8),
    ([DescribedSegment(0, 2**63)], 2**63),
    ([DescribedSegment(0, 2**62), DescribedSegment(2**62, 2**62)], 2**63),
    ([DescribedSegment(0, 2**64 - 1)], 2**64 - 1),
    ([DescribedSegment(0, 8, 0, -1)], 8),
    ([DescribedSegment(0, 8, 0, 1000)], 8),
    ([DescribedSegment(at, 1) for at in range(MAX_SEGMENTS + 1)], MAX_SEGMENTS + 1),
]


@pytest.mark.parametrize(("segments", "nbytes"), WRONG)
def test_segments_that_cannot_be_are_refused(segments: Sequence[DescribedSegment], nbytes: int) -> None:
    description = Description("tcp", 1, bytes(16), "127.0.0.1", 1, "", nbytes, b"", tuple(segments))
    assert isinstance(parse_segments(segments, nbytes), Malformed)
    assert isinstance(parse_description(msgspec.msgpack.encode(description)), Malformed)


@pytest.mark.trio
@pytest.mark.parametrize("kind", [NIXL])
@pytest.mark.parametrize(("segments", "nbytes"), [*WRONG, ([], 8)])
async def test_a_guest_with_such_segments_is_not_let_in(
    kind: str, segments: Sequence[DescribedSegment], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NIXL a guest's memory is fetched from, at the addresses that it gives."""
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        hello: Callable[[Description], AgentHello] = p.transport._hello
        bad = {"nbytes": nbytes, "segments": tuple(segments)}
        monkeypatch.setattr(p.transport, "_hello", lambda described: msgspec.structs.replace(hello(described), **bad))
        with pytest.raises(TransportError):
            await p.transport.connect("d.r0", d.transport.describe())
        assert d.events == []
        monkeypatch.undo()
        await p.transport.connect("d.r0", d.transport.describe())
        assert await p.ended(p.write("d.r0", [(0, 0, 8)]))


numbers = st.integers(-1, 20) | st.integers(-(2**63), 2**64 - 1)
segments = st.builds(DescribedSegment, numbers, numbers, numbers, st.none() | numbers)


@given(st.lists(segments, max_size=4), numbers)
def test_any_segments_are_a_map_or_malformed(described: list[DescribedSegment], nbytes: int) -> None:
    raw = msgspec.msgpack.encode(Description("tcp", 1, bytes(16), "127.0.0.1", 1, "", nbytes, b"", tuple(described)))
    found = parse_description(raw)
    if isinstance(found, Description):
        extent = extent_of(found)
        assert nbytes == (extent.nbytes if isinstance(extent, SegmentMap) else extent)
        assert not isinstance(extent, SegmentMap) or (extent.starts[0], extent.ends[-1]) == (0, nbytes)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6),
    pieces=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=6),
    times=st.sampled_from([1, FEW_PIECES]),
)
def test_pieces_are_accepted_if_each_lies_within_one_segment(
    sizes: list[tuple[int, int]], pieces: list[tuple[int, int]], times: int
) -> None:
    described, end = [], 0
    for number, (nbytes, gap) in enumerate(sizes):
        start = end + (gap if described else 0)
        described.append(DescribedSegment(start, nbytes, 1000 * number, number or None))
        end = start + nbytes
    extent = parse_segments(described, end)
    assert isinstance(extent, SegmentMap)
    within = all(
        any(s.start <= at and at + length <= s.start + s.nbytes for s in described) for at, length in times * pieces
    )
    kind = PackedPieces if within else Malformed
    assert isinstance(unpack_pieces(pack(times * [Descriptor(at, 0, n) for at, n in pieces]), extent, 100), kind)
    assert isinstance(unpack_pieces(pack(times * [Descriptor(0, at, n) for at, n in pieces]), 100, extent), kind)
    if within and pieces:
        offsets = np.array([at for at, _ in pieces], np.uint64)
        addresses, gpus = extent.addresses(offsets)
        owners = [max(i for i, s in enumerate(described) if s.start <= at) for at, _ in pieces]
        assert addresses.tolist() == [
            1000 * i + at - described[i].start for i, (at, _) in zip(owners, pieces, strict=True)
        ]
        assert gpus.tolist() == [i or -1 for i in owners]
        assert extent.indices([at for at, _ in pieces] * FEW_PIECES) == owners * FEW_PIECES


def test_a_read_of_nixl_is_between_memory_of_one_kind() -> None:
    def table(*on_gpu: int) -> MemoryTable:
        return MemoryTable(np.array(on_gpu, bool), np.array([[at, 1, 0] for at in range(len(on_gpu))], np.uint64))

    def split(sources: MemoryTable, targets: MemoryTable) -> list[tuple[list[int], list[bool], list[bool]]]:
        return [
            (theirs.rows[:, 0].tolist(), theirs.on_gpu.tolist(), ours.on_gpu.tolist())
            for theirs, ours in of_one_kind(sources, targets)
        ]

    assert split(table(1, 1), table(0, 0)) == [([0, 1], [True, True], [False, False])]
    assert split(table(1, 0, 1, 0), table(0, 0, 1, 0)) == [
        ([1, 3], [False, False], [False, False]),
        ([0], [True], [False]),
        ([2], [True], [True]),
    ]
