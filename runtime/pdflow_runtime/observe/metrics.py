"""The metrics that an engine serves under /metrics: vLLM's names where vLLM has one, and our own. The router's are in
`router_metrics.py`.

The transfers' names are those of vLLM's NIXL connector, unchanged, so that its dashboards work whatever the transport;
as there, one observation is one operation of one rank. Sources: vllm/v1/metrics/loggers.py, the connector's stats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.loop import LiveEngine

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
MODEL: Final = ("model_name",)
"""The label of the metrics that vLLM has too; its own label `engine` is added where metrics of engines are merged."""
XFER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
POST_S: Final = (0.001, *XFER_S)
BYTES: Final = tuple(2**power for power in range(11, 34, 2))
DESCRIPTORS: Final = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
STAGE_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Meter:
    """The metrics of one process. `text` is the answer to /metrics. Args: `model`: its name, a label of the metrics
    that vLLM has too."""

    def __init__(self, model: str = "") -> None:
        self.registry: Final = CollectorRegistry()
        self.model: Final = model
        ProcessCollector(registry=self.registry)
        self._stages: Final = Histogram(
            "pdflow_request_stage_seconds",
            "Time that a request spent in one stage, measured by the process that runs the stage",
            ["stage"],
            buckets=STAGE_S,
            registry=self.registry,
        )

    def export_stages(self, names: Iterable[str]) -> None:
        """Export these stages as 0 until a request passes them."""
        for name in names:
            self._stages.labels(name)

    def stage(self, name: str, lasted_ns: int) -> None:
        self._stages.labels(name).observe(lasted_ns / S)

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class TransferMeter:
    """The metrics of one engine's transfer operations (`transfer_samples.MeasuresTransfers`)."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, what, MODEL, buckets=buckets, registry=registry).labels(model)

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, MODEL, registry=registry).labels(model)

        self._xfer: Final = histogram(
            "vllm:nixl_xfer_time_seconds", "Time from posting a transfer operation to its end", XFER_S
        )
        self._post: Final = histogram("vllm:nixl_post_time_seconds", "Time to post a transfer operation", POST_S)
        self._bytes: Final = histogram("vllm:nixl_bytes_transferred", "Bytes of a transfer operation", BYTES)
        self._descriptors: Final = histogram(
            "vllm:nixl_num_descriptors", "Descriptors of a transfer operation", DESCRIPTORS
        )
        self._failed: Final = counter("vllm:nixl_num_failed_transfers", "Transfer operations that failed")
        self._unread: Final = counter("vllm:nixl_num_failed_notifications", "Malformed notifications")
        self._expired: Final = counter(
            "vllm:nixl_num_kv_expired_reqs", "Prompts whose lease expired before their KV was transferred"
        )

    def moved(self, begun_ns: Instant, posted_ns: Instant, nbytes: int, descriptors: int) -> None:
        self._xfer.observe((now_ns() - begun_ns) / S)
        self._post.observe((posted_ns - begun_ns) / S)
        self._bytes.observe(nbytes)
        self._descriptors.observe(descriptors)

    def failed(self) -> None:
        self._failed.inc()

    def unread(self) -> None:
        self._unread.inc()

    def expired(self) -> None:
        self._expired.inc()


class EngineCollector(Collector):
    """A collector of an engine's gauges and counters, read at each scrape.

    Args: `streams`: to other ranks; `notes`: how often the engine's endpoints emitted each note; `cache` describes the
    KV blocks, under the names of vLLM's CacheConfig.
    """

    def __init__(
        self, engine: LiveEngine, streams: Sized, notes: Mapping[str, int], model: str, cache: Mapping[str, object]
    ) -> None:
        self.engine: Final = engine
        self.model: Final = model
        self.cache: Final = {name: str(value) for name, value in cache.items()}
        self.streams: Final = streams
        self.notes: Final = notes

    def collect(self) -> Iterator[Metric]:
        engine, pool = self.engine, self.engine.pool
        gauges = {
            "vllm:num_requests_running": ("Running sequences", engine.running),
            "vllm:num_requests_waiting": ("Queued sequences", engine.waiting),
            "pdflow_requests_loading": ("Sequences whose KV is being transferred", engine.loading),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use", 1 - pool.free / pool.num_blocks),
            "pdflow_kv_blocks_quarantined": (
                "KV blocks in quarantine: a WRITE may still land in them",
                pool.quarantined,
            ),
            "pdflow_kv_blocks": ("KV blocks", pool.num_blocks),
            "pdflow_links": ("Open connections to other ranks", len(self.streams)),
        }
        for name, (what, value) in gauges.items():
            yield self._labelled(GaugeMetricFamily, name, what, value)
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV blocks of this engine", labels=list(self.cache))
        cache.add_metric(list(self.cache.values()), 1)
        yield cache
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens received", engine.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", engine.prefix_cache_hits),
            "vllm:num_preemptions": ("Preemptions, for lack of free KV blocks", engine.preemptions),
            "pdflow_prompt_tokens_computed": ("Prompt tokens computed by this engine", engine.prompt_tokens_computed),
            "vllm:generation_tokens": ("Generated tokens", engine.generated_tokens),
            "pdflow_engine_steps": ("Engine steps", engine.steps),
        }
        for name, (what, count) in counters.items():
            yield self._labelled(CounterMetricFamily, name, what, count)
        notes = CounterMetricFamily(
            "pdflow_notes", "Protocol notes, such as stale or duplicate messages, by name", labels=["note"]
        )
        for note, times in self.notes.items():
            notes.add_metric([note], times)
        yield notes

    def _labelled(
        self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, what: str, value: float
    ) -> Metric:
        """Return the metric, with the model's name if it is one of vLLM's."""
        if not name.startswith("vllm:"):
            return family(name, what, value=value)
        labelled = family(name, what, labels=MODEL)
        labelled.add_metric([self.model], value)
        return labelled
