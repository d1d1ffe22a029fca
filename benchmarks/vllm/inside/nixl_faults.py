"""Faults of NIXL inside an instance, ordered by files in a folder. The connectors, stock and pdflow, do not know it.

- fail-transfer: the next transfer is not posted, and its state is ERR; the file goes, so that it is one.
- hold-transfer: while the file is there, transfers are not posted, and their state is PROC.
- no-telemetry: while the file is there, a transfer has no telemetry (nixlNoTelemetryError, as from a NIXL that was
  built without it).
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

API = ("nixl_cu12._api", "nixl_cu13._api")


def install(folder: str) -> None:
    """Have NIXL's Python API changed as soon as it is imported."""
    sys.meta_path.insert(0, _Finder(folder))


class _Finder(MetaPathFinder):
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._inside = False

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname not in API or self._inside:
            return None
        self._inside = True
        try:
            spec = find_spec(fullname)
        finally:
            self._inside = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._folder)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, folder: str) -> None:
        self._loader = loader
        self._folder = folder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _change(module, self._folder)


def _change(module: Any, folder: str) -> None:
    agent = module.nixl_agent
    transfer, check, telemetry = agent.transfer, agent.check_xfer_state, agent.get_xfer_telemetry
    failed: set[int] = set()
    held: dict[int, tuple[Any, ...]] = {}

    def ordered(fault: str) -> bool:
        return os.path.exists(os.path.join(folder, fault))

    def transfer_or_fail(self: Any, handle: Any, *rest: Any) -> str:
        failed.discard(id(handle))  # an id is used again after its handle has gone
        held.pop(id(handle), None)
        if ordered("hold-transfer"):
            held[id(handle)] = rest
            return "PROC"
        try:
            os.unlink(os.path.join(folder, "fail-transfer"))
        except FileNotFoundError:
            return str(transfer(self, handle, *rest))
        failed.add(id(handle))
        return "ERR"

    def check_or_fail(self: Any, handle: Any) -> str:
        if id(handle) in failed:
            return "ERR"
        if id(handle) in held:
            if ordered("hold-transfer"):
                return "PROC"
            return str(transfer(self, handle, *held.pop(id(handle))))
        return str(check(self, handle))

    def telemetry_or_none(self: Any, handle: Any) -> Any:
        if ordered("no-telemetry"):
            raise module.nixlBind.nixlNoTelemetryError("NIXL_ERR_NO_TELEMETRY")
        return telemetry(self, handle)

    agent.transfer, agent.check_xfer_state, agent.get_xfer_telemetry = (
        transfer_or_fail,
        check_or_fail,
        telemetry_or_none,
    )
