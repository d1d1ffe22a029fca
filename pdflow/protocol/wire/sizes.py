"""Sizes of messages in bytes, computed without encoding them, for the simulator's links: encoding would cost more.

Exact, but for block ids and a REG_ACK's targets: each counts as the largest id would (`BLOCK_ID_BYTES`), so that the
cost does not grow with the prompt. A pool of fewer than 65,536 blocks is overcharged by 2 bytes a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Completion,
    Done,
    Fail,
    Heartbeat,
    Notification,
    Register,
    RegisterAck,
    Release,
    Sync,
    SyncItem,
    SyncReply,
    Taken,
)
from pdflow.protocol.values import Allocation
from pdflow.protocol.wire.strict import HEADER_BYTES, Frame, Hello
from pdflow.protocol.wire.vllm import HEARTBEAT, PUSH_REG, Pdf, PushAddress, PushReg

BLOCK_ID_BYTES = 5
RANK_BYTES = 3
_INT = tuple(1 if bits < 8 else 2 if bits < 9 else 3 if bits < 17 else 5 if bits < 33 else 9 for bits in range(65))
"""Bytes of a non-negative msgpack integer, by its bit length."""


def _text(text: str) -> int:
    n = len(text) if text.isascii() else len(text.encode())
    return n + 1 if n < 32 else n + 2 if n < 256 else n + 3 if n < 65_536 else n + 5


def _binary(data: bytes) -> int:
    n = len(data)
    return n + 2 if n < 256 else n + 3 if n < 65_536 else n + 5


def _array(length: int) -> int:
    return 1 if length < 16 else 3 if length < 65_536 else 5


def _map(keys: tuple[str, ...]) -> int:
    return (1 if len(keys) < 16 else 3) + sum(map(_text, keys))


def _names(kind: type[msgspec.Struct]) -> int:
    """Return the bytes of the header and field names of a struct's map, its tag included."""
    config = kind.__struct_config__
    if config.tag is None:
        return _map(kind.__struct_fields__)
    return _map((str(config.tag_field), *kind.__struct_fields__)) + _text(str(config.tag))


_REG, _SHARDS, _ITEM = _names(Reg), _names(Shards), _names(SyncItem)
_GROUPS = _text("groups")
_ALLOCATION = _names(Allocation) - _GROUPS
_FRAME = {
    kind: HEADER_BYTES + _names(kind)
    for kind in (Hello, Register, RegisterAck, Done, Fail, Cancel, CancelAck, Release, Taken, Sync, SyncReply)
}
_PUSH = PushReg.__struct_fields__[:11]
_PUSH_REG_BYTES = len(PUSH_REG) + _map(_PUSH) + _array(1)
_TRANSFER_ID_BYTES = _text("transfer_id")
_PDF_BYTES = _text("pdf") + _names(Pdf)


def frame_size(message: Frame) -> int:
    """Return the bytes of a strict frame, its length field included: exact, but for the widths of ids named above."""
    return _SIZES[type(message)](message)


def notification_size(
    message: Notification, address: PushAddress, *, transfer_id: bool = False, pdf: bool = False
) -> int:
    """Return the bytes of a message as vLLM's notification; `address` is used for a registration only."""
    if isinstance(message, Completion):
        return len(message.request_id.encode()) + 1 + len(str(message.count))
    if isinstance(message, Heartbeat):
        ids = message.request_ids
        return len(HEARTBEAT) + sum(len(i.encode()) for i in ids) + max(0, len(ids) - 1)
    size = _push_reg(message, address)
    if transfer_id and message.xid:
        size += _TRANSFER_ID_BYTES + _text(message.xid)
    return size + _PDF_BYTES + _pdf(message) if pdf else size


def _push_reg(message: Register, address: PushAddress) -> int:
    w = _INT
    blocks = len(message.target.blocks)
    return (
        _PUSH_REG_BYTES
        + _text(message.reg.request_id)
        + _text(message.reg.engine)
        + _text(address.decode_host)
        + w[address.decode_port.bit_length()]
        + w[message.shards.tp.bit_length()]
        + _array(blocks)
        + BLOCK_ID_BYTES * blocks
        + _text(address.remote_engine_id)
        + _text(address.remote_host)
        + w[address.remote_port.bit_length()]
        + w[address.remote_tp_size.bit_length()]
        + w[address.remote_pp_size.bit_length()]
    )


def _pdf(m: Register) -> int:
    ints = (
        *(m.reg.incarnation, m.reg.seq, m.target.generation, m.d_rank, m.shards.ranks, m.shards.block_size),
        *(m.token_start, m.num_tokens, m.digest, m.weights, m.floor),
    )
    return 1 + sum(_INT[n.bit_length()] for n in ints) + _text(m.xid) + _text(m.prefill_request_id)


def _reg(reg: Reg) -> int:
    engine, request_id = reg.engine, reg.request_id
    return _REG + _text(engine) + _INT[reg.incarnation.bit_length()] + _INT[reg.seq.bit_length()] + _text(request_id)


def _register(m: Register) -> int:
    w = _INT
    shards, blocks = m.shards, len(m.target.blocks)
    return (
        _FRAME[Register]
        + _reg(m.reg)
        + _text(m.xid)
        + w[m.d_rank.bit_length()]
        + _SHARDS
        + w[shards.tp.bit_length()]
        + w[shards.pp.bit_length()]
        + w[shards.block_size.bit_length()]
        + _ALLOCATION
        + w[m.target.generation.bit_length()]
        + _array(blocks)
        + BLOCK_ID_BYTES * blocks
        + (_groups(m.target.groups) if m.target.groups else 0)
        + w[m.token_start.bit_length()]
        + w[m.num_tokens.bit_length()]
        + w[m.digest.bit_length()]
        + w[m.weights.bit_length()]
        + w[m.floor.bit_length()]
        + _text(m.prefill_request_id)
    )


def _groups(tables: tuple[tuple[int, ...], ...]) -> int:
    """Return the bytes of the block tables of several KV cache groups."""
    entries = sum([_array(len(table)) + BLOCK_ID_BYTES * len(table) for table in tables])
    return _GROUPS + _array(len(tables)) + entries


def _register_ack(m: RegisterAck) -> int:
    targets = len(m.targets)
    return _FRAME[RegisterAck] + _reg(m.reg) + _INT[m.p_rank.bit_length()] + 1 + _array(targets) + RANK_BYTES * targets


def _done(m: Done) -> int:
    w = _INT
    return (
        _FRAME[Done]
        + _reg(m.reg)
        + w[m.p_rank.bit_length()]
        + w[m.generation.bit_length()]
        + w[m.nbytes.bit_length()]
        + w[m.weights.bit_length()]
    )


def _ended(m: Fail | CancelAck) -> int:
    """Return the bytes of FAIL or CANCEL_ACK: code or disposition, and flushed, take one each."""
    return _FRAME[type(m)] + _reg(m.reg) + _INT[m.p_rank.bit_length()] + 2


def _cancel(m: Cancel) -> int:
    return _FRAME[Cancel] + _reg(m.reg) + _INT[m.floor.bit_length()]


def _release(m: Release) -> int:
    return _FRAME[Release] + _text(m.xid)


def _taken(m: Taken) -> int:
    return _FRAME[Taken] + _text(m.xid) + _INT[m.d_rank.bit_length()] + _INT[m.readers.bit_length()]


def _sync(m: Sync) -> int:
    return (
        _FRAME[Sync]
        + _INT[m.seq.bit_length()]
        + _INT[m.floor.bit_length()]
        + _array(len(m.interest))
        + sum(map(_text, m.interest))
        + _array(len(m.open))
        + sum(map(_reg, m.open))
    )


def _sync_reply(m: SyncReply) -> int:
    items = m.items
    each = _ITEM + 3
    return (
        _FRAME[SyncReply]
        + _INT[m.seq.bit_length()]
        + _array(len(items))
        + each * len(items)
        + sum(_reg(item.reg) for item in items)
    )


def _hello(m: Hello) -> int:
    w = _INT
    return (
        _FRAME[Hello]
        + _text(m.address)
        + w[m.incarnation.bit_length()]
        + w[m.nonce.bit_length()]
        + w[m.echo.bit_length()]
        + _text(m.to)
        + _binary(m.metadata)
    )


_SIZES: dict[type, Callable[[Any], int]] = {
    Hello: _hello,
    Register: _register,
    RegisterAck: _register_ack,
    Done: _done,
    Fail: _ended,
    Cancel: _cancel,
    CancelAck: _ended,
    Release: _release,
    Taken: _taken,
    Sync: _sync,
    SyncReply: _sync_reply,
}
