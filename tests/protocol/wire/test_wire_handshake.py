"""The side channel: round trips, our key among vLLM's, and what kills vLLM 0.32's listener (R33)."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.wire.handshake import (
    AgentMetadata,
    Capabilities,
    HandshakeReply,
    MetaRequest,
    agreed_version,
    decode_listener_message,
    decode_metadata,
    decode_reply,
    decode_request,
    encode_metadata,
    encode_reply,
    encode_request,
)
from pdflow.protocol.wire.limits import MAX_HANDSHAKE_BYTES, MAX_U64
from pdflow.protocol.wire.malformed import Malformed

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
STOCK = AgentMetadata(
    engine_id="decode-0",
    agent_metadata=b"blob",
    kv_caches_base_addr=(1 << 40, 1 << 41),
    device_id=0,
    num_blocks=100,
    block_lens=(64, 64),
    block_strides=(64, 128),
    kv_cache_layout="LBHNC",
    block_size=16,
    ssm_sizes=(0, 0),
    attn_backend_name="FLASH_ATTN",
    physical_blocks_per_logical_kv_block=1,
)
OURS = msgspec.structs.replace(STOCK, pdflow=Capabilities(1, MAX_U64, ("crc",)))


@st.composite
def metadata(draw: st.DrawFn) -> AgentMetadata:
    n = draw(st.integers(1, 4))

    def per_region(each: st.SearchStrategy[Any]) -> Any:
        return tuple(draw(st.lists(each, min_size=n, max_size=n)))

    def maybe(each: st.SearchStrategy[Any]) -> Any:
        return per_region(each) if draw(st.booleans()) else None

    lens = per_region(st.integers(1, 2**20))
    return AgentMetadata(
        engine_id=draw(text),
        agent_metadata=draw(st.binary(max_size=40)),
        kv_caches_base_addr=per_region(st.integers(0, 2**60)),
        device_id=draw(st.integers(0, 15)),
        num_blocks=draw(st.integers(1, 2**20)),
        block_lens=lens,
        block_strides=tuple(length + draw(st.integers(0, 64)) for length in lens),
        kv_cache_layout=draw(text),
        block_size=draw(st.integers(1, 256)),
        ssm_sizes=(0, draw(st.integers(0, 2**30))),
        attn_backend_name=draw(text),
        physical_blocks_per_logical_kv_block=draw(st.integers(1, 16)),
        region_num_blocks=maybe(st.integers(1, 2**20)),
        region_group_ids=maybe(st.integers(0, 7)),
        region_names=maybe(text),
        region_mem_types=maybe(st.sampled_from(("VRAM", "DRAM"))),
        ple_block_len=draw(st.none() | st.integers(0, 2**30)),
        region_members=draw(st.lists(st.lists(text, max_size=3).map(tuple), max_size=3).map(tuple)),
        packed_member_layouts=draw(
            st.dictionaries(text, st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)
        ),
        pdflow=draw(st.just(msgspec.UNSET) | st.builds(Capabilities, st.integers(1, 9), st.integers(0, MAX_U64))),
    )


def reason_of(value: object) -> str:
    assert isinstance(value, Malformed), value
    assert value.reason
    return value.reason


@given(metadata())
def test_metadata_come_back_whole(m: AgentMetadata) -> None:
    assert decode_metadata(encode_metadata(m)) == m


@given(st.integers(0, 4095), st.integers(0, 4095))
def test_requests_come_back_whole(pp_rank: int, tp_rank: int) -> None:
    request = MetaRequest(pp_rank, tp_rank)
    assert decode_request(encode_request(request)) == request


@given(text, st.floats(allow_nan=False, allow_infinity=False))
def test_replies_come_back_whole(hash_: str, clock_s: float) -> None:
    reply = decode_reply(encode_reply(hash_, STOCK, clock_s))
    assert isinstance(reply, HandshakeReply)
    assert reply.payload.compatibility_hash == hash_
    assert reply.clock_s == clock_s
    assert decode_metadata(reply.payload.agent_metadata_bytes) == STOCK


def test_our_key_comes_after_vllm_s_21() -> None:
    stock, ours = encode_metadata(STOCK), encode_metadata(OURS)
    assert stock[:3].hex() == "de0015"
    assert ours[:3].hex() == "de0016"
    assert ours[3:].startswith(stock[3:])
    assert list(msgspec.msgpack.decode(ours))[-1] == "pdflow"


def test_the_pair_speaks_the_older_version_and_compat_with_stock() -> None:
    assert agreed_version(Capabilities(1, 5), STOCK) == 0
    assert agreed_version(Capabilities(1, 5), OURS) == 1
    assert agreed_version(Capabilities(2, 5), OURS) == 1


GOOD = encode_request(MetaRequest(0, 1))


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (GOOD,),
        (b"id", GOOD),
        (b"id", b"not empty", GOOD),
        (b"id", b"", GOOD, b""),
        (b"id", b"", b""),
        (b"id", b"", b"\xc1"),
        (b"id", b"", GOOD + b"\x00"),
        (b"id", b"", b"\x91" * 100_000),
        (b"id", b"", msgspec.msgpack.encode((b"other", 0, 0))),
        (b"id", b"", msgspec.msgpack.encode(("get_meta_msg", 0))),
        (b"id", b"", msgspec.msgpack.encode((b"get_meta_msg", 0))),
        (b"id", b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0, 0))),
        (b"id", b"", msgspec.msgpack.encode((b"get_meta_msg", -1, 0))),
        (b"id", b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 2**40))),
        (b"id", b"", msgspec.msgpack.encode((b"get_meta_msg", 0, "0"))),
        (b"id", b"", b"\x00" * (MAX_HANDSHAKE_BYTES + 1)),
    ],
)
def test_r33_handshake_listener_gets_a_value(frames: tuple[bytes, ...]) -> None:
    reason_of(decode_listener_message(frames))


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"\x80",),
        (b"\x80", b"\x00"),
        (encode_reply("h", STOCK, 1.0)[0], b""),
        (encode_reply("h", STOCK, 1.0)[0], msgspec.msgpack.encode("1.5")),
        (encode_reply("h", STOCK, 1.0)[0], msgspec.msgpack.encode(float("nan"))),
        (encode_reply("h", STOCK, 1.0)[0], msgspec.msgpack.encode(float("inf"))),
        (msgspec.msgpack.encode({"compatibility_hash": "", "agent_metadata_bytes": b""}), b"\x00"),
        (msgspec.msgpack.encode({"compatibility_hash": "h", "agent_metadata_bytes": 1}), b"\x00"),
        (b"\x00" * (MAX_HANDSHAKE_BYTES + 1), b"\x00"),
    ],
)
def test_r33_a_reply_that_is_none_is_a_value(frames: tuple[bytes, ...]) -> None:
    reason_of(decode_reply(frames))


REQUIRED = [f.name for f in msgspec.structs.fields(AgentMetadata) if f.required]


def test_nine_of_vllm_s_keys_are_optional() -> None:
    assert len(REQUIRED) == 12
    body = {key: value for key, value in msgspec.to_builtins(STOCK, builtin_types=(bytes,)).items() if key in REQUIRED}
    assert decode_metadata(msgspec.msgpack.encode({**body, "of_a_later_version": [1]})) == STOCK


@pytest.mark.parametrize("key", REQUIRED)
def test_r33_metadata_without_a_key_are_a_value(key: str) -> None:
    body = msgspec.msgpack.decode(encode_metadata(STOCK))
    del body[key]
    assert key in reason_of(decode_metadata(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize(
    "change",
    [
        {"engine_id": ""},
        {"engine_id": "x" * 300},
        {"num_blocks": 0},
        {"num_blocks": -5},
        {"num_blocks": 2**32 + 1},
        {"block_size": 0},
        {"block_lens": (64,)},
        {"block_lens": (0, 64)},
        {"block_strides": (63, 128)},
        {"kv_caches_base_addr": ()},
        {"kv_caches_base_addr": (MAX_U64, 0)},
        {"kv_caches_base_addr": (-1, 0)},
        {"region_num_blocks": (1,)},
        {"region_num_blocks": (0, 1)},
        {"region_group_ids": (-1, 0)},
        {"region_mem_types": ("VRAM", "SSD")},
        {"packed_member_layouts": {"a": (-1, 2)}},
        {"ssm_sizes": (-1, 0)},
        {"dcp_size": 0},
        {"ple_block_len": -1},
        {"physical_blocks_per_logical_kv_block": 0},
        {"pdflow": Capabilities(0, 0)},
        {"pdflow": Capabilities(1, -1)},
        {"pdflow": Capabilities(1, 0, ("",))},
        {"pdflow": Capabilities(1, 0, ("c",) * 65)},
    ],
)
def test_metadata_that_describe_no_memory_are_refused_at_both_ends(change: dict[str, Any]) -> None:
    metadata = msgspec.structs.replace(STOCK, **change)
    with pytest.raises(LocalProtocolError):
        encode_metadata(metadata)
    reason_of(decode_metadata(msgspec.msgpack.encode(metadata)))


@given(st.binary(max_size=300))
def test_r33_any_bytes_are_a_value(data: bytes) -> None:
    decode_request(data)
    decode_metadata(data)
    decode_reply((data, data))
    decode_listener_message((b"id", b"", data))


@pytest.mark.parametrize(
    "packed", [GOOD, encode_metadata(STOCK), encode_metadata(OURS), *encode_reply("h", STOCK, 1.5)]
)
def test_r33_every_mutated_byte_is_a_value(packed: bytes) -> None:
    rng = random.Random(len(packed))
    for at in range(len(packed)):
        for byte in {0x00, 0x80, 0xC1, 0xCB, 0xDD, 0xDF, 0xFF, packed[at] ^ 1, rng.randrange(256)}:
            mutant = packed[:at] + bytes((byte,)) + packed[at + 1 :]
            decode_request(mutant)
            decode_metadata(mutant)
            decode_reply((mutant, b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"))
            decode_reply((packed, mutant))
        decode_metadata(packed[:at])
