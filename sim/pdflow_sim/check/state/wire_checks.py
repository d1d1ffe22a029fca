"""A check of S9: what an endpoint sends reaches its peer as the same message, through the real codec.

Scopes deliver frames as values. Each different frame is encoded and decoded once, when it is first sent; so is the
notification of each WRITE. The size that simulated links carry is held against the bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.messages import Completion, Done, Heartbeat, Register, RegisterAck
from pdflow.protocol.values import Address, Allocation
from pdflow.protocol.wire.sizes import BLOCK_ID_BYTES, RANK_BYTES, frame_size, notification_size
from pdflow.protocol.wire.strict import FrameDecoder, Hello, decode_done, decode_frame, encode_frame
from pdflow.protocol.wire.vllm import (
    PushAddress,
    PushReg,
    decode_notification,
    encode_completion,
    encode_heartbeats,
    encode_push_reg,
)
from pdflow_sim.check.state.shadow_state import Broken

ADDRESS = PushAddress("127.0.0.1", 5600, "P", "localhost", 5601, 1, 1)
HELLO = encode_frame(Hello("D.r0", 201, 1, 0))


def passes_the_codec(node: Address, message: Any, strict: bool) -> None:
    """Check that a peer reads a message as it was meant: in `strict` a frame or a DONE, else a notification of vLLM.
    Raises Broken."""
    try:
        if strict:
            _passes_as_frame(node, message)
        elif isinstance(message, Register):
            _passes_as_push_reg(node, message)
        else:
            _passes_as_text(node, message)
    except LocalProtocolError as error:
        raise Broken("S9", f"{node} sends what no peer would accept: {error}") from error


def _passes_as_frame(node: Address, message: Any) -> None:
    data = encode_frame(message)
    _is_read(node, message, decode_done(data) if isinstance(message, Done) else decode_frame(data))
    decoder = FrameDecoder()
    streamed = [*decoder.feed(HELLO + data[:-1]), *decoder.feed(data[-1:])][1:]
    if streamed != [message]:
        raise Broken("S9", f"{node} sends {message} over a stream, and its peer reads {streamed}")
    _is_sized(node, message, frame_size(message), len(data))


def _passes_as_text(node: Address, message: Completion | Heartbeat) -> None:
    data = encode_completion(message) if isinstance(message, Completion) else encode_heartbeats(message)[0]
    _is_read(node, message, decode_notification(data))
    _is_sized(node, message, notification_size(message, ADDRESS), len(data))


def _passes_as_push_reg(node: Address, message: Register) -> None:
    """With pdflow's keys a registration comes back whole. vLLM's own have no generation: D's blocks are known to D."""
    for pdf in (True, False):
        data = encode_push_reg(message, ADDRESS, transfer_id=pdf, pdf=pdf)
        push = decode_notification(data)
        read = push.register(message.d_rank, message.shards) if isinstance(push, PushReg) else push
        _is_read(node, message if pdf else _as_vllm_sends(message), read)
        assert isinstance(push, PushReg)
        _is_read(node, ADDRESS, push.address)
        _is_sized(node, message, notification_size(message, ADDRESS, transfer_id=pdf, pdf=pdf), len(data))


def _as_vllm_sends(message: Register) -> Register:
    reg = msgspec.structs.replace(message.reg, incarnation=0, seq=0)
    target = Allocation(0, message.target.blocks)
    return Register(reg, "", message.d_rank, message.shards, target, 0, 0, 0, 0, 0)


def _is_read(node: Address, sent: Any, read: Any) -> None:
    if read != sent:
        raise Broken("S9", f"{node} sends {sent}, and its peer reads {read}")


def _is_sized(node: Address, message: Any, size: int, sent: int) -> None:
    """Check the size of a message in simulations, in which each id counts as the largest one would."""
    slack = 0
    if isinstance(message, Register):
        slack = BLOCK_ID_BYTES * (len(message.target.blocks) + sum(map(len, message.target.groups)))
    elif isinstance(message, RegisterAck):
        slack = RANK_BYTES * len(message.targets)
    if not sent <= size <= sent + slack:
        raise Broken("S9", f"{node} sends {message} in {sent} bytes, and simulations count {size}")
