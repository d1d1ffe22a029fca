"""The messages of the original systems, where they are not ours: names, senders, how often, and what waits for each.

One protocol carries every method, by frames of its own. A wire profile puts the original's messages beside them: which
of our frames has another name there, which has no counterpart (it is silent: it takes no time and is no message), and
what is sent besides, which is time and a number of messages. It decides nothing. A frame that has neither a name nor a
silence is our own, and is shown as that. Names and sizes are from the PRs' code, as SEED_SYSTEMS has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

import attrs

LEASE_WORD: Final = "lease word"
"""Silent as if it were a frame: the small READ behind the data by which a D knows that P kept what it has read."""
UNASKED: Final = frozenset({"SYNC", "SYNC_REPLY"})
"""Frames by which a peer is asked for its state once a second, as no original does."""


class Side(Enum):
    """The sender of a message. A store is D towards P, and P towards D."""

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
    """The frame of ours that it is; empty if it is sent besides."""
    waits: bool = attrs.field(default=True, kw_only=True)
    """What comes next waits until it has arrived. A frame's time is its own."""
    num_bytes: int = attrs.field(default=0, kw_only=True)
    """The size of the message, where its format tells it."""


@attrs.frozen(kw_only=True)
class WireProfile:
    """The messages of a method as published; empty where our frames are used."""

    messages: tuple[ProfileMessage, ...] = ()
    silent: frozenset[str] = frozenset()
    """Tags of our frames."""
    prefill_leg: str = ""
    """The fields that the router puts into P's leg."""
    decode_leg: str = ""

    def besides(self, when: Occasion) -> tuple[ProfileMessage, ...]:
        """Return the messages of that occasion which are no frame of ours; at the close, all that is sent behind the
        data for itself."""
        return tuple(
            message
            for message in self.messages
            if message.when is when and (not message.frame or when is Occasion.CLOSING)
        )

    def name_of(self, frame: str) -> str:
        """Return the original's name of a frame; "" if it has none like it."""
        if frame in self.silent:
            return ""
        return next((message.name for message in self.messages if message.frame == frame), frame)

    def contact(self, by: Side) -> str:
        """Return by what a rank of this side makes itself known to a peer; "" if the other one does that."""
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
        """Yield the messages in words, by how often they are sent."""
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
