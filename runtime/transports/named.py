"""Transports by the names that a scenario may give; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from pdflow.protocol.values import Address
from runtime.transports.base import MissingBackend, Tell, Transport

INSTALL_NIXL: Final = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
NAMED: Final = {
    "shm": ("runtime.transports.shm", "ShmTransport"),
    "tcp": ("runtime.transports.tcp", "TcpTransport"),
    "nixl": ("runtime.transports.nixl", "NixlTransport"),
}


def transport_named(name: str) -> Callable[[Address, Tell], Transport]:
    """Makes one rank's. MissingBackend if its library is not installed."""
    if name == "nixl" and find_spec("nixl") is None:
        raise MissingBackend(f"the transport 'nixl' needs NIXL: {INSTALL_NIXL}")
    module, kind = NAMED[name]
    made: Callable[[Address, Tell], Transport] = getattr(import_module(module), kind)
    return made
