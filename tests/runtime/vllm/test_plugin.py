"""The plugin never raises, whatever vLLM is there: vLLM has no handler around it."""

from __future__ import annotations

import builtins
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pdflow_runtime.vllm.plugin import MODULE, NAME, register

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def with_vllm(monkeypatch: pytest.MonkeyPatch, factory: object) -> None:
    """As if vLLM had this module of its factory; None if it has none."""
    original = builtins.__import__

    def imported(name: str, *args: Any, **kwargs: Any) -> Any:
        if name != FACTORY:
            return original(name, *args, **kwargs)
        if factory is None:
            raise ImportError("no KVConnectorFactory")
        module = ModuleType(FACTORY)
        module.KVConnectorFactory = factory  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(builtins, "__import__", imported)


def test_it_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, tuple[str, str]] = {}

    def register_connector(name: str, module: str, kind: str) -> None:
        if name in registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        registered[name] = (module, kind)

    with_vllm(monkeypatch, SimpleNamespace(register_connector=register_connector))
    register()
    register()
    assert registered == {NAME: (MODULE, NAME)}


def test_a_vllm_without_a_factory_starts_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_vllm(monkeypatch, None)
    register()
    assert "no KVConnectorFactory" in caplog.text
