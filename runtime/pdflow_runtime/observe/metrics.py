"""The metrics that a component of a live cluster serves under /metrics: vLLM's names where vLLM has one, and our own.

The transfers' names are those of vLLM's NIXL connector, unchanged, so that its dashboards work whatever the transport;
as there, one observation is one operation of one rank. Sources: vllm/v1/metrics/loggers.py, the connector's stats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.loop import LiveEngine

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
XFER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
POST_S: Final = (0.001, *XFER_S)
BYTES: Final = tuple(2**power for power in range(11, 34, 2))
DESCRIPTORS: Final = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
STAGE_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Meter:
    """The metrics of one process. `text` is the answer to /metrics."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self._stages: Final = Histogram(
            "pdflow_request_stage_seconds",
            "Time that a request spent in one stage, measured by the component that runs the stage",
            ["stage"],
            buckets=STAGE_S,
            registry=self.registry,
        )

    def stage(self, name: str, lasted_ns: int) -> None:
        self._stages.labels(name).observe(lasted_ns / S)

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class TransferMeter:
    """The metrics of one engine's transfer operations (`transfer_samples.MeasuresTransfers`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._xfer: Final = Histogram(
            "vllm:nixl_xfer_time_seconds",
            "Time from posting a transfer operation to its end",
            buckets=XFER_S,
            registry=registry,
        )
        self._post: Final = Histogram(
            "vllm:nixl_post_time_seconds", "Time to post a transfer operation", buckets=POST_S, registry=registry
        )
        self._bytes: Final = Histogram(
            "vllm:nixl_bytes_transferred", "Bytes of a transfer operation", buckets=BYTES, registry=registry
        )
        self._descriptors: Final = Histogram(
            "vllm:nixl_num_descriptors", "Descriptors of a transfer operation", buckets=DESCRIPTORS, registry=registry
        )
        self._failed: Final = Counter(
            "vllm:nixl_num_failed_transfers", "Transfer operations that failed", registry=registry
        )
        self._unread: Final = Counter(
            "vllm:nixl_num_failed_notifications", "Malformed notifications", registry=registry
        )
        self._expired: Final = Counter(
            "vllm:nixl_num_kv_expired_reqs",
            "Prompts whose lease expired before their KV was transferred",
            registry=registry,
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


class RouterMeter(Meter):
    """The metrics of the router: the outcomes and latencies that clients got."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self._requests: Final = Counter(
            "pdflow_router_requests", "Requests that ended, by outcome and code", ["outcome", "code"], registry=registry
        )
        self._attempts: Final = Counter("pdflow_router_attempts", "Attempts of these requests", registry=registry)
        self._first: Final = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            buckets=STAGE_S,
            registry=registry,
        )
        self._whole: Final = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to its last token",
            buckets=STAGE_S,
            registry=registry,
        )
        self.resumed: Final = Counter(
            "pdflow_router_answers_resumed", "Answers that another attempt has continued", registry=registry
        )
        self.stalled: Final = Counter(
            "pdflow_router_engines_stalled",
            "Times that an engine owed answers and sent nothing for too long",
            registry=registry,
        )
        self.open: Final = Gauge("pdflow_router_requests_open", "Open requests", registry=registry)

    def first_token(self, begun_ns: int) -> None:
        self._first.observe((now_ns() - begun_ns) / S)

    def over(self, begun_ns: int, outcome: str, code: str, attempts: int) -> None:
        self._requests.labels(outcome, code).inc()
        self._attempts.inc(attempts)
        if outcome == "completed":
            self._whole.observe((now_ns() - begun_ns) / S)


class EngineCollector(Collector):
    """A collector of an engine's gauges and counters, read at each scrape.

    Args: `streams`: to other ranks; `notes`: how often the engine's endpoints emitted each note.
    """

    def __init__(self, engine: LiveEngine, streams: Sized, notes: Mapping[str, int]) -> None:
        self.engine: Final = engine
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
            yield GaugeMetricFamily(name, what, value=value)
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens received", engine.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", engine.prefix_cache_hits),
            "vllm:num_preemptions": ("Preemptions, for lack of free KV blocks", engine.preemptions),
            "pdflow_prompt_tokens_computed": ("Prompt tokens computed by this engine", engine.prompt_tokens_computed),
            "vllm:generation_tokens": ("Generated tokens", engine.generated_tokens),
            "pdflow_engine_steps": ("Engine steps", engine.steps),
        }
        for name, (what, count) in counters.items():
            yield CounterMetricFamily(name, what, value=count)
        notes = CounterMetricFamily(
            "pdflow_notes", "Protocol notes, such as stale or duplicate messages, by name", labels=["note"]
        )
        for note, times in self.notes.items():
            notes.add_metric([note], times)
        yield notes
