"""Transports by the names that a scenario may give; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Final

from pdflow_runtime.transports.base import MakeTransport

NAMED: Final = {
    "shm": "shm:ShmTransport",
    "tcp": "tcp:TcpTransport",
    "cuda-ipc": "cuda_ipc:CudaIpcTransport",
    "nixl": "nixl:NixlTransport",
    "mooncake": "mooncake:MooncakeTransport",
    "nccl": "nccl.transport:NcclTransport",
}

WITHIN_ONE_HOST: Final = ("shm", "cuda-ipc")
"""Those whose peers must be processes of the same user, and meet at a file."""


def transport_named(name: str) -> MakeTransport:
    """Return the factory of the transport of this name. MissingBackend if its library is not installed."""
    module = _module(name)
    if hasattr(module, "require"):
        module.require()
    made: MakeTransport = getattr(module, NAMED[name].partition(":")[2])
    return made


def caution_of(name: str) -> str | None:
    """Return what a user of this transport must know first, in one line; None if there is nothing."""
    caution: Callable[[], str] | None = getattr(_module(name), "caution", None)
    return None if caution is None else caution()


def _module(name: str) -> ModuleType:
    return import_module(f"pdflow_runtime.transports.{NAMED[name].partition(':')[0]}")
