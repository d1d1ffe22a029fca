"""The summary that `pdflow validate` prints of a sound scenario: sizes and rates that follow from it without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.posting import ReadThread
from pdflow.scenario.plan import plan_of
from pdflow.scenario.schema.scenario import ConstantCost, Pool, ResolvedScenario
from pdflow.scenario.schema.workload import (
    Arrival,
    ClosedArrival,
    ConstantArrival,
    DiurnalArrival,
    GammaArrival,
    PoissonArrival,
    RampArrival,
    Trace,
)
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow.scenario.validation.ignored import has_latency, takes_api_server_time


@attrs.frozen
class PoolSummary:
    """The sizes of one pool's engines: their GPUs, KV capacity and weights."""

    name: str
    role: str
    engines: int
    gpus_per_engine: int
    gpu: str
    kv_tokens: int
    kv_bytes: int
    weight_bytes_per_gpu: int


def pool_summary(scenario: ResolvedScenario, pool: Pool) -> PoolSummary:
    """Return the sizes of one pool's engines; `kv_bytes` is that of a whole engine, replicated heads included."""
    ranks = pool.tp * pool.pp
    replicas = pool.attention_replicas
    per_rank = scenario.model.kv_bytes_per_token_per_rank(pool.tp, pool.pp)
    tokens = kv_tokens_of(scenario.model, pool)
    return PoolSummary(
        name=pool.name,
        role=pool.role,
        engines=pool.replicas,
        gpus_per_engine=pool.gpus_per_engine,
        gpu=pool.gpu.name,
        kv_tokens=tokens,
        kv_bytes=tokens * per_rank * ranks,
        weight_bytes_per_gpu=scenario.model.weight_bytes_per_gpu(pool.tp, pool.pp, replicas, pool.ep),
    )


_READ_THREADS: Final[Mapping[ReadThread, str]] = {
    "engine": "D's engine thread, before each step",
    "overlapped": "D's engine thread, during steps",
    "background": "another thread of D",
}


def posting_summary(scenario: ResolvedScenario) -> str:
    """Return a line with the connector whose posting is simulated, and the thread that posts READs."""
    transfer = scenario.transfer
    method, connector = METHODS[transfer.method], transfer.posting()
    contiguous = method.staged_at_p and method.staged_at_d
    posted = "whole ranges of staging memory" if contiguous else f"connector {connector.name}"
    if not method.pulls:
        return posted
    thread = transfer.read_thread()
    by = "D's engine, which waits for them" if thread is None else _READ_THREADS[thread]
    return f"{posted}; READs by {by}"


def noise_summary(scenario: ResolvedScenario) -> str:
    """Return a line with the standard deviations of durations that vary, or "off" if none does."""
    noise, pools = scenario.noise, scenario.pools
    shares = {
        "steps": max(noise.of_steps(isinstance(pool.cost, ConstantCost)) for pool in pools),
        "API servers": noise.api_server if any(map(takes_api_server_time, pools)) else 0.0,
        "latencies": noise.links if has_latency(scenario.network) else 0.0,
    }
    varying = [f"{what} {100 * share:.3g} %" for what, share in shares.items() if share]
    return f"standard deviations: {', '.join(varying)}" if varying else "off"


def faults_summary(scenario: ResolvedScenario) -> str:
    """Return a line with the number of faults of each kind."""
    counts: dict[str, int] = {}
    for fault in plan_of(scenario).faults:
        kind = fault.name.partition("/")[0]
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in counts.items())


def workload_summary(scenario: ResolvedScenario) -> str:
    """Return a line with the source of the requests and their number."""
    workload = scenario.workload
    count = "all" if workload.requests is None else f"{workload.requests:,}"
    if workload.trace is not None:
        return f"{count} requests of {workload.trace.path} ({_trace_summary(workload.trace)})" + (
            "" if workload.arrival is None else f", {_arrival_summary(workload.arrival)}"
        )
    if workload.like is not None:
        return f"{count} requests like {workload.like}"
    if workload.arrival is None:
        return count
    if workload.sessions is not None:
        return f"{count} requests in sessions, {_arrival_summary(workload.arrival)}"
    return f"{count} requests, {_arrival_summary(workload.arrival)}"


def _trace_summary(trace: Trace) -> str:
    """Return a trace's format, and the slicing and scaling applied to it."""
    done: list[str] = [trace.format]
    if trace.skip:
        done.append(f"without the first {trace.skip:,}")
    if trace.start_s is not None:
        done.append(f"from {trace.start_s:g} s")
    if trace.end_s is not None:
        done.append(f"until {trace.end_s:g} s")
    if trace.time_scale != 1.0:
        done.append(f"times x {trace.time_scale:g}")
    return ", ".join(done)


def trace_note(trace: Trace) -> str:
    """Return a note on requests or lengths that are drawn, estimated or left out of the trace; "" where none are."""
    match trace.format:
        case "servegen":
            return "drawn from ServeGen's rates and lengths, no record of requests"
        case "burstgpt":
            return "failed requests, which have no response tokens, are left out"
        case "sharegpt" | "vllm-custom":
            rate = f"{trace.characters_per_token:g}"
            return f"lengths are estimates of {rate} characters per token where the file has no counts"
    return ""


def _arrival_summary(arrival: Arrival) -> str:
    match arrival:
        case PoissonArrival(rate_rps=rate):
            return f"Poisson at {rate:g}/s"
        case GammaArrival(rate_rps=rate, burstiness=burstiness):
            return f"gamma at {rate:g}/s with burstiness {burstiness:g}"
        case ConstantArrival(rate_rps=rate):
            return f"one every {1 / rate:g} s"
        case RampArrival(from_rps=low, to_rps=high, over_s=span):
            return f"from {low:g}/s to {high:g}/s over {span:g} s"
        case DiurnalArrival(rate_rps=rate, swing=swing, period_s=period):
            return f"{rate:g}/s and {swing:.0%} up and down every {period:g} s"
        case ClosedArrival(concurrency=concurrency):
            return f"{concurrency} at a time"
