"""What an engine has wanted, as a tuple that is the same whichever world it was said in."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pdflow.protocol.effects import PostRead, PostWrite, Send
from pdflow.protocol.messages import Completion, Heartbeat, Register
from pdflow.protocol.values import Address
from tests.vllm.support.nixl_stub import NixlNotification, Transfer

Observed: TypeAlias = tuple[Any, ...]
REGISTERS = b"PUSH_REG:"
HEARTBEATS = b"HB:"


def of_notification(notification: NixlNotification) -> Observed:
    if notification.body.startswith(REGISTERS):
        fields = msgspec.msgpack.decode(notification.body[len(REGISTERS) :])
        blocks = tuple(fields["local_block_ids"][0])
        return ("REG", notification.sender, notification.target, fields["request_id"], blocks)
    text = notification.body.decode()
    if notification.body.startswith(HEARTBEATS):
        return ("HB", notification.sender, notification.target, tuple(sorted(text[3:].split(","))))
    return ("completion", notification.sender, notification.target, text)


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
    target = posted.registration.target.blocks
    assert isinstance(posted.notification, Completion)
    body = f"{posted.notification.request_id}:{posted.notification.count}".encode()
    if isinstance(posted, PostWrite):
        return ("transfer", address, posted.to, posted.source.blocks[-len(target) :], target, body)
    return ("transfer", address, posted.source, target, posted.blocks[-len(target) :], body)
