"""Which transports an engine may have where other hosts reach it."""

from __future__ import annotations

import pytest

from pdflow.errors import ScenarioError
from pdflow_runtime.process.worker import transport_at
from pdflow_runtime.transports import cuda_ipc
from pdflow_runtime.transports.cuda_ipc import CudaIpcTransport
from tests.runtime.support.live_pair import cluster


@pytest.mark.parametrize("name", ["shm", "cuda-ipc"])
def test_a_transport_within_one_host_is_refused_beyond_loopback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "gpus", lambda: 1)
    with pytest.raises(ScenarioError, match=rf"serve\.transport: .*{name} works within one host only, .*192\.0\.2\.1"):
        transport_at(cluster(f"serve.transport={name}", "serve.engine_host=192.0.2.1"))


def test_cuda_ipc_serves_engines_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "gpus", lambda: 1)
    assert transport_at(cluster("serve.transport=cuda-ipc")) is CudaIpcTransport
