"""What the connector measures becomes vLLM's own metrics, by vLLM's own way from a worker to the API server.

Run with `pytest -m vllm tests/vllm` where vLLM is installed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdflow.protocol.values import MS, Allocation
from pdflow_runtime.observe.transfer_samples import Samples, Transferred, TransferSamples
from pdflow_runtime.vllm import health
from pdflow_runtime.vllm.scheduler.block_references import BlockReferences

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    from pdflow_runtime.vllm import stats
    from pdflow_runtime.vllm.connector import PdflowConnector

ROOT = Path(__file__).resolve().parents[2]
LABELS = ("tiny", "1")


class Pool:
    """vLLM's BlockPool, as far as references go."""

    def __init__(self) -> None:
        self.blocks = range(100)

    def touch(self, blocks: Any) -> None: ...
    def free_blocks(self, blocks: Any) -> None: ...


class Guarded:
    """The half in EngineCore, as far as its stats go."""

    def __init__(self) -> None:
        self.broken = ""
        self.side = SimpleNamespace(samples=TransferSamples(), references=BlockReferences())


class ApiServer:
    """What the API server has of an instance with one engine, numbered 1."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {kind: partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        metrics = PdflowConnector.build_prom_metrics(config, types, ["model_name", "engine"], {1: list(LABELS)})
        assert metrics is not None
        self.metrics = metrics

    def observe(self, data: dict[str, Any]) -> None:
        self.metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(data)), 1)

    def __getitem__(self, name: str) -> float:
        value = self.registry.get_sample_value(name, dict(zip(("model_name", "engine"), LABELS, strict=True)))
        assert value is not None, name
        return value


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    yield
    health.BROKEN.clear()


def of_rank(*transferred: Transferred, **counts: int) -> KVConnectorStats:
    """As EngineCore gets it from a worker's process."""
    found = stats.stats_of(Samples(transferred, **counts))
    assert found is not None
    copied: KVConnectorStats = pickle.loads(pickle.dumps(found))
    return copied


def test_two_ranks_and_the_scheduler_are_one_observation_each() -> None:
    guarded = Guarded()
    guarded.side.samples.expired()
    of_scheduler = stats.GuardedStats(guarded).take()
    step = of_rank(Transferred(20 * MS, 2 * MS, 4096, 8), failed=2)
    step = step.aggregate(of_rank(Transferred(30 * MS, 2 * MS, 2048, 4), unread=1, unreached=1)).aggregate(of_scheduler)
    server = ApiServer()
    server.observe(step.to_dict())
    assert server["vllm:nixl_xfer_time_seconds_count"] == 2
    assert server["vllm:nixl_xfer_time_seconds_sum"] == pytest.approx(0.05)
    assert server["vllm:nixl_post_time_seconds_sum"] == pytest.approx(0.004)
    assert server["vllm:nixl_bytes_transferred_sum"] == 6144
    assert server["vllm:nixl_num_descriptors_sum"] == 12
    assert server["vllm:nixl_num_failed_notifications_total"] == 1
    assert server["vllm:nixl_num_failed_transfers_total"] == 4, "vLLM counts handshakes and notifications among them"
    assert server["vllm:nixl_num_kv_expired_reqs_total"] == 1


def test_a_step_without_anything_reports_nothing() -> None:
    samples, guarded = TransferSamples(), Guarded()
    of_worker, of_scheduler = stats.WorkerStats(samples), stats.GuardedStats(guarded)
    assert of_worker.take() is None
    assert of_scheduler.take() is None
    samples.failed()
    reported = of_worker.take()
    assert reported is not None
    assert not reported.is_empty()
    assert of_worker.take() is None


def test_quarantine_is_reported_as_it_changes() -> None:
    guarded, pool, server = Guarded(), Pool(), ApiServer()
    references, source = guarded.side.references, stats.GuardedStats(guarded)
    first, second = Allocation(1, (3, 4, 5)), Allocation(2, (6,))
    references.hold(pool, first)
    references.hold(pool, second)
    assert source.take() is None, "held by requests that go on"
    seen = []
    for change in (
        lambda: references.quarantine(first),
        lambda: references.quarantine(second),
        lambda: references.release(pool, first),
        lambda: references.release(pool, second),
    ):
        change()
        reported = source.take()
        assert reported is not None
        assert not reported.is_empty()
        server.observe(reported.to_dict())
        seen.append(server["pdflow:kv_blocks_quarantined"])
        assert source.take() is None
    assert seen == [3, 4, 1, 0]
    assert server["pdflow:connector_broken"] == 0


def test_a_broken_connector_shows_in_metrics_and_in_health() -> None:
    guarded, server = Guarded(), ApiServer()
    guarded.side.references.hold(Pool(), Allocation(1, (3, 4)))
    source = stats.GuardedStats(guarded)
    guarded.broken = "KeyError: 'x'"
    reported = source.take()
    assert reported is not None
    server.observe(reported.to_dict())
    assert server["pdflow:connector_broken"] == 1
    assert server["pdflow:kv_blocks_quarantined"] == 2, "all that the protocol had stays out of use"
    assert health.BROKEN == {1: "KeyError: 'x'"}


def test_the_log_line_is_vllms_with_quarantine() -> None:
    """`KVConnectorLogging` adds up what came in 10 s, each decoded from what the API server got."""
    quiet = PdflowConnector.build_kv_connector_stats()
    assert quiet is not None
    assert quiet.is_empty()
    guarded = Guarded()
    guarded.side.references.hold(Pool(), Allocation(1, (3, 4)))
    guarded.side.references.quarantine(Allocation(1, (3, 4)))
    step = of_rank(Transferred(20 * MS, 2 * MS, 2**20, 8)).aggregate(stats.GuardedStats(guarded).take())
    decoded = PdflowConnector.build_kv_connector_stats(msgspec.msgpack.decode(msgspec.msgpack.encode(step.to_dict())))
    reduced = quiet.aggregate(decoded).reduce()
    assert reduced["Num successful transfers"] == 1
    assert reduced["Avg xfer time (ms)"] == 20
    assert reduced["Avg MB per transfer"] == 1
    assert reduced["KV blocks in quarantine"] == 2


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r} or name in {modules!r}:
            raise {error}(name)
sys.meta_path.insert(0, Missing())
from pdflow_runtime.vllm import connector
found = connector.PdflowConnector.build_kv_connector_stats()
assert (found is not None) == {measured}, found
assert "nixl" not in sys.modules
"""


@pytest.mark.parametrize(
    ("packages", "modules", "error", "measured"),
    [
        (("nixl", "nixl_cu12", "nixl_cu13"), (), "ImportError", True),
        (("nixl",), ("vllm.distributed.kv_transfer.kv_connector.v1.nixl",), "ImportError", False),
        (("nixl",), ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats",), "OSError", False),
    ],
    ids=["no NIXL", "no connector of vLLM's for it", "a NIXL that cannot be loaded"],
)
def test_nothing_fails_without_nixl(
    packages: tuple[str, ...], modules: tuple[str, ...], error: str, measured: bool
) -> None:
    """vllm#58038, nixl#2266: telemetry that is optional must not end an engine."""
    script = MISSING.format(packages=packages, modules=modules, error=error, measured=measured)
    roots = [str(ROOT), str(ROOT / "sim"), str(ROOT / "runtime")]
    paths = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": paths})
