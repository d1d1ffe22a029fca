"""vLLM's notifications: round trips, sizes, and what kills vLLM 0.32's engine thread (R32, R34)."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import Completion, Heartbeat, Register
from pdflow.protocol.values import Allocation
from pdflow.protocol.wire.limits import MAX_HEARTBEAT_IDS, MAX_ID_BYTES, MAX_NOTIFICATION_BYTES, MAX_U63, MAX_U64
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.sizes import BLOCK_ID_BYTES, notification_size
from pdflow.protocol.wire.vllm import (
    PUSH_REG,
    PushAddress,
    PushReg,
    decode_notification,
    encode_completion,
    encode_heartbeats,
    encode_push_reg,
)

ADDRESS = PushAddress("10.0.0.2", 5600, "prefill-0", "10.0.0.1", 5600, 2, 1)
SHARDS = Shards(2, 1, 16)
REGISTER = Register(
    Reg("decode-0", 7, 3, "cmpl-u-0-aaaaaaaa"),
    "xfer-1",
    1,
    SHARDS,
    Allocation(5, (1, 300, 70_000)),
    16,
    48,
    9,
    1,
    2,
    "p",
)

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
ids = text.filter(lambda s: not f"{s}:".startswith(("HB:", "PUSH_REG:")))
u63 = st.integers(0, MAX_U63)
u64 = st.integers(0, MAX_U64)
u32 = st.integers(0, 2**32 - 1)
ports = st.integers(1, 65_535)
sizes = st.integers(1, 64)
addresses = st.builds(PushAddress, text, ports, text, text, ports, sizes, sizes)
shards = st.builds(Shards, sizes, sizes, st.integers(1, 65_536))
registers = st.builds(
    Register,
    st.builds(Reg, text, u64, u63, ids),
    st.just("") | text,
    st.just(0),
    shards,
    st.builds(Allocation, u64, st.lists(u32, min_size=1, max_size=40).map(tuple)),
    u32,
    u32,
    u64,
    u64,
    u63,
    st.just("") | text,
)


def reason_of(value: object) -> str:
    assert isinstance(value, Malformed), value
    assert value.reason
    return value.reason


@given(registers, addresses, st.booleans())
def test_a_registration_with_pdf_comes_back_whole(register: Register, address: PushAddress, transfer_id: bool) -> None:
    packed = encode_push_reg(register, address, transfer_id=transfer_id, pdf=True)
    push = decode_notification(packed)
    assert isinstance(push, PushReg)
    assert push.address == address
    assert push.register(register.d_rank, register.shards) == register
    slack = sum(BLOCK_ID_BYTES - len(msgspec.msgpack.encode(b)) for b in register.target.blocks)
    assert notification_size(register, address, transfer_id=transfer_id, pdf=True) == len(packed) + slack


@given(registers, addresses, st.booleans())
def test_a_stock_registration_keeps_the_fields_of_vllm(
    register: Register, address: PushAddress, transfer_id: bool
) -> None:
    packed = encode_push_reg(register, address, transfer_id=transfer_id)
    push = decode_notification(packed)
    assert isinstance(push, PushReg)
    got = push.register(register.d_rank, register.shards)
    reg = Reg(register.reg.engine, 0, 0, register.reg.request_id)
    target = Allocation(0, register.target.blocks)
    xid = register.xid if transfer_id else ""
    assert got == Register(reg, xid, register.d_rank, register.shards, target, 0, 0, 0, 0, 0)
    slack = sum(BLOCK_ID_BYTES - len(msgspec.msgpack.encode(b)) for b in register.target.blocks)
    assert notification_size(register, address, transfer_id=transfer_id) == len(packed) + slack


@given(ids, st.integers(1, 4096))
def test_completions_come_back_whole_colons_and_all(request_id: str, count: int) -> None:
    completion = Completion(request_id, count)
    packed = encode_completion(completion)
    assert decode_notification(packed) == completion
    assert notification_size(completion, ADDRESS) == len(packed)


@given(st.lists(text.filter(lambda s: "," not in s), max_size=30))
def test_heartbeats_come_back_whole(request_ids: list[str]) -> None:
    heartbeat = Heartbeat(tuple(request_ids))
    (packed,) = encode_heartbeats(heartbeat)
    assert decode_notification(packed) == heartbeat
    assert notification_size(heartbeat, ADDRESS) == len(packed)


def test_an_id_that_no_heartbeat_can_encode_does_not_stop_the_others() -> None:
    ids = ("a", "b,c", "", "d" * 600, "\ud800", "e")
    assert encode_heartbeats(Heartbeat(ids)) == (b"HB:a,e",)
    assert encode_heartbeats(Heartbeat(("b,c",))) == (b"HB:",)
    assert decode_notification(b"HB:a,," + b"d" * 600 + b",e") == Heartbeat(("a", "e"))


def test_a_heartbeat_as_long_as_a_notification_may_be_is_not_split() -> None:
    """Every character counts as if it took 4 bytes, which is the most that UTF-8 needs for one."""
    length = MAX_ID_BYTES // 4
    ids = tuple(f"{n:0{length}d}" for n in range((MAX_NOTIFICATION_BYTES - len("HB:")) // (4 * length + 1)))
    assert len(encode_heartbeats(Heartbeat(ids))) == 1
    assert len(encode_heartbeats(Heartbeat((*ids, "more")))) == 2


@pytest.mark.parametrize("length", [1, 40, MAX_ID_BYTES])
def test_a_very_long_heartbeat_is_split_into_readable_ones(length: int) -> None:
    ids = tuple(f"{n:0{length}d}"[-length:] for n in range(MAX_HEARTBEAT_IDS + 10))
    messages = encode_heartbeats(Heartbeat(ids))
    assert all(len(message) <= MAX_NOTIFICATION_BYTES for message in messages)
    got: tuple[str, ...] = ()
    for message in messages:
        heartbeat = decode_notification(message)
        assert isinstance(heartbeat, Heartbeat)
        got += heartbeat.request_ids
    assert got == ids


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nocolon",
        b":",
        b":1",
        b"id:",
        b"id:x",
        b"id: 1",
        b"id:+1",
        b"id:-1",
        b"id:0",
        b"id:01",
        b"id:1_0",
        b"id:1.0",
        b"id:4097",
        b"id:" + b"9" * 100_000,
        "id:１".encode(),
        "id:²".encode(),
        b"id:1\n",
        b"\xff\xfe:1",
        b"HB:\xff",
        b"x" * (MAX_ID_BYTES + 1) + b":1",
        b"x" * (MAX_NOTIFICATION_BYTES + 1),
        b"HB:" + b"," * MAX_HEARTBEAT_IDS,
        b"\x00\x00\x00\x6c\x01\x86\xa4type\xa4DONE",
    ],
)
def test_r32_malformed_completion_is_a_value(data: bytes) -> None:
    reason_of(decode_notification(data))


def test_r32_prefixes_are_looked_for_first() -> None:
    assert decode_notification(b"HB:id:1") == Heartbeat(("id:1",))
    reason_of(decode_notification(b"PUSH_REG:id:1"))
    for request_id in ("HB:x", "PUSH_REG:x", "HB", "PUSH_REG", ""):
        with pytest.raises(LocalProtocolError):
            encode_completion(Completion(request_id, 1))
    for count in (0, -1, 4097):
        with pytest.raises(LocalProtocolError):
            encode_completion(Completion("x", count))


FULL = msgspec.to_builtins(msgspec.msgpack.decode(encode_push_reg(REGISTER, ADDRESS)[len(PUSH_REG) :]))


@pytest.mark.parametrize("key", FULL)
def test_r34_a_push_reg_without_a_key_is_a_value(key: str) -> None:
    less = {k: v for k, v in FULL.items() if k != key}
    assert key in reason_of(decode_notification(PUSH_REG + msgspec.msgpack.encode(less)))


@pytest.mark.parametrize("key", FULL)
@pytest.mark.parametrize(
    "wrong", [None, True, -1, 0, 2**40, 1.5, "", "x" * 10_000, b"x", [], [[]], [[], []], [[-1]], [[2**40]], [["1"]], {}]
)
def test_r34_a_push_reg_with_a_wrong_field_is_a_value(key: str, wrong: object) -> None:
    reason_of(decode_notification(PUSH_REG + msgspec.msgpack.encode({**FULL, key: wrong})))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"request_id": "HB:x"}, "HB"),
        ({"request_id": "PUSH_REG:x"}, "PUSH_REG"),
        ({"local_block_ids": [[1], [2]]}, "groups"),
        ({"local_block_ids": [[1] * 65_537]}, "blocks"),
        ({"transfer_id": 1}, "transfer_id"),
        ({"transfer_id": "x" * 600}, "transfer_id"),
        ({"pdf": {}}, "missing"),
        ({"pdf": 1}, "pdf"),
    ],
)
def test_r34_push_reg_values_that_would_misroute_or_blow_up_later(more: dict[str, object], reason: str) -> None:
    assert reason in reason_of(decode_notification(PUSH_REG + msgspec.msgpack.encode({**FULL, **more})))


def test_push_reg_takes_what_newer_peers_add() -> None:
    for more in ({"transfer_id": None}, {"transfer_id": ""}, {"new": {"deep": [1]}}):
        push = decode_notification(PUSH_REG + msgspec.msgpack.encode({**FULL, **more}))
        assert isinstance(push, PushReg)
        got = push.register(1, SHARDS)
        assert isinstance(got, Register)
        assert got.xid == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("v", 0),
        ("rank", 2),
        ("ranks", 3),
        ("ranks", 0),
        ("ranks", 10**6),
        ("block_size", 0),
        ("seq", -1),
        ("xid", "other"),
    ],
)
def test_r34_a_poisoned_pdf_is_a_value(key: str, value: object) -> None:
    body = msgspec.msgpack.decode(encode_push_reg(REGISTER, ADDRESS, transfer_id=True, pdf=True)[len(PUSH_REG) :])
    body["pdf"][key] = value
    reason_of(decode_notification(PUSH_REG + msgspec.msgpack.encode(body)))


def test_a_registration_that_contradicts_the_handshake_is_not_believed() -> None:
    stock = decode_notification(encode_push_reg(REGISTER, ADDRESS))
    ours = decode_notification(encode_push_reg(REGISTER, ADDRESS, pdf=True))
    assert isinstance(stock, PushReg)
    assert isinstance(ours, PushReg)
    assert "handshake" in reason_of(stock.register(1, Shards(4, 1, 16)))
    assert "rank" in reason_of(stock.register(2, SHARDS))
    assert "handshake" in reason_of(ours.register(0, SHARDS))
    assert "handshake" in reason_of(ours.register(1, Shards(2, 1, 32)))


@pytest.mark.parametrize("blocks", [(), (-1,), (2**32,)])
def test_an_unsendable_registration_is_our_caller_s_fault(blocks: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_push_reg(msgspec.structs.replace(REGISTER, target=Allocation(1, blocks)), ADDRESS)


@given(st.binary(max_size=300), st.sampled_from((b"", PUSH_REG, b"HB:", b"id:")))
def test_r32_any_bytes_are_a_value(data: bytes, prefix: bytes) -> None:
    message = decode_notification(prefix + data)
    if isinstance(message, Completion):
        assert encode_completion(message) == prefix + data


@pytest.mark.parametrize(
    "packed",
    [
        encode_push_reg(REGISTER, ADDRESS),
        encode_push_reg(REGISTER, ADDRESS, transfer_id=True, pdf=True),
        encode_completion(Completion("cmpl-u-0-aaaaaaaa", 12)),
        encode_heartbeats(Heartbeat(("cmpl-u-0-cccccccc", "cmpl-v-0-dddddddd")))[0],
    ],
)
def test_r34_every_mutated_byte_is_a_value(packed: bytes) -> None:
    rng = random.Random(len(packed))
    for at in range(len(packed)):
        for byte in {0x00, 0x2C, 0x3A, 0x80, 0xC1, 0xDD, 0xDF, 0xFF, packed[at] ^ 1, rng.randrange(256)}:
            decode_notification(packed[:at] + bytes((byte,)) + packed[at + 1 :])
        decode_notification(packed[:at])
        decode_notification(packed[:at] + packed[at + 1 :])


@pytest.mark.parametrize(
    "data",
    [
        PUSH_REG + b"\x91" * (MAX_NOTIFICATION_BYTES - 9),
        PUSH_REG + b"\x81\xa1k" + b"\x91" * 1_000_000,
        b"HB:" + b"," * (MAX_NOTIFICATION_BYTES - 3),
        b":" * MAX_NOTIFICATION_BYTES,
        b"a:" + b"1" * (MAX_NOTIFICATION_BYTES - 2),
    ],
)
def test_r34_the_largest_nonsense_costs_little_time(data: bytes) -> None:
    before = time.process_time()
    reason_of(decode_notification(data))
    assert time.process_time() - before < 0.5
