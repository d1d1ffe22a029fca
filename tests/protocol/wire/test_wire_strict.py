"""Strict frames: round trips, sizes by formula, streams cut anywhere, and hostile bytes."""

from __future__ import annotations

import random
import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Code,
    Disposition,
    Done,
    Fail,
    Progress,
    Register,
    RegisterAck,
    Release,
    Sync,
    SyncItem,
    SyncReply,
    Taken,
)
from pdflow.protocol.values import NO_BLOCK, Allocation, allocation_of
from pdflow.protocol.wire.limits import (
    MAX_BLOCK_ID,
    MAX_FRAME_BYTES,
    MAX_GROUPS,
    MAX_ID_BYTES,
    MAX_REASON_CHARS,
    MAX_U63,
    MAX_U64,
)
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.sizes import BLOCK_ID_BYTES, RANK_BYTES, frame_size
from pdflow.protocol.wire.strict import Frame, FrameDecoder, Hello, decode_done, decode_frame, encode_frame

HELLO = Hello("decode-0.r1", 2**63, 1, 0)
REG = Reg("decode-0", 2**63, 3, "cmpl-u-0-aaaaaaaa")
DONE = Done(REG, 1, 9, 4096, 2)

# Sizes change at these edges of msgpack's integers and strings.
u63 = st.sampled_from((0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, MAX_U63)) | st.integers(0, MAX_U63)
u64 = u63 | st.just(MAX_U64)
u32 = u63.map(lambda n: n % 2**32)
rank = st.integers(0, 4095)
text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
ids = text | st.integers(1, MAX_ID_BYTES).map(lambda n: "x" * n)
names = text.filter(lambda s: len(s.encode()) < 250)
regs = st.builds(Reg, names, u64, u63, ids)
shards = st.builds(Shards, st.integers(1, 64), st.integers(1, 64), st.integers(1, 65_536))
blocks = st.lists(st.integers(0, MAX_BLOCK_ID), min_size=1, max_size=40).map(tuple)
tables = st.lists(st.just(NO_BLOCK) | st.integers(0, MAX_BLOCK_ID), max_size=40)
grouped = st.tuples(u64, st.lists(tables, min_size=1, max_size=20)).map(lambda drawn: allocation_of(*drawn))
allocations = st.builds(Allocation, u64, blocks) | grouped.filter(lambda allocation: allocation.blocks)
registers = st.builds(Register, regs, ids, st.just(0), shards, allocations, u32, u32, u64, u64, u63, st.just("") | ids)
items = st.builds(SyncItem, regs, st.sampled_from(Progress), st.sampled_from(Code), st.booleans())
addresses = st.tuples(names, rank).map(lambda t: f"{t[0]}.r{t[1]}")
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, addresses, u64, u64.filter(bool), u64, st.just("") | addresses, st.binary(max_size=300)),
    registers,
    st.builds(RegisterAck, regs, rank, st.sampled_from(Progress), st.lists(rank, max_size=20).map(tuple)),
    st.builds(Done, regs, rank, u64, u63, u64),
    st.builds(Fail, regs, rank, st.sampled_from(Code), st.booleans()),
    st.builds(Cancel, regs, u63),
    st.builds(CancelAck, regs, rank, st.sampled_from(Disposition), st.booleans()),
    st.builds(Release, ids),
    st.builds(Taken, ids, rank, st.integers(1, 4096)),
    st.builds(Sync, u63, u63, st.lists(ids, max_size=20).map(tuple), st.lists(regs, max_size=5).map(tuple)),
    st.builds(SyncReply, u63, st.lists(items, max_size=20).map(tuple)),
)
ONE_OF_EACH: tuple[Frame, ...] = (
    HELLO,
    Register(REG, "xfer-1", 1, Shards(2, 1, 16), Allocation(5, (1, 300, 70_000)), 0, 48, MAX_U64, 1, 2, "cmpl-p"),
    RegisterAck(REG, 0, Progress.QUEUED, (0, 1)),
    DONE,
    Fail(REG, 0, Code.EXPIRED, True),
    Cancel(REG, 3),
    CancelAck(REG, 0, Disposition.DRAINED, True),
    Release("xfer-1"),
    Taken("xfer-1", 1, 2),
    Sync(4, 3, ("xfer-2",), (REG,)),
    SyncReply(4, (SyncItem(REG, Progress.UNKNOWN, Code.CANCELLED, True),)),
)


OF_TWO_GROUPS = Register(
    REG, "x", 1, Shards(2, 1, 16), allocation_of(5, ((1, 300, 70_000), (NO_BLOCK, 2, 3))), 0, 48, 7, 1, 2, "cmpl-p"
)


def test_samples_cover_every_frame() -> None:
    assert [type(frame) for frame in ONE_OF_EACH] == list(get_args(Frame))


def block_id_slack(frame: Frame) -> int:
    """What the size formula counts beyond the bytes, as documented: ids and targets at their widest."""
    if isinstance(frame, Register):
        named = (*frame.target.blocks, *(entry for table in frame.target.groups for entry in table))
        return sum(BLOCK_ID_BYTES - len(msgspec.msgpack.encode(b)) for b in named)
    if isinstance(frame, RegisterAck):
        return sum(RANK_BYTES - len(msgspec.msgpack.encode(r)) for r in frame.targets)
    return 0


@given(frames)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_round_trip_and_size(frame: Frame) -> None:
    packed = encode_frame(frame)
    assert decode_frame(packed) == frame
    assert frame_size(frame) == len(packed) + block_id_slack(frame)


@pytest.mark.parametrize("count", [1, 15, 16, 65_535, 65_536])
def test_size_at_the_widths_of_lists(count: int) -> None:
    register = Register(REG, "x", 0, Shards(1, 1, 16), Allocation(1, (MAX_BLOCK_ID,) * count), 0, 1, 0, 0, 0)
    sync = Sync(1, 1, ("x",) * count, (REG,) * min(count, 60_000))
    reply = SyncReply(1, (SyncItem(REG, Progress.SENT, Code.NONE, True),) * min(count, 40_000))
    assert frame_size(register) == len(encode_frame(register))
    in_groups = msgspec.structs.replace(register, target=allocation_of(1, ((MAX_BLOCK_ID,) * count, ())))
    assert frame_size(in_groups) == len(encode_frame(in_groups))
    for frame in (sync, reply):
        assert frame_size(frame) == len(msgspec.msgpack.encode(frame)) + 5


@pytest.mark.parametrize("count", [0, 255, 256, 65_535, 65_536])
def test_size_at_the_widths_of_metadata(count: int) -> None:
    hello = msgspec.structs.replace(HELLO, metadata=bytes(count))
    assert frame_size(hello) == len(encode_frame(hello))


def test_as_many_block_tables_as_are_allowed() -> None:
    frame = register(target=allocation_of(1, ((1,),) * MAX_GROUPS))
    assert decode_frame(encode_frame(frame)) == frame


@given(st.lists(frames.filter(lambda f: not isinstance(f, Hello)), max_size=4), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_stream_split_anywhere_gives_the_same_frames(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, (HELLO, *sent)))
    boundaries = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    got = [
        f for a, b in zip([0, *boundaries], [*boundaries, len(stream)], strict=True) for f in decoder.feed(stream[a:b])
    ]
    assert got == [HELLO, *sent]
    assert decoder.hello == HELLO
    assert not decoder.poisoned


def test_a_stream_byte_by_byte() -> None:
    decoder = FrameDecoder()
    stream = b"".join(map(encode_frame, ONE_OF_EACH))
    assert [f for byte in stream for f in decoder.feed(bytes((byte,)))] == list(ONE_OF_EACH)


def reason_of(value: object) -> str:
    assert isinstance(value, Malformed), value
    assert value.reason
    assert len(value.reason) <= MAX_REASON_CHARS
    return value.reason


def test_a_malformed_frame_poisons_its_stream_and_no_other() -> None:
    hello, done = encode_frame(HELLO), encode_frame(DONE)
    bad, good = FrameDecoder(), FrameDecoder()
    first = bad.feed(hello + done + done[:4] + b"\x02" + done[5:] + done)
    assert first[:2] == [HELLO, DONE]
    assert "version 2" in reason_of(first[2])
    assert len(first) == 3
    assert bad.poisoned
    assert bad.feed(done) == []
    assert good.feed(hello + done) == [HELLO, DONE]


def test_hello_comes_first_and_once() -> None:
    hello, done = encode_frame(HELLO), encode_frame(DONE)
    assert "before HELLO" in reason_of(FrameDecoder().feed(done)[0])
    assert "second HELLO" in reason_of(FrameDecoder().feed(hello + hello)[1])


@pytest.mark.parametrize("length", [0, 1, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_an_absurd_length_is_refused_before_its_bytes_are_awaited(length: int) -> None:
    frames = FrameDecoder().feed(length.to_bytes(4, "big") + b"\x01")
    assert f"{length} bytes" in reason_of(frames[0])


@pytest.mark.parametrize(
    "address",
    ["", "decode-0", "decode-0.r", "decode-0.r01", "decode-0.r-1", "decode-0.r4096", ".r1", "a.r１", "x" * 300 + ".r1"],
)
def test_hello_names_a_rank_in_one_spelling(address: str) -> None:
    """Endpoints read engine and rank out of a sender's address, and would raise on any other."""
    hello = Hello(address, 1, 1, 0)
    with pytest.raises(LocalProtocolError):
        encode_frame(hello)
    body = msgspec.msgpack.encode(hello)
    reason_of(decode_frame((len(body) + 1).to_bytes(4, "big") + b"\x01" + body))


def test_only_done_is_a_notification() -> None:
    assert "CANCEL" in reason_of(decode_done(encode_frame(Cancel(REG, 1)))).upper()
    reason_of(decode_done(b""))
    reason_of(decode_done(encode_frame(DONE) + b"\x00"))
    reason_of(decode_done(b"cmpl-u-0-aaaaaaaa:1"))


def register(**change: object) -> Register:
    return msgspec.structs.replace(ONE_OF_EACH[1], **change)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "frame",
    [
        register(xid=""),
        register(xid="\ud800"),
        register(xid="é" * 300),
        register(d_rank=2),
        register(d_rank=-1),
        register(shards=Shards(0, 1, 16)),
        register(shards=Shards(4096, 4096, 16)),
        register(shards=Shards(2, 1, 0)),
        register(target=Allocation(1, ())),
        register(target=Allocation(1, (-1,))),
        register(target=Allocation(1, (2**32,))),
        register(target=Allocation(1, (1,) * 65_537)),
        register(target=Allocation(1, (), ((NO_BLOCK,),))),
        register(target=Allocation(1, (1, 2), ((1,),))),
        register(target=Allocation(1, (1, 2), ((2,), (1,)))),
        register(target=Allocation(1, (1,), ((1, -2),))),
        register(target=Allocation(1, (1, 2**32), ((1,), (2**32,)))),
        register(target=allocation_of(1, ((1,),) * 65)),
        register(target=allocation_of(1, ((1,), (NO_BLOCK,) * 262_144))),
        register(num_tokens=-1),
        register(digest=2**128),
        register(reg=Reg("", 1, 1, "r")),
        register(reg=Reg("d", -1, 1, "r")),
        register(reg=Reg("d", 1, 1, "")),
        Done(REG, 4096, 1, 1, 1),
        Done(REG, 0, 1, -1, 1),
        RegisterAck(REG, 0, Progress.SENT, (-1,)),
        RegisterAck(REG, 0, Progress.SENT, (0,) * 5000),
        Taken("x", 0, 0),
        Release(""),
        Sync(1, 1, ("x",) * 65_537, ()),
        Sync(1, 1, ("",), ()),
        SyncReply(-1, ()),
        Hello("d.r0", 1, 0, 0),
        Hello("d.r0", 1, 1, 0, "\ud800"),
        Hello("d.r0", 1, 1, 0, "p.r0", bytes((4 << 20) + 1)),
    ],
)
def test_what_no_correct_peer_sends_is_refused_at_both_ends(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(frame)
    try:
        body = msgspec.msgpack.encode(frame)
    except (OverflowError, UnicodeEncodeError):
        return
    reason_of(decode_frame((len(body) + 1).to_bytes(4, "big") + b"\x01" + body))


def test_a_frame_too_large_to_be_read_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="bytes"):
        encode_frame(Sync(1, 1, ("x" * MAX_ID_BYTES,) * 60_000, ()))


def test_unknown_keys_are_skipped_and_missing_ones_are_not() -> None:
    plain = msgspec.to_builtins(DONE)
    more = {**plain, "crc": 1, "reg": {**plain["reg"], "new": [{}]}}
    less = {key: value for key, value in plain.items() if key != "nbytes"}

    def framed(body: dict[str, object]) -> bytes:
        packed = msgspec.msgpack.encode(body)
        return (len(packed) + 1).to_bytes(4, "big") + b"\x01" + packed

    assert decode_frame(framed(more)) == DONE
    assert "nbytes" in reason_of(decode_frame(framed(less)))


# Hostile bytes (R32 to R34): every decoder returns a value.

HEAD = encode_frame(HELLO)


def survive(payload: bytes) -> None:
    """Both doors, with the payload as it is and as the body of a frame."""
    framed = min(len(payload) + 1, 2**32 - 1).to_bytes(4, "big") + b"\x01" + payload
    for data in (payload, framed):
        one = decode_frame(data)
        assert isinstance(one, Malformed) or encode_frame(one)
        decode_done(data)
        decoder = FrameDecoder()
        got = decoder.feed(HEAD + data)
        assert got[0] == HELLO
        assert all(not isinstance(f, Malformed) for f in got[:-1])


@given(st.binary(max_size=300))
def test_r32_strict_decoders_survive_any_bytes(data: bytes) -> None:
    survive(data)


@pytest.mark.parametrize("frame", [*ONE_OF_EACH, OF_TWO_GROUPS], ids=lambda f: type(f).__name__)
def test_r34_strict_decoders_survive_every_mutated_byte(frame: Frame) -> None:
    packed = encode_frame(frame)
    rng = random.Random(len(packed))
    for at in range(len(packed)):
        for byte in {0x00, 0x7F, 0x80, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF, packed[at] ^ 1, rng.randrange(256)}:
            mutant = packed[:at] + bytes((byte,)) + packed[at + 1 :]
            decoder = FrameDecoder()
            if not isinstance(frame, Hello):
                decoder.feed(HEAD)
            decoder.feed(mutant)
            decode_frame(mutant)
        decode_frame(packed[:at])
        decode_frame(packed[at:])
        decode_frame(packed[:at] + packed[at + 1 :])


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 200_000,
        b"\x81\xa4more" + b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff" + b"\x01" * 1000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa4type" + b"\xdb\x00\x03\x00\x00" + b"\x1b[31m;" * 40_000,
        b"\x84\xa4type\xa4SYNC\xa3seq\x01\xa5floor\x01\xa8interest\xdd\x7f\xff\xff\xff" + b"\xa1x" * 100_000,
    ],
)
def test_r34_bombs_cost_what_they_weigh(body: bytes) -> None:
    """Nesting without end, lengths without content, the peer's text in the reason."""
    data = (len(body) + 1).to_bytes(4, "big") + b"\x01" + body
    decoder = FrameDecoder()
    decoder.feed(HEAD)
    tracemalloc.start()
    try:
        reason = reason_of(decoder.feed(data)[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason.isprintable()
    assert peak < 8 * len(data) + 100_000


def test_a_poisoned_stream_keeps_nothing() -> None:
    decoder = FrameDecoder()
    decoder.feed(b"\xff" * 1000)
    decoder.feed(b"\xff" * 1_000_000)
    assert len(decoder._buffer) == 0
