"""Checks that a message could have been sent by a correct peer: ranges and lengths, which types do not express.

Meaning stays with the endpoints: a REG with too few blocks for its tokens is answered with FAIL(LAYOUT), not refused
here. Every check returns what is wrong, or "" if nothing is; encoders and decoders ask the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Done,
    Fail,
    Register,
    RegisterAck,
    Release,
    StrictFrame,
    Sync,
    SyncReply,
    Taken,
)
from pdflow.protocol.values import blocks_of
from pdflow.protocol.wire.limits import (
    MAX_BLOCK_ID,
    MAX_BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_POSITIONS,
    MAX_RANKS,
    MAX_SYNC_REGS,
    MAX_SYNC_XIDS,
    MAX_TOKENS,
    MAX_U63,
    MAX_U64,
)

Problem: TypeAlias = str


def text_problem(name: str, text: str, most_bytes: int) -> Problem:
    """Check that a text is not empty, is valid UTF-8 (JSON lets lone surrogates in) and is not too long."""
    if not text:
        return f"{name} is empty"
    if text.isascii():
        return "" if len(text) <= most_bytes else f"{name} has {len(text)} bytes, {most_bytes} are allowed"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return f"{name} is not UTF-8"
    return "" if size <= most_bytes else f"{name} has {size} bytes, {most_bytes} are allowed"


def id_problem(request_id: str) -> Problem:
    """Check that a request id or xid can be sent. To be called once, where a request is admitted."""
    return text_problem("id", request_id, MAX_ID_BYTES)


def optional_problem(name: str, text: str | None) -> Problem:
    """Check an id that may be absent or empty."""
    return text_problem(name, text, MAX_ID_BYTES) if text else ""


def range_problem(name: str, value: int, low: int, high: int) -> Problem:
    return "" if low <= value <= high else f"{name} is {value}, expected {low} to {high}"


def blocks_problem(blocks: tuple[int, ...]) -> Problem:
    if not 0 < len(blocks) <= MAX_BLOCKS:
        return f"{len(blocks)} blocks, expected 1 to {MAX_BLOCKS}"
    return range_problem("block id", min(blocks), 0, MAX_BLOCK_ID) or range_problem(
        "block id", max(blocks), 0, MAX_BLOCK_ID
    )


def groups_problem(groups: tuple[tuple[int, ...], ...], blocks: tuple[int, ...]) -> Problem:
    """Check the block tables of several KV cache groups, whose blocks must be these."""
    if len(groups) > MAX_GROUPS:
        return f"{len(groups)} KV cache groups, at most {MAX_GROUPS} are allowed"
    positions = sum(map(len, groups))
    if positions > MAX_POSITIONS:
        return f"{positions} entries of block tables, at most {MAX_POSITIONS} are allowed"
    return "" if not groups or blocks_of(groups) == blocks else "blocks are not those of the KV cache groups"


def shards_problem(shards: Shards) -> Problem:
    return (
        range_problem("tp", shards.tp, 1, MAX_RANKS)
        or range_problem("pp", shards.pp, 1, MAX_RANKS)
        or range_problem("ranks", shards.ranks, 1, MAX_RANKS)
        or range_problem("block_size", shards.block_size, 1, MAX_BLOCK_TOKENS)
    )


def reg_problem(reg: Reg) -> Problem:
    return (
        text_problem("engine", reg.engine, MAX_NAME_BYTES)
        or range_problem("incarnation", reg.incarnation, 0, MAX_U64)
        or range_problem("seq", reg.seq, 0, MAX_U63)
        or text_problem("request_id", reg.request_id, MAX_ID_BYTES)
    )


def register_problem(message: Register) -> Problem:
    """Check every field but the xid: `strict` needs one, vLLM's PUSH_REG may have none."""
    return (
        reg_problem(message.reg)
        or shards_problem(message.shards)
        or range_problem("d_rank", message.d_rank, 0, message.shards.ranks - 1)
        or range_problem("generation", message.target.generation, 0, MAX_U64)
        or blocks_problem(message.target.blocks)
        or groups_problem(message.target.groups, message.target.blocks)
        or range_problem("token_start", message.token_start, 0, MAX_TOKENS)
        or range_problem("num_tokens", message.num_tokens, 0, MAX_TOKENS)
        or range_problem("digest", message.digest, 0, MAX_U64)
        or range_problem("weights", message.weights, 0, MAX_U64)
        or range_problem("floor", message.floor, 0, MAX_U63)
        or optional_problem("prefill_request_id", message.prefill_request_id)
    )


def _register(message: Register) -> Problem:
    # Without an xid the matcher falls back to base ids, which strict must never do (R39).
    return text_problem("xid", message.xid, MAX_ID_BYTES) or register_problem(message)


def _p_rank(message: RegisterAck | Done | Fail | CancelAck) -> Problem:
    return reg_problem(message.reg) or range_problem("p_rank", message.p_rank, 0, MAX_RANKS - 1)


def _register_ack(message: RegisterAck) -> Problem:
    if len(message.targets) > MAX_RANKS:
        return f"{len(message.targets)} targets, at most {MAX_RANKS} are allowed"
    return _p_rank(message) or next(
        (p for t in message.targets if (p := range_problem("target", t, 0, MAX_RANKS - 1))), ""
    )


def _done(message: Done) -> Problem:
    return (
        _p_rank(message)
        or range_problem("generation", message.generation, 0, MAX_U64)
        or range_problem("nbytes", message.nbytes, 0, MAX_U63)
        or range_problem("weights", message.weights, 0, MAX_U64)
    )


def _cancel(message: Cancel) -> Problem:
    return reg_problem(message.reg) or range_problem("floor", message.floor, 0, MAX_U63)


def _release(message: Release) -> Problem:
    return text_problem("xid", message.xid, MAX_ID_BYTES)


def _taken(message: Taken) -> Problem:
    return (
        text_problem("xid", message.xid, MAX_ID_BYTES)
        or range_problem("d_rank", message.d_rank, 0, MAX_RANKS - 1)
        or range_problem("readers", message.readers, 1, MAX_RANKS)
    )


def _sync(message: Sync) -> Problem:
    if len(message.interest) > MAX_SYNC_XIDS or len(message.open) > MAX_SYNC_REGS:
        return f"{len(message.interest)} xids and {len(message.open)} regs, at most {MAX_SYNC_XIDS} are allowed of each"
    return (
        range_problem("seq", message.seq, 0, MAX_U63)
        or range_problem("floor", message.floor, 0, MAX_U63)
        or next((p for xid in message.interest if (p := text_problem("xid", xid, MAX_ID_BYTES))), "")
        or next((p for reg in message.open if (p := reg_problem(reg))), "")
    )


def _sync_reply(message: SyncReply) -> Problem:
    if len(message.items) > MAX_SYNC_REGS:
        return f"{len(message.items)} items, at most {MAX_SYNC_REGS} are allowed"
    return range_problem("seq", message.seq, 0, MAX_U63) or next(
        (p for item in message.items if (p := reg_problem(item.reg))), ""
    )


def frame_problem(message: StrictFrame) -> Problem:
    return _CHECKS[type(message)](message)


_CHECKS: dict[type, Callable[[Any], Problem]] = {
    Register: _register,
    RegisterAck: _register_ack,
    Done: _done,
    Fail: _p_rank,
    Cancel: _cancel,
    CancelAck: _p_rank,
    Release: _release,
    Taken: _taken,
    Sync: _sync,
    SyncReply: _sync_reply,
}
