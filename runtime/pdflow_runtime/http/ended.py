"""A request that the server has answered or refused, as its observer gets it: for metrics and the access log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from pdflow.protocol.values import Instant

UNKNOWN: Final = "-"
"""The method and the path of a request that was refused before its head was read."""


class EndedRequest(msgspec.Struct, frozen=True):
    client: str
    """The address of the client."""
    method: str
    path: str
    status: int
    """The status that was sent; 0 if the client was gone before."""
    begun_ns: Instant
    """When the request was whole, or was refused."""
    ended_ns: Instant
    given_id: str = ""
    """The client's x-request-id."""
    details: object = None
    """What the handler has left at the responder."""
    key_name: str = ""
    """The name of the client's API key, if one was needed."""


Observer: TypeAlias = Callable[[EndedRequest], None]
"""Is called with each request that has ended. It must not wait, or raise."""


def ignore(ended: EndedRequest) -> None:
    """Observe nothing."""
