"""The messages of the original systems, where they differ from pdflow's: names, senders, how often, what waits.

One protocol with its own frames carries every method. A wire profile adds the original's messages to them. It names
the frames that have another name in the original. It names the silent frames, which the original does not have: they
take no time and are not counted. It adds the original's other messages, which are counted and take time. It decides
nothing. A frame that it does not name is pdflow's own, and is shown under its own name. Names and sizes are from the
code of the PRs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

import attrs

LEASE_WORD: Final = "lease word"
"""Silent like a frame: the small READ after the data that proves to D that P still held the prompt."""
UNASKED: Final = frozenset({"SYNC", "SYNC_REPLY"})
"""Frames that ask a peer for its state once a second. No original has them."""


class Side(Enum):
    """The sender of a message. A store is a D for P, and a P for D."""

    P = "P"
    D = "D"


class Occasion(Enum):
    """The occasion of a message: how often it is sent, and where."""

    CONTACT = "once for each pair of ranks"
    REQUEST = "once a request, before its KV"
    PIECE = "before each piece"
    BEHIND = "after each piece"
    CLOSING = "once a request, after its KV"


@attrs.frozen
class ProfileMessage:
    """One kind of message of an original."""

    name: str
    by: Side
    when: Occasion
    frame: str = attrs.field(default="", kw_only=True)
    """The tag of pdflow's frame that it stands for; empty if there is none."""
    waits: bool = attrs.field(default=True, kw_only=True)
    """The next step waits until it has arrived. A message that stands for a frame takes the frame's time."""
    num_bytes: int = attrs.field(default=0, kw_only=True)
    """The size of the message, if its format defines one."""


@attrs.frozen(kw_only=True)
class WireProfile:
    """The messages of a method as published; empty if they are pdflow's frames."""

    messages: tuple[ProfileMessage, ...] = ()
    silent: frozenset[str] = frozenset()
    """Tags of pdflow's frames that the original does not have."""
    prefill_leg: str = ""
    """The fields that the router puts into P's leg."""
    decode_leg: str = ""

    def besides(self, when: Occasion) -> tuple[ProfileMessage, ...]:
        """Return the messages of that occasion that stand for no frame; at CLOSING, all messages after the data."""
        return tuple(
            message
            for message in self.messages
            if message.when is when and (not message.frame or when is Occasion.CLOSING)
        )

    def name_of(self, frame: str) -> str:
        """Return the original's name of a frame; "" if it has no such frame."""
        if frame in self.silent:
            return ""
        return next((message.name for message in self.messages if message.frame == frame), frame)

    def contact(self, by: Side) -> str:
        """Describe how a rank of this side contacts a peer; "" if the peer does that."""
        if not self.messages:
            return "starts a handshake"
        return next(
            (
                f"sends {message.name}"
                for message in self.messages
                if message.when is Occasion.CONTACT and message.by is by
            ),
            "",
        )

    def summary_lines(self) -> Iterator[str]:
        """Yield a description of the messages, by how often they are sent."""
        for when in Occasion:
            names = [_summary(message) for message in self.messages if message.when is when]
            if names:
                yield f"{when.value}: {', '.join(names)}"
        for leg, what in (("prefill", self.prefill_leg), ("decode", self.decode_leg)):
            if what:
                yield f"in the {leg} leg: {what}"
        if self.silent:
            yield f"no {', '.join(sorted(self.silent))}"


def _summary(message: ProfileMessage) -> str:
    size = f", {message.num_bytes} byte{'s' if message.num_bytes > 1 else ''}" if message.num_bytes else ""
    return f"{message.name} ({message.by.value}{size})"
