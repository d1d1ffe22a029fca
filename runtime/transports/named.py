"""Transports by the names that a scenario may give; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from pdflow.protocol.values import Address
from runtime.transports.base import Tell, Transport

NAMED: Final = {
    "shm": ("runtime.transports.shm", "ShmTransport"),
    "tcp": ("runtime.transports.tcp", "TcpTransport"),
    "nixl": ("runtime.transports.nixl", "NixlTransport"),
}


def transport_named(name: str) -> Callable[[Address, Tell], Transport]:
    """Makes one rank's. MissingBackend if its library is not installed."""
    module, kind = NAMED[name]
    made: Callable[[Address, Tell], Transport] = getattr(import_module(module), kind)
    return made
