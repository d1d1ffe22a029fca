"""Transports by the names that a scenario may give; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Final

from pdflow.protocol.values import Address
from runtime.transports.base import Tell, Transport

NAMED: Final = {
    "shm": "ShmTransport",
    "tcp": "TcpTransport",
    "nixl": "NixlTransport",
    "mooncake": "MooncakeTransport",
    "nccl": "NcclTransport",
}


def transport_named(name: str) -> Callable[[Address, Tell], Transport]:
    """Makes one rank's. MissingBackend if its library is not installed."""
    module = _module(name)
    if hasattr(module, "require"):
        module.require()
    made: Callable[[Address, Tell], Transport] = getattr(module, NAMED[name])
    return made


def caution_of(name: str) -> str | None:
    """What whoever serves with it must know first, in one line."""
    caution: Callable[[], str] | None = getattr(_module(name), "caution", None)
    return None if caution is None else caution()


def _module(name: str) -> ModuleType:
    return import_module(f"runtime.transports.{name}")
