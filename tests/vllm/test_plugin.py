"""vLLM finds the connector by its name alone. Run with `pytest -m vllm tests/vllm` where vLLM is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("vllm", reason="vLLM is not installed")

ROOT = Path(__file__).resolve().parents[2]


def entry_point() -> EntryPoint:
    """The one that an installation of this repository has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    return EntryPoint(name, value, "vllm.general_plugins")


def test_the_connector_is_found_by_its_name() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register = entry_point().load()
    for _ in range(3):  # vLLM may load plugins several times in a process
        register()
    config = KVTransferConfig(kv_connector="PdflowConnector", kv_role="kv_producer")
    from pdflow_runtime.vllm.connector import PdflowConnector

    assert KVConnectorFactory.get_connector_class(config) is PdflowConnector
    assert KVConnectorFactory.get_connector_class_by_name("PdflowConnector") is PdflowConnector
    assert KVConnectorFactory.supports_hma_config(config)


def test_a_connector_by_its_module_is_known_by_name_too() -> None:
    """MultiConnector asks the factory for the class of each child's metrics by name, in the API server, and a name that
    is not registered ends it."""
    script = (
        "from vllm.config import KVTransferConfig\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F\n"
        "config = KVTransferConfig(kv_connector='PdflowConnector', kv_role='kv_producer',"
        " kv_connector_module_path='pdflow_runtime.vllm.connector')\n"
        "assert F.get_connector_class(config) is F.get_connector_class_by_name('PdflowConnector')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment())


def test_the_plugin_imports_nothing_of_pdflow() -> None:
    """It runs in every process of every vLLM in whose environment pdflow is installed."""
    script = (
        "import sys\n"
        "from vllm.distributed.kv_transfer.kv_connector import factory\n"
        "before = set(sys.modules)\n"
        "from pdflow_runtime.vllm.plugin import register\n"
        "register()\n"
        "found = sorted(set(sys.modules) - before)\n"
        "assert found == ['pdflow_runtime', 'pdflow_runtime.vllm', 'pdflow_runtime.vllm.plugin'], found\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment())


def _environment() -> dict[str, str]:
    import os

    roots = [str(ROOT), str(ROOT / "sim"), str(ROOT / "runtime")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])}
