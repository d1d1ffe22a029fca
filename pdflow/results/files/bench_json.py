"""results.json: the keys of `vllm bench serve --save-result`, and everything of ours under one key, "pdflow".

Tools that read vLLM's file (`vllm bench sweep plot_pareto`, dashboards) then read ours. Source of keys, order, units
and nulls: vllm/benchmarks/serve.py as of November 2026 (`main_async`, `benchmark`), with its default
`--percentile-metrics ttft,tpot,itl --metric-percentiles 99`. What has no counterpart keeps vLLM's neutral value:
`queue_times` are zeros (a simulated client never waits for its own semaphore), `rtfx` is 0 (audio only). A live run has
what its client saw (`ClientMeasurements`), and leaves out what no client can see: links, engines, transfers. As in
vLLM, a request that did not complete has 0 in the per-request lists. `latencies` and `queue_times` are always written;
`input_lens output_lens start_times ttfts itls generated_texts errors` only if detailed.

`date`. vLLM writes the wall time of the run. A simulation is a function of (scenario, seed) and its file must be one
too, so the wall clock has no place in it: `date` is SOURCE_DATE_EPOCH in UTC where the caller passes one, and else the
epoch itself, 19700101-000000: it parses wherever vLLM's does, nobody takes it for a real date, and it is what
SOURCE_DATE_EPOCH=0 would say. A live run is of its day, and passes that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from pdflow.results.figures.aftermath import Aftermath
from pdflow.results.figures.metrics import Metrics
from pdflow.results.figures.slo import ClassMetrics, SloMetrics, SloTargets
from pdflow.results.figures.spread import Spread
from pdflow.results.records import Records
from pdflow.results.totals import NS_PER_S, Totals, share

FORMAT_VERSION = 1


@attrs.frozen(kw_only=True)
class CostStatement:
    """The source of one pool's step times and their error bar, in words for a person."""

    pool: str
    model: str
    provenance: str
    error_bar: str


def statements(costs: Iterable[CostStatement]) -> tuple[str, ...]:
    """Return a line per source of step times: the pools that use it, the source, and its error bar."""
    pools: dict[str, list[str]] = {}
    for cost in costs:
        pools.setdefault(f"{cost.provenance}; {cost.error_bar}", []).append(cost.pool)
    return tuple(f"{', '.join(names)}: {statement}" for statement, names in pools.items())


@attrs.frozen(kw_only=True)
class RunHeader:
    """The description of a run. Of a simulation nothing here may come from the wall clock or the host.

    `command_line` is what reproduces the run; leave out what only says what to write, and where (--out, --html), or two
    equal runs into two folders would differ. `request_rate_rps` None: as fast as possible, vLLM's "inf" (a trace or a
    closed loop has no rate either). `burstiness` as in vLLM, 1.0 for Poisson, None for constant gaps ("inf").
    `workload_note` says what of the requests is an estimate, or left out.
    """

    scenario_name: str
    scenario_sha256: str
    seed: int
    version: str
    command_line: str = ""
    world: str = "simulated"
    backend: str = "pdflow"
    model_id: str = ""
    request_rate_rps: float | None = None
    burstiness: float | None = 1.0
    max_concurrency: int | None = None
    source_date_epoch: int | None = None
    slo: SloTargets | None = None
    workload_note: str = ""
    warmup_ns: int = 0
    class_slos: Mapping[str, SloTargets] = attrs.field(factory=dict)
    costs: tuple[CostStatement, ...] = ()
    interrupted: bool = False
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    """vLLM's --metadata: keys of the header."""

    @property
    def kind_of_time(self) -> str:
        """The time in which the run's duration is measured, as reports name it."""
        return "simulated time" if self.world == "simulated" else "wall-clock time"


@attrs.frozen(kw_only=True)
class ClientMeasurements:
    """The measurements of a live run's client besides the records, request by request."""

    queue_times_s: Iterable[float]
    """How long each request waited because --max-concurrency others were open."""
    texts: Iterable[str]
    figures: Mapping[str, float]
    """Latencies by vLLM's keys (`quoted`)."""
    late: Spread
    """How long after its arrival a request was sent: what the client itself adds to every latency."""


def content_sha256(content: Any) -> str:
    """Return the hash of a scenario's content: of its JSON with sorted keys, so layout and comments do not count."""
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()


def bench_json(
    header: RunHeader,
    records: Records,
    metrics: Metrics,
    totals: Totals | None,
    *,
    itls_s: Iterable[list[float]] | None = None,
    seen: ClientMeasurements | None = None,
    aftermaths: Sequence[Aftermath] = (),
) -> dict[str, Any]:
    """Return the whole file as a dict, in the order in which it is written.

    Per-request lists are iterators, to be written as a stream and consumed once. `itls_s` switches --save-detailed on:
    the inter-token latencies in seconds of each request in turn, [] for those that did not complete. A live run has
    `seen`, and no `totals`.
    """
    return {
        **_header(header, records),
        **_body(records, metrics, itls_s, seen),
        "pdflow": {
            **_ours(header, metrics, seen),
            **({} if totals is None else _inside(totals, header)),
            **_after(aftermaths),
        },
    }


def _after(aftermaths: Sequence[Aftermath]) -> dict[str, Any]:
    rows = [
        {
            "name": each.fault.name,
            "engine": each.fault.engine or None,
            "at_s": each.fault.begin_ns / NS_PER_S,
            "until_s": None if each.fault.end_ns is None else each.fault.end_ns / NS_PER_S,
            "ttft_before": each.ttft_before.as_dict(),
            "ttft_after": each.ttft_after.as_dict(),
            "requests": each.affected,
            "failed": each.failed,
            "recovered_s": None if each.recovered_ns is None else each.recovered_ns / NS_PER_S,
        }
        for each in aftermaths
    ]
    return {"faults": rows} if rows else {}


def bench_date(source_date_epoch: int | None) -> str:
    """Format the date as vLLM's "%Y%m%d-%H%M%S", in UTC, by the rule of days since the epoch (civil-from-days)."""
    days, seconds = divmod(source_date_epoch or 0, 86_400)
    era, day_of_era = divmod(days + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (month <= 2)
    return f"{year:04}{month:02}{day:02}-{seconds // 3_600:02}{seconds // 60 % 60:02}{seconds % 60:02}"


def _header(header: RunHeader, records: Records) -> dict[str, Any]:
    return {
        "date": bench_date(header.source_date_epoch),
        "endpoint_type": header.backend,
        "backend": header.backend,
        "label": header.scenario_name,
        "model_id": header.model_id,
        "tokenizer_id": header.model_id,
        "num_prompts": len(records),
        **header.metadata,
        "request_rate": "inf" if header.request_rate_rps is None else header.request_rate_rps,
        "burstiness": "inf" if header.burstiness is None else header.burstiness,
        "max_concurrency": header.max_concurrency,
    }


def _body(
    records: Records, metrics: Metrics, itls_s: Iterable[list[float]] | None, seen: ClientMeasurements | None
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "duration": metrics.duration_ns / NS_PER_S,
        "completed": metrics.completed,
        "failed": metrics.outcomes["failed"] + metrics.outcomes["cancelled"],
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.per_second(metrics.completed),
        "request_goodput": None if metrics.slo is None else metrics.slo.goodput_rps,
        "output_throughput": metrics.per_second(metrics.output_tokens),
        "total_token_throughput": metrics.per_second(metrics.input_tokens + metrics.output_tokens),
    }
    detailed = itls_s is not None
    if itls_s is not None:
        body["input_lens"] = iter(records.input_tokens)
        body["output_lens"] = _of_completed(records, records.output_tokens)
        body["ttfts"] = _seconds_since_arrival(records, records.first_token_ns)
        body["itls"] = iter(itls_s)
    body["latencies"] = _seconds_since_arrival(records, records.last_token_ns)
    if detailed:
        body["start_times"] = (arrival / NS_PER_S for arrival in records.arrival_ns)
    body["queue_times"] = (0.0 for _ in records.arrival_ns) if seen is None else iter(seen.queue_times_s)
    if detailed:
        body["generated_texts"] = ("" for _ in records.arrival_ns) if seen is None else iter(seen.texts)
        body["errors"] = (reason or "" for reason in records.reason)
    body["max_output_tokens_per_s"] = float(metrics.peak_output_tokens_per_s)
    body["max_concurrent_requests"] = metrics.peak_concurrent_requests
    body["rtfx"] = 0.0
    body.update(_default_figures(metrics) if seen is None else seen.figures)
    return body


def _default_figures(metrics: Metrics) -> dict[str, float]:
    figures = {}
    for name, spread in (("ttft", metrics.ttft), ("tpot", metrics.tpot), ("itl", metrics.itl)):
        figures[f"mean_{name}_ms"] = spread.mean_ms
        figures[f"median_{name}_ms"] = spread.p50_ms
        figures[f"std_{name}_ms"] = spread.std_ms
        figures[f"p99_{name}_ms"] = spread.p99_ms
    return figures


def _seconds_since_arrival(records: Records, instants: list[int]) -> Iterator[float]:
    for outcome, arrival, instant in zip(records.outcome, records.arrival_ns, instants, strict=True):
        yield (instant - arrival) / NS_PER_S if outcome == "completed" else 0.0


def _of_completed(records: Records, counts: list[int]) -> Iterator[int]:
    for outcome, count in zip(records.outcome, counts, strict=True):
        yield count if outcome == "completed" else 0


def _ours(header: RunHeader, metrics: Metrics, seen: ClientMeasurements | None) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "version": header.version,
        "world": header.world,
        "interrupted": header.interrupted,
        "scenario": {"name": header.scenario_name, "sha256": header.scenario_sha256},
        **({"workload_note": header.workload_note} if header.workload_note else {}),
        **({"warmup": {"s": header.warmup_ns / NS_PER_S, "requests": metrics.warming}} if header.warmup_ns else {}),
        "seed": header.seed,
        "command_line": header.command_line,
        "outcomes": {**metrics.outcomes, "reasons": metrics.reasons, "attempts": metrics.attempts, **_wrong(metrics)},
        "slo": _slo(header.slo, metrics.slo),
        **({"classes": {name: _class(row) for name, row in metrics.classes.items()}} if metrics.classes else {}),
        "latency": {
            "ttft": metrics.ttft.as_dict(),
            "tpot": metrics.tpot.as_dict(),
            "itl": metrics.itl.as_dict(),
            **({} if metrics.stalled_share is None else {"request_itl": metrics.request_itl.as_dict()}),
            "e2e": metrics.e2e.as_dict(),
        },
        **({} if metrics.stalled_share is None else {"stalled_share": metrics.stalled_share}),
        **({} if seen is None else {"sent_late": seen.late.as_dict()}),
        "stages": {stage: _stage(spread, metrics.ttft) for stage, spread in metrics.stages.items()},
    }


def _inside(totals: Totals, header: RunHeader) -> dict[str, Any]:
    return {
        "transfers": {
            "count": totals.transfers,
            "bytes": totals.bytes_moved,
            "messages": totals.messages,
            "stranded_kv_byte_s": totals.stranded_byte_ns / NS_PER_S,
        },
        "links": [
            {
                "name": link.name,
                "bytes": link.bytes,
                "capacity_bytes_per_s": link.capacity_bytes_per_s,
                "busy_share": link.busy_share(totals.duration_ns),
                "utilisation": link.utilisation(totals.duration_ns),
            }
            for link in totals.links
        ],
        "posting_busy_share": {rank: share(ns, totals.duration_ns) for rank, ns in totals.posting_ns.items()},
        **_prefix_cache(totals),
        "engines": [
            {
                "name": engine.name,
                "role": engine.role,
                "gpus": engine.gpus,
                "busy_share": engine.busy_share(totals.duration_ns),
                "kv_blocks": engine.kv_blocks,
                "peak_kv_blocks": engine.peak_kv_blocks,
                **_counts(engine.prefix_cache_queries, engine.prefix_cache_hits),
                **({} if engine.up_ns is None else {"up_s": engine.up_ns / NS_PER_S}),
            }
            for engine in totals.engines
        ],
        "gpu_busy_share": {role: totals.gpu_busy_share(role) for role in totals.roles()},
        "cost": [attrs.asdict(cost) for cost in header.costs],
        "notes": dict(sorted(totals.notes.items())),
        "world_events": totals.world_events,
    }


def _wrong(metrics: Metrics) -> dict[str, int]:
    return {} if metrics.wrong_kv is None else {"wrong_kv": metrics.wrong_kv}


def _prefix_cache(totals: Totals) -> dict[str, Any]:
    queries, hits = totals.prefix_cache()
    return {"prefix_cache": {"queries": queries, "hits": hits, "hit_share": share(hits, queries)}} if hits else {}


def _counts(queries: int, hits: int) -> dict[str, int]:
    return {"prefix_cache_queries": queries, "prefix_cache_hits": hits} if hits else {}


def _stage(spread: Spread, ttft: Spread) -> dict[str, Any]:
    return {
        "mean_ms": spread.mean_ms,
        "p50_ms": spread.p50_ms,
        "p90_ms": spread.p90_ms,
        "p99_ms": spread.p99_ms,
        "share_of_ttft": spread.mean_ms / ttft.mean_ms if ttft.mean_ms > 0 else 0.0,
    }


def _class(row: ClassMetrics) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "completed": row.completed,
        "slo": _slo(row.bounds, row.slo),
        "latency": {"ttft": row.ttft.as_dict(), "tpot": row.tpot.as_dict(), "e2e": row.e2e.as_dict()},
    }


def _slo(slo: SloTargets | None, attained: SloMetrics | None) -> dict[str, Any] | None:
    if slo is None or attained is None:
        return None
    return {
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        **({} if slo.itl_ms is None else {"itl_ms": slo.itl_ms, "itl_percentile": slo.itl_percentile}),
        "e2e_ms": slo.e2e_ms,
        "good": attained.good,
        "goodput_rps": attained.goodput_rps,
        "attainment": attained.attainment,
        "attainment_by_metric": attained.by_metric,
    }
