"""vLLM 0.32's notifications, to the byte: PUSH_REG, "{id}:{n}" and "HB:id,id" (spec 3.2).

vLLM itself raises on its engine thread for a notification that is none of these, and for a PUSH_REG with a key missing
(R32, R34). Here every field is checked before any is used, and one bad notification is one `Malformed`, whatever
else came in the same batch. Never send a stock peer anything but these bytes; extra keys inside PUSH_REG are ignored
by it, and carry `transfer_id` and our `pdf`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import Completion, Heartbeat, Register
from pdflow.protocol.values import Allocation, EngineId, RequestId, Value, Xid
from pdflow.protocol.wire.checks import (
    Problem,
    blocks_problem,
    id_problem,
    optional_problem,
    range_problem,
    register_problem,
    text_problem,
)
from pdflow.protocol.wire.limits import (
    MAX_HEARTBEAT_IDS,
    MAX_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_NOTIFICATION_BYTES,
    MAX_RANKS,
)
from pdflow.protocol.wire.malformed import Malformed, malformed, unpack

PUSH_REG = b"PUSH_REG:"
HEARTBEAT = b"HB:"
MISROUTED = ("PUSH_REG:", "HB:")
"""Prefixes that an id must not have: its completion would be read as another message."""

PDF_VERSION = 1


class PushAddress(Value, frozen=True, gc=False):
    """The address for P's handshake back to D, and P's own coordinates, echoed."""

    decode_host: str
    decode_port: int
    remote_engine_id: EngineId
    remote_host: str
    remote_port: int
    remote_tp_size: int
    remote_pp_size: int


class Pdf(Value, frozen=True, gc=False):
    """The value of the key `pdf` of PUSH_REG: the fields of a strict REG beyond vLLM's keys. Later versions only add
    keys."""

    v: int
    inc: int
    seq: int
    gen: int
    rank: int
    ranks: int
    block_size: int
    xid: Xid
    token_start: int
    num_tokens: int
    pfx: int
    wver: int
    floor: int
    p_request_id: RequestId


class PushReg(Value, frozen=True, gc=False):
    """The map of a PUSH_REG: 11 keys in vLLM's order, then the optional ones."""

    request_id: RequestId
    decode_engine_id: EngineId
    decode_host: str
    decode_port: int
    decode_tp_size: int
    local_block_ids: tuple[tuple[int, ...], ...]
    remote_engine_id: EngineId
    remote_host: str
    remote_port: int
    remote_tp_size: int
    remote_pp_size: int
    transfer_id: Xid | UnsetType | None = UNSET
    pdf: Pdf | UnsetType = UNSET

    @property
    def address(self) -> PushAddress:
        return PushAddress(
            self.decode_host,
            self.decode_port,
            self.remote_engine_id,
            self.remote_host,
            self.remote_port,
            self.remote_tp_size,
            self.remote_pp_size,
        )

    def register(self, rank: int, shards: Shards) -> Register | Malformed:
        """Return the message, given the sender's rank and shards as P's handshake with its agent showed them.

        Stock vLLM sends no tokens, generation or content: they are 0, and P computes the position from its own
        token count. Where the bytes and the handshake disagree, the message is malformed.
        """
        message = self._register(rank, shards)
        problem = "" if self.decode_tp_size == shards.tp else f"tp is {self.decode_tp_size}, handshake says {shards.tp}"
        if self.pdf is not UNSET:
            claimed = (self.pdf.rank, self.pdf.ranks, self.pdf.block_size)
            known = (rank, shards.ranks, shards.block_size)
            problem = problem or (
                "" if claimed == known else f"(rank, ranks, block_size) is {claimed}, handshake says {known}"
            )
        problem = problem or register_problem(message)
        return malformed(f"PUSH_REG: {problem}") if problem else message

    def _register(self, rank: int, shards: Shards) -> Register:
        blocks = self.local_block_ids[0]
        xid = self.transfer_id or ""
        pdf = self.pdf
        if pdf is UNSET:
            reg = Reg(self.decode_engine_id, 0, 0, self.request_id)
            return Register(reg, xid, rank, shards, Allocation(0, blocks), 0, 0, 0, 0, 0)
        reg = Reg(self.decode_engine_id, pdf.inc, pdf.seq, self.request_id)
        return Register(
            reg,
            pdf.xid or xid,
            rank,
            shards,
            Allocation(pdf.gen, blocks),
            pdf.token_start,
            pdf.num_tokens,
            pdf.pfx,
            pdf.wver,
            pdf.floor,
            pdf.p_request_id,
        )


VllmNotification: TypeAlias = PushReg | Completion | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PushReg)


def encode_push_reg(message: Register, address: PushAddress, *, transfer_id: bool = False, pdf: bool = False) -> bytes:
    """Encode a registration as PUSH_REG. `transfer_id` and `pdf` add these keys: stock 0.32 ignores both, newer vLLM
    matches on the first."""
    push = push_reg(message, address, transfer_id=transfer_id, pdf=pdf)
    problem = register_problem(message) or _push_reg_problem(push)
    if problem:
        raise LocalProtocolError(f"PUSH_REG cannot be sent: {problem}")
    return PUSH_REG + _encoder.encode(push)


def push_reg(message: Register, address: PushAddress, *, transfer_id: bool, pdf: bool) -> PushReg:
    """Return a registration as the map of a PUSH_REG."""
    reg = message.reg
    return PushReg(
        reg.request_id,
        reg.engine,
        address.decode_host,
        address.decode_port,
        message.shards.tp,
        message.target.tables,
        address.remote_engine_id,
        address.remote_host,
        address.remote_port,
        address.remote_tp_size,
        address.remote_pp_size,
        message.xid if transfer_id and message.xid else UNSET,
        _pdf(message) if pdf else UNSET,
    )


def _pdf(message: Register) -> Pdf:
    return Pdf(
        v=PDF_VERSION,
        inc=message.reg.incarnation,
        seq=message.reg.seq,
        gen=message.target.generation,
        rank=message.d_rank,
        ranks=message.shards.ranks,
        block_size=message.shards.block_size,
        xid=message.xid,
        token_start=message.token_start,
        num_tokens=message.num_tokens,
        pfx=message.digest,
        wver=message.weights,
        floor=message.floor,
        p_request_id=message.prefill_request_id,
    )


def encode_completion(message: Completion) -> bytes:
    problem = _completion_problem(message.request_id) or range_problem("count", message.count, 1, MAX_RANKS)
    if problem:
        raise LocalProtocolError(f"completion cannot be sent: {problem}")
    return f"{message.request_id}:{message.count}".encode()


def encode_heartbeats(message: Heartbeat) -> tuple[bytes, ...]:
    """Encode a heartbeat, usually as one notification; as more where one would be too large for a decoder like ours.

    An id that the format cannot express (empty, with a comma, too long) is left out: its lease is not renewed, and
    every other one is. Ids come from clients' headers, so raising would let one client stop everybody's heartbeats.
    """
    ids = [i for i in message.request_ids if "," not in i and not id_problem(i)]
    step = min(MAX_HEARTBEAT_IDS, MAX_NOTIFICATION_BYTES // (MAX_ID_BYTES + 1) - 1) if _too_large(ids) else len(ids)
    return tuple(HEARTBEAT + ",".join(ids[at : at + step]).encode() for at in range(0, len(ids), step or 1)) or (
        HEARTBEAT,
    )


def _too_large(ids: list[RequestId]) -> bool:
    if len(ids) > MAX_HEARTBEAT_IDS:
        return True
    return sum(map(len, ids)) * 4 + len(ids) + len(HEARTBEAT) > MAX_NOTIFICATION_BYTES


def decode_notification(data: bytes) -> VllmNotification | Malformed:
    """Decode any bytes from a vLLM peer. Never raises."""
    if len(data) > MAX_NOTIFICATION_BYTES:
        return malformed(f"notification of {len(data)} bytes, {MAX_NOTIFICATION_BYTES} are allowed")
    if data.startswith(PUSH_REG):
        return _read_push_reg(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return malformed(f"notification: {error}")
    if text.startswith("HB:"):
        return _read_heartbeat(text[len("HB:") :])
    return _read_completion(text)


def _read_push_reg(data: bytes) -> PushReg | Malformed:
    with memoryview(data)[len(PUSH_REG) :] as body:
        push = unpack(_decoder, body)
    if isinstance(push, Malformed):
        return malformed(f"PUSH_REG: {push.reason}")
    problem = _push_reg_problem(push)
    return malformed(f"PUSH_REG: {problem}") if problem else push


def _read_completion(text: str) -> Completion | Malformed:
    """Decode "{id}:{n}". The last colon splits, as vLLM's rsplit does: ids may hold colons. Counts are what str(int)
    writes."""
    request_id, colon, count = text.rpartition(":")
    if not colon:
        return malformed("completion without a colon")
    # Length first: int() of a long string is slow, and beyond 4,300 digits an error.
    if not (0 < len(count) <= 5 and count.isascii() and count.isdigit() and count[0] != "0"):
        return malformed(f"completion: count is {count[:20]!r}, expected 1 to {MAX_RANKS}")
    n = int(count)
    problem = _completion_problem(request_id) or range_problem("count", n, 1, MAX_RANKS)
    return malformed(f"completion: {problem}") if problem else Completion(request_id, n)


def _read_heartbeat(text: str) -> Heartbeat | Malformed:
    """Decode a heartbeat. Items that cannot be ids are skipped: a client chose such an id, and must not stop the
    others' renewal."""
    if text.count(",") >= MAX_HEARTBEAT_IDS:
        return malformed(f"heartbeat of more than {MAX_HEARTBEAT_IDS} ids")
    return Heartbeat(tuple(i for i in text.split(",") if not id_problem(i)))


def _completion_problem(request_id: RequestId) -> Problem:
    if f"{request_id}:".startswith(MISROUTED):
        return f"id starts with {request_id.partition(':')[0]}:"
    return id_problem(request_id)


def _push_reg_problem(push: PushReg) -> Problem:
    if len(push.local_block_ids) != 1:
        return f"{len(push.local_block_ids)} KV-cache groups, expected 1"
    problem = (
        _completion_problem(push.request_id)
        or text_problem("decode_engine_id", push.decode_engine_id, MAX_NAME_BYTES)
        or text_problem("decode_host", push.decode_host, MAX_NAME_BYTES)
        or range_problem("decode_port", push.decode_port, 1, 65_535)
        or range_problem("decode_tp_size", push.decode_tp_size, 1, MAX_RANKS)
        or blocks_problem(push.local_block_ids[0])
        or text_problem("remote_engine_id", push.remote_engine_id, MAX_NAME_BYTES)
        or text_problem("remote_host", push.remote_host, MAX_NAME_BYTES)
        or range_problem("remote_port", push.remote_port, 1, 65_535)
        or range_problem("remote_tp_size", push.remote_tp_size, 1, MAX_RANKS)
        or range_problem("remote_pp_size", push.remote_pp_size, 1, MAX_RANKS)
    )
    if not problem and push.transfer_id is not UNSET:
        problem = optional_problem("transfer_id", push.transfer_id)
    return problem or (_pdf_problem(push) if push.pdf is not UNSET else "")


def _pdf_problem(push: PushReg) -> Problem:
    """Check the ranges of `pdf` as those of a strict REG, with the shards that the two numbers of ranks imply."""
    pdf = push.pdf
    assert pdf is not UNSET
    if pdf.v < PDF_VERSION:
        return f"pdf version {pdf.v}, the first is {PDF_VERSION}"
    if not 0 < pdf.ranks <= MAX_RANKS or pdf.ranks % push.decode_tp_size:
        return f"pdf.ranks is {pdf.ranks}, expected a multiple of decode_tp_size {push.decode_tp_size}"
    if pdf.xid and push.transfer_id and pdf.xid != push.transfer_id:
        return "pdf.xid and transfer_id name different work"
    shards = Shards(push.decode_tp_size, pdf.ranks // push.decode_tp_size, pdf.block_size)
    problem = register_problem(push._register(pdf.rank, shards)) or optional_problem("xid", pdf.xid)
    return f"pdf: {problem}" if problem else ""
