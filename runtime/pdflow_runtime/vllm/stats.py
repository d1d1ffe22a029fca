"""What the connector measures, as the metrics of vLLM's NIXL connector, so that its dashboards show pdflow's transfers.

`vllm:nixl_*` are observed by the side that moves the bytes: P for a push, D for a pull. `pdflow:connector_broken` and
`pdflow:kv_blocks_quarantined` are the connector's own. A worker's half reports what its rank has measured, with each
step's output; the half in EngineCore adds its own, and vLLM takes both to the API server.

The module of vLLM's that these come from imports its NIXL connector, and that whatever NIXL is there. Where this fails,
the connector works without metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from pdflow.protocol.values import S
from pdflow_runtime.observe.transfer_samples import NOTHING, Samples, TransferSamples
from pdflow_runtime.vllm.health import report
from pdflow_runtime.vllm.scheduler.guard import GuardedSide

BROKEN: Final = "connector_broken"
"""Texts: why the connector is broken, or nothing. The last one counts."""
QUARANTINED: Final = "blocks_quarantined"
"""Numbers of blocks. The last one counts."""
US_PER_S: Final = 1_000_000


class NixlTelemetry(NamedTuple):
    """The fields of NIXL's own record of a transfer that vLLM reads. Times are in microseconds."""

    xferDuration: float  # noqa: N815 (NIXL's names)
    postDuration: float  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


@dataclass
class PdflowStats(NixlKVConnectorStats):
    """What was measured in some steps. `data` goes to the API server as JSON would."""

    def reset(self) -> None:
        super().reset()
        self.data[BROKEN], self.data[QUARANTINED] = [], []

    def is_empty(self) -> bool:
        return bool(super().is_empty()) and not (self.data[BROKEN] or self.data[QUARANTINED])

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM writes to its log every 10 s."""
        reduced: dict[str, int | float] = super().reduce()
        if self.data[QUARANTINED]:
            reduced["KV blocks in quarantine"] = self.data[QUARANTINED][-1]
        return reduced


def stats_of(samples: Samples) -> PdflowStats | None:
    """Return what a rank has measured; None if that is nothing."""
    if samples == NOTHING:
        return None
    stats = PdflowStats()
    for each in samples.transferred:
        took_us, post_us = (nanoseconds * US_PER_S / S for nanoseconds in (each.took_ns, each.post_ns))
        stats.record_transfer(NixlTelemetry(took_us, post_us, each.nbytes, each.descriptors))
    for count, record in (
        (samples.failed, stats.record_failed_transfer),
        (samples.unread, stats.record_failed_notification),
        (samples.unreached, stats.record_failed_handshake),
        (samples.expired, stats.record_kv_expired_req),
    ):
        for _ in range(count):
            record()
    return stats


class WorkerStats:
    """The stats of one worker's half, which vLLM takes with each step."""

    def __init__(self, samples: TransferSamples) -> None:
        self._samples: Final = samples

    def take(self) -> PdflowStats | None:
        return stats_of(self._samples.take())


class GuardedStats:
    """The stats of the half in EngineCore: what its side has measured, and its state when that has changed."""

    def __init__(self, guarded: GuardedSide) -> None:
        self._guarded: Final = guarded
        self._reported = ("", 0)

    def take(self) -> PdflowStats | None:
        guarded = self._guarded
        references = guarded.side.references
        state = guarded.broken, references.blocks if guarded.broken else references.quarantined
        stats = stats_of(guarded.side.samples.take())
        if state != self._reported:
            stats = stats or PdflowStats()
            stats.data[BROKEN], stats.data[QUARANTINED] = [state[0]], [state[1]]
            self._reported = state
        return stats


class PdflowPromMetrics(NixlPromMetrics):
    """The Prometheus metrics of the connectors of one API server's engines."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauges = {
            "pdflow:connector_broken": "1 if the connector has failed and moves no KV until the instance restarts.",
            "pdflow:kv_blocks_quarantined": "KV blocks in quarantine: a peer may still write into them.",
        }
        self.broken, self.quarantined = (
            create_metric_per_engine(
                metric_types[Gauge](
                    name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
                ),
                per_engine_labelvalues,
            )
            for name, text in gauges.items()
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for why in transfer_stats_data[BROKEN][-1:]:
            self.broken[engine_idx].set(bool(why))
            report(engine_idx, why)
        for blocks in transfer_stats_data[QUARANTINED][-1:]:
            self.quarantined[engine_idx].set(blocks)
