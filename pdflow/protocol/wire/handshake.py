"""vLLM 0.32's side channel: request, reply and metadata of a handshake, to the byte (spec 3.3).

vLLM's listener thread ends at one message that it cannot read (R33); these decoders answer every message with a value.
Extra map keys are ignored on both sides, so stock peers ignore ours, `pdflow`.

Not here: comparing hashes, engine ids and layouts. The order in which a requester asks is: payload, hash, metadata,
engine id, and nothing of it is believed before all agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.values import EngineId, Value
from pdflow.protocol.wire.checks import Problem, range_problem, text_problem
from pdflow.protocol.wire.limits import (
    MAX_BLOCK_ID,
    MAX_BLOCK_TOKENS,
    MAX_CAPABILITIES,
    MAX_HANDSHAKE_BYTES,
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_U63,
    MAX_U64,
)
from pdflow.protocol.wire.malformed import Malformed, malformed, unpack

GET_META = b"get_meta_msg"
MEMORY_TYPES = ("VRAM", "DRAM")


class MetaRequest(Value, frozen=True, gc=False):
    """A request for the metadata of one worker of the listening engine."""

    pp_rank: int
    tp_rank: int


class CompatibilityFactors(Value, frozen=True, gc=False, kw_only=True):
    """The properties that two engines must share, all of them hashed; TP, PP, block size and layout are compared
    later."""

    vllm_version: str
    nixl_connector_version: int
    model: str
    dtype: str
    num_kv_heads: int
    head_size: int
    num_hidden_layers: int
    attn_backend_name: str
    cache_dtype: str
    is_hma_enabled: bool
    speculative_config: dict[str, Any] | None
    transfer_mode: str


class Capabilities(Value, frozen=True, gc=False):
    """The value of our key `pdflow`: strict version, incarnation, names of optional parts. Later versions only add
    keys."""

    v: int
    inc: int
    caps: tuple[str, ...] = ()


class Payload(Value, frozen=True, gc=False):
    """The first body frame of the reply. The metadata stay packed until the hash has been compared."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


class HandshakeReply(Value, frozen=True, gc=False):
    payload: Payload
    clock_s: float
    """The responder's perf_counter: an instant of another process, good for an offset estimate only."""


class AgentMetadata(Value, frozen=True, gc=False, kw_only=True):
    """The memory and shape of one worker, in the order in which vLLM emits the keys."""

    engine_id: EngineId
    agent_metadata: bytes
    kv_caches_base_addr: tuple[int, ...]
    device_id: int
    num_blocks: int
    """Physical (kernel) blocks."""
    block_lens: tuple[int, ...]
    block_strides: tuple[int, ...]
    kv_cache_layout: str
    block_size: int
    """Tokens of a kernel block."""
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: tuple[int, ...] | None = None
    region_group_ids: tuple[int, ...] | None = None
    region_names: tuple[str, ...] | None = None
    region_mem_types: tuple[str, ...] | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: int | None = None
    region_members: tuple[tuple[str, ...], ...] = ()
    packed_member_layouts: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    pdflow: Capabilities | UnsetType = UNSET


_encoder = msgspec.msgpack.Encoder()
_request = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_payload = msgspec.msgpack.Decoder(Payload)
_metadata = msgspec.msgpack.Decoder(AgentMetadata)
_clock = msgspec.msgpack.Decoder(float)


def compatibility_hash(factors: CompatibilityFactors) -> str:
    """Return the SHA-256 in hex over the factors as JSON with sorted keys, in Python's own spacing, as vLLM writes
    them."""
    return hashlib.sha256(json.dumps(msgspec.structs.asdict(factors), sort_keys=True).encode()).hexdigest()


def encode_request(request: MetaRequest) -> bytes:
    return _encoder.encode((GET_META, request.pp_rank, request.tp_rank))


def decode_request(data: bytes) -> MetaRequest | Malformed:
    problem = _size_problem("request", data)
    if problem:
        return malformed(problem)
    asked = unpack(_request, data)
    if isinstance(asked, Malformed):
        return malformed(f"request: {asked.reason}")
    magic, pp_rank, tp_rank = asked
    if magic != GET_META:
        return malformed(f"request: magic is {magic[:20]!r}, expected {GET_META!r}")
    problem = range_problem("pp_rank", pp_rank, 0, MAX_RANKS - 1) or range_problem("tp_rank", tp_rank, 0, MAX_RANKS - 1)
    return malformed(f"request: {problem}") if problem else MetaRequest(pp_rank, tp_rank)


def decode_listener_message(frames: Sequence[bytes]) -> MetaRequest | Malformed:
    """Decode the frames that a ROUTER socket receives from a REQ socket: identity, an empty frame, the request."""
    if len(frames) != 3 or frames[1]:
        return malformed(f"listener message of {len(frames)} frames, expected identity, empty, request")
    return decode_request(frames[2])


def encode_reply(hash_: str, metadata: AgentMetadata, clock_s: float) -> tuple[bytes, bytes]:
    """Return the two body frames of the reply: payload and clock."""
    payload = Payload(hash_, encode_metadata(metadata))
    return _encoder.encode(payload), _encoder.encode(clock_s)


def decode_reply(frames: Sequence[bytes]) -> HandshakeReply | Malformed:
    """Decode the two body frames of the reply, as a REQ socket receives them."""
    if len(frames) != 2:
        return malformed(f"reply of {len(frames)} frames, expected payload and clock")
    problem = _size_problem("payload", frames[0]) or _size_problem("clock", frames[1])
    if problem:
        return malformed(problem)
    payload = unpack(_payload, frames[0])
    if isinstance(payload, Malformed):
        return malformed(f"payload: {payload.reason}")
    clock_s = unpack(_clock, frames[1])
    if isinstance(clock_s, Malformed):
        return malformed(f"clock: {clock_s.reason}")
    problem = text_problem("compatibility_hash", payload.compatibility_hash, MAX_NAME_BYTES)
    if not problem and not math.isfinite(clock_s):
        problem = f"clock is {clock_s}"
    return malformed(f"reply: {problem}") if problem else HandshakeReply(payload, clock_s)


def encode_metadata(metadata: AgentMetadata) -> bytes:
    problem = _metadata_problem(metadata)
    if problem:
        raise LocalProtocolError(f"agent metadata cannot be sent: {problem}")
    return _encoder.encode(metadata)


def decode_metadata(data: bytes) -> AgentMetadata | Malformed:
    problem = _size_problem("metadata", data)
    if problem:
        return malformed(problem)
    metadata = unpack(_metadata, data)
    if isinstance(metadata, Malformed):
        return malformed(f"metadata: {metadata.reason}")
    problem = _metadata_problem(metadata)
    return malformed(f"metadata: {problem}") if problem else metadata


def agreed_version(ours: Capabilities, theirs: AgentMetadata) -> int:
    """Return the strict version that both sides support; 0 where the peer is stock vLLM, and vllm-compat applies to the
    pair."""
    return min(ours.v, theirs.pdflow.v) if theirs.pdflow is not UNSET else 0


def _size_problem(name: str, data: bytes) -> Problem:
    return "" if len(data) <= MAX_HANDSHAKE_BYTES else f"{name} of {len(data)} bytes, {MAX_HANDSHAKE_BYTES} are allowed"


def _metadata_problem(m: AgentMetadata) -> Problem:
    return (
        text_problem("engine_id", m.engine_id, MAX_NAME_BYTES)
        or range_problem("device_id", m.device_id, 0, MAX_U63)
        or range_problem("num_blocks", m.num_blocks, 1, MAX_BLOCK_ID + 1)
        or text_problem("kv_cache_layout", m.kv_cache_layout, MAX_NAME_BYTES)
        or range_problem("block_size", m.block_size, 1, MAX_BLOCK_TOKENS)
        or next((p for n in m.ssm_sizes if (p := range_problem("ssm_sizes", n, 0, MAX_U63))), "")
        or text_problem("attn_backend_name", m.attn_backend_name, MAX_NAME_BYTES)
        or range_problem(
            "physical_blocks_per_logical_kv_block", m.physical_blocks_per_logical_kv_block, 1, MAX_BLOCK_ID
        )
        or range_problem("dcp_size", m.dcp_size, 1, MAX_RANKS)
        or range_problem("pcp_size", m.pcp_size, 1, MAX_RANKS)
        or range_problem("ple_block_len", m.ple_block_len or 0, 0, MAX_U63)
        or _regions_problem(m)
        or _names_problem(m)
        or _capabilities_problem(m)
    )


def _regions_problem(m: AgentMetadata) -> Problem:
    """Check that every list has one entry per region, and that no region reaches beyond the 64-bit address space."""
    regions = len(m.kv_caches_base_addr)
    if not 0 < regions <= MAX_REGIONS:
        return f"{regions} regions, expected 1 to {MAX_REGIONS}"
    lists: dict[str, Sequence[object] | None] = {
        "block_lens": m.block_lens,
        "block_strides": m.block_strides,
        "region_num_blocks": m.region_num_blocks,
        "region_group_ids": m.region_group_ids,
        "region_names": m.region_names,
        "region_mem_types": m.region_mem_types,
    }
    for name, entries in lists.items():
        if entries is not None and len(entries) != regions:
            return f"{name} has {len(entries)} entries for {regions} regions"
    counts = m.region_num_blocks or (m.num_blocks,) * regions
    for base, length, stride, blocks in zip(m.kv_caches_base_addr, m.block_lens, m.block_strides, counts, strict=True):
        if not 0 < length <= stride:
            return f"block of {length} bytes every {stride} bytes"
        if base < 0 or blocks < 1 or base + blocks * stride > MAX_U64:
            return f"a region of {blocks} blocks of {stride} bytes at {base}"
    return next(
        (p for g in m.region_group_ids or () if (p := range_problem("region_group_ids", g, 0, MAX_REGIONS))), ""
    )


def _names_problem(m: AgentMetadata) -> Problem:
    for kind in m.region_mem_types or ():
        if kind not in MEMORY_TYPES:
            return f"memory type {kind[:20]!r}, expected one of {', '.join(MEMORY_TYPES)}"
    for member, (offset, size) in m.packed_member_layouts.items():
        if not member or not 0 <= offset <= MAX_U63 or not 0 <= size <= MAX_U63:
            return f"packed_member_layouts has {member[:20]!r} at {offset}, {size} bytes"
    return ""


def _capabilities_problem(m: AgentMetadata) -> Problem:
    if m.pdflow is UNSET:
        return ""
    if len(m.pdflow.caps) > MAX_CAPABILITIES:
        return f"{len(m.pdflow.caps)} capabilities, at most {MAX_CAPABILITIES} are allowed"
    return (
        range_problem("pdflow.v", m.pdflow.v, 1, 255)
        or range_problem("pdflow.inc", m.pdflow.inc, 0, MAX_U64)
        or next((p for c in m.pdflow.caps if (p := text_problem("pdflow.caps", c, MAX_NAME_BYTES))), "")
    )
