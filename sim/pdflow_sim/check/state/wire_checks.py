"""A check of S9: what an endpoint sends reaches its peer as the same message, through the real codec.

Scopes deliver frames as values. Each different frame of the strict dialect is encoded and decoded once, when it is
first sent; so is the notification of each WRITE.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.messages import Done
from pdflow.protocol.values import Address
from pdflow.protocol.wire.strict import decode_done, decode_frame, encode_frame
from pdflow_sim.check.state.shadow_state import Broken


def passes_the_codec(node: Address, message: Any) -> None:
    """Check that a peer reads this frame as it was meant. Raises Broken."""
    try:
        data = encode_frame(message)
    except LocalProtocolError as error:
        raise Broken("S9", f"{node} sends what no peer would accept: {error}") from error
    read = decode_done(data) if isinstance(message, Done) else decode_frame(data)
    if read != message:
        raise Broken("S9", f"{node} sends {message}, and its peer reads {read}")
