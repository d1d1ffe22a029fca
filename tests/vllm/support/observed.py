"""What an engine has wanted, as a tuple that is the same whichever world it was said in."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pdflow.protocol.effects import PostRead, PostWrite, Send
from pdflow.protocol.messages import Completion, Heartbeat, Register
from pdflow.protocol.values import Address
from tests.vllm.support.nixl_stub import Notice, Transfer

Observed: TypeAlias = tuple[Any, ...]
REGISTERS = b"PUSH_REG:"
HEARTBEATS = b"HB:"


def of_notice(notice: Notice) -> Observed:
    if notice.body.startswith(REGISTERS):
        told = msgspec.msgpack.decode(notice.body[len(REGISTERS) :])
        blocks = tuple(told["local_block_ids"][0])
        return ("REG", notice.sender, notice.target, told["request_id"], blocks)
    text = notice.body.decode()
    if notice.body.startswith(HEARTBEATS):
        return ("HB", notice.sender, notice.target, tuple(sorted(text[3:].split(","))))
    return ("completion", notice.sender, notice.target, text)


def of_message(sender: Address, send: Send) -> Observed:
    message = send.message
    if isinstance(message, Register):
        return ("REG", sender, send.to, message.reg.request_id, message.target.blocks)
    if isinstance(message, Heartbeat):
        return ("HB", sender, send.to, tuple(sorted(message.request_ids)))
    assert isinstance(message, Completion)
    return ("completion", sender, send.to, f"{message.request_id}:{message.count}")


def of_transfer(transfer: Transfer) -> Observed:
    return ("transfer", transfer.initiator, transfer.other, transfer.ours, transfer.theirs, transfer.body)


def of_posted(address: Address, posted: PostWrite | PostRead) -> Observed:
    """A range of tokens stands for the last blocks of the prompt."""
    target = posted.grant.target.blocks
    assert isinstance(posted.notice, Completion)
    body = f"{posted.notice.request_id}:{posted.notice.count}".encode()
    if isinstance(posted, PostWrite):
        return ("transfer", address, posted.to, posted.source.blocks[-len(target) :], target, body)
    return ("transfer", address, posted.source, target, posted.blocks[-len(target) :], body)
