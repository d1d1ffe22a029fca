"""Bytes copied from running vLLM 0.32's own classes, and one pinned frame of ours."""

from __future__ import annotations

import hashlib

from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import Completion, Done, Heartbeat, Register
from pdflow.protocol.values import NO_BLOCK, Allocation, allocation_of
from pdflow.protocol.wire import handshake, strict, vllm

PUSH_REG = bytes.fromhex(
    "505553485f5245473a 8b aa726571756573745f6964 b1636d706c2d752d302d6161616161616161"
    "b06465636f64655f656e67696e655f6964 a144 ab6465636f64655f686f7374 a168 ab6465636f64655f706f7274 cd15e0"
    "ae6465636f64655f74705f73697a65 01 af6c6f63616c5f626c6f636b5f696473 91920102"
    "b072656d6f74655f656e67696e655f6964 a150 ab72656d6f74655f686f7374 a170 ab72656d6f74655f706f7274 cd15e1"
    "ae72656d6f74655f74705f73697a65 01 ae72656d6f74655f70705f73697a65 01"
)
ADDRESS = vllm.PushAddress("h", 5600, "P", "p", 5601, 1, 1)
SHARDS = Shards(1, 1, 16)
REGISTER = Register(Reg("D", 0, 0, "cmpl-u-0-aaaaaaaa"), "", 0, SHARDS, Allocation(0, (1, 2)), 0, 0, 0, 0, 0)

METADATA = handshake.AgentMetadata(
    engine_id="D",
    agent_metadata=b"\x00",
    kv_caches_base_addr=(4096,),
    device_id=0,
    num_blocks=2,
    block_lens=(64,),
    block_strides=(64,),
    kv_cache_layout="LBHNC",
    block_size=16,
    ssm_sizes=(0, 0),
    attn_backend_name="FLASH_ATTN",
    physical_blocks_per_logical_kv_block=1,
)


def test_push_reg_of_203_bytes() -> None:
    assert len(PUSH_REG) == 203
    assert vllm.encode_push_reg(REGISTER, ADDRESS) == PUSH_REG
    push = vllm.decode_notification(PUSH_REG)
    assert isinstance(push, vllm.PushReg)
    assert push.address == ADDRESS
    assert push.register(0, SHARDS) == REGISTER


def test_completion_and_heartbeat() -> None:
    completion = Completion("cmpl-u-0-aaaaaaaa", 1)
    assert vllm.encode_completion(completion) == b"cmpl-u-0-aaaaaaaa:1"
    assert vllm.decode_notification(b"cmpl-u-0-aaaaaaaa:1") == completion
    heartbeat = Heartbeat(("cmpl-u-0-cccccccc", "cmpl-v-0-dddddddd"))
    assert vllm.encode_heartbeats(heartbeat) == (b"HB:cmpl-u-0-cccccccc,cmpl-v-0-dddddddd",)
    assert vllm.decode_notification(b"HB:cmpl-u-0-cccccccc,cmpl-v-0-dddddddd") == heartbeat


def test_handshake_request() -> None:
    golden = bytes.fromhex("93 c40c 6765745f6d6574615f6d7367 00 01")
    assert handshake.encode_request(handshake.MetaRequest(0, 1)) == golden
    assert handshake.decode_request(golden) == handshake.MetaRequest(0, 1)
    assert handshake.decode_listener_message((b"identity", b"", golden)) == handshake.MetaRequest(0, 1)


def test_handshake_payload_and_clock() -> None:
    payload = bytes.fromhex(
        "82 b2 636f6d7061746962696c6974795f68617368 a2 6162 b4 6167656e745f6d657461646174615f6279746573 c401 00"
    )
    clock = bytes.fromhex("cb 3ff8000000000000")
    assert handshake.decode_reply((payload, clock)) == handshake.HandshakeReply(handshake.Payload("ab", b"\x00"), 1.5)
    packed, packed_clock = handshake.encode_reply("ab", METADATA, 1.5)
    assert packed_clock == clock
    assert packed.startswith(payload[:-3])


def test_metadata_has_21_entries_in_vllm_s_order() -> None:
    packed = handshake.encode_metadata(METADATA)
    assert packed[:3].hex() == "de0015"
    # bytes are `bin`, tuples arrays, None c0.
    assert b"\xaeagent_metadata\xc4\x01\x00\xb3kv_caches_base_addr\x91\xcd\x10\x00\xa9device_id\x00" in packed
    assert b"\xb1region_num_blocks\xc0" in packed
    assert packed.endswith(
        b"\xa8dcp_size\x01\xa8pcp_size\x01\xadple_block_len\xc0\xaeregion_members\x90\xb5packed_member_layouts\x80"
    )
    assert handshake.decode_metadata(packed) == METADATA


def test_compatibility_hash_is_of_python_s_own_json() -> None:
    factors = handshake.CompatibilityFactors(
        vllm_version="0.32.0",
        nixl_connector_version=14,
        model="m",
        dtype="torch.bfloat16",
        num_kv_heads=8,
        head_size=128,
        num_hidden_layers=32,
        attn_backend_name="FLASH_ATTN",
        cache_dtype="auto",
        is_hma_enabled=False,
        speculative_config=None,
        transfer_mode="push",
    )
    text = (
        '{"attn_backend_name": "FLASH_ATTN", "cache_dtype": "auto", "dtype": "torch.bfloat16", "head_size": 128, '
        '"is_hma_enabled": false, "model": "m", "nixl_connector_version": 14, "num_hidden_layers": 32, '
        '"num_kv_heads": 8, "speculative_config": null, "transfer_mode": "push", "vllm_version": "0.32.0"}'
    )
    assert handshake.compatibility_hash(factors) == hashlib.sha256(text.encode()).hexdigest()


def test_a_strict_done() -> None:
    done = Done(Reg("D", 7, 3, "cmpl-u-0-aaaaaaaa"), 1, 9, 4096, 2)
    golden = (
        b"\x00\x00\x00\x70\x01"
        b"\x86\xa4type\xa4DONE"
        b"\xa3reg\x84\xa6engine\xa1D\xabincarnation\x07\xa3seq\x03\xaarequest_id\xb1cmpl-u-0-aaaaaaaa"
        b"\xa6p_rank\x01\xaageneration\x09\xa6nbytes\xcd\x10\x00\xa7weights\x02"
    )
    assert strict.encode_frame(done) == golden
    assert strict.decode_done(golden) == done


def strict_register(target: Allocation) -> Register:
    return Register(Reg("D", 7, 3, "r"), "x", 1, Shards(2, 1, 16), target, 32, 47, 5, 6, 2)


REGISTER_BEGIN = (
    b"\x8c\xa4type\xa3REG\xa3reg\x84\xa6engine\xa1D\xabincarnation\x07\xa3seq\x03\xaarequest_id\xa1r\xa3xid\xa1x"
    b"\xa6d_rank\x01\xa6shards\x83\xa2tp\x02\xa2pp\x01\xaablock_size\x10\xa6target"
)
REGISTER_END = (
    b"\xabtoken_start\x20\xaanum_tokens\x2f\xa6digest\x05\xa7weights\x06\xa5floor\x02\xb2prefill_request_id\xa0"
)
ONE_GROUP = b"\x82\xaageneration\x09\xa6blocks\x93\x01\x02\x03"
TWO_GROUPS = b"\x83\xaageneration\x09\xa6blocks\x94\x01\x02\x03\x05\xa6groups\x92\x93\x01\x02\x03\x93\xff\xff\x05"


def test_a_strict_register_of_one_kv_cache_group() -> None:
    """Peers that know no groups send and read the same bytes."""
    message = strict_register(Allocation(9, (1, 2, 3)))
    body = REGISTER_BEGIN + ONE_GROUP + REGISTER_END
    golden = (len(body) + 1).to_bytes(4, "big") + b"\x01" + body
    assert strict.encode_frame(message) == golden
    assert strict.decode_frame(golden) == message


def test_a_strict_register_of_two_kv_cache_groups() -> None:
    """The second one keeps nothing of the first two blocks."""
    message = strict_register(allocation_of(9, ((1, 2, 3), (NO_BLOCK, NO_BLOCK, 5))))
    assert message.target == Allocation(9, (1, 2, 3, 5), ((1, 2, 3), (NO_BLOCK, NO_BLOCK, 5)))
    body = REGISTER_BEGIN + TWO_GROUPS + REGISTER_END
    golden = (len(body) + 1).to_bytes(4, "big") + b"\x01" + body
    assert strict.encode_frame(message) == golden
    assert strict.decode_frame(golden) == message
