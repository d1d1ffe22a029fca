"""The payload of a notification, which arrives behind the bytes of a WRITE: DONE, and the writer's incarnation.

A notification may arrive when the writer's process is gone and its next one is known: it is then a message of a former
incarnation (S8), which the present one's stream does not show.
"""

from __future__ import annotations

from typing import Final

from pdflow.protocol.messages import Done
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.strict import decode_done, encode_frame

INCARNATION_BYTES: Final = 8


def notification_of(incarnation: int, done: Done) -> bytes:
    return incarnation.to_bytes(INCARNATION_BYTES, "big") + encode_frame(done)


def read_notification(notification: bytes) -> tuple[int, Done] | Malformed:
    """Return the writer's incarnation and its message."""
    done = decode_done(notification[INCARNATION_BYTES:])
    return done if isinstance(done, Malformed) else (int.from_bytes(notification[:INCARNATION_BYTES], "big"), done)
