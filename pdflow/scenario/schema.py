"""What a scenario file can say, as attrs classes: one class per table, one field per key.

It decides names, types, bounds and defaults. What the parts mean together (does the model fit, do the TP sizes divide)
is `validate.py`; reading files is `load.py`. Units stand at the end of names: `_s`, `_ms`, `_bytes`, `_bytes_per_s`.
Engine keys have vLLM's names; the transfer's timers have the defaults of the protocol's own text.

A table that names a `preset` (model, gpu, network) starts from its values and overrides some; what is here is the
result, so that a reader of a Scenario never looks anything up.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs
from attrs import field

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.protocol.timers import Timers
from pdflow.scenario.faults import Fault, Faults
from pdflow.scenario.fields import (
    AT_LEAST_ONE,
    DELAY,
    ENGINES,
    FRACTION,
    KV_TOKENS,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SCALE,
    SHAPE,
    SPAN,
    TIMER,
    about,
)


@attrs.frozen(kw_only=True)
class Header:
    """[scenario]: what the run is called, and where its randomness starts."""

    name: str = field(default="", metadata=about("name of the run; the file's name without .toml if absent"))
    seed: int = field(default=0, metadata=about("seed of every random stream of the run", NOT_NEGATIVE))


@attrs.frozen(kw_only=True)
class PoissonArrival:
    """Independent arrivals: exponential gaps."""

    rate_rps: float = field(metadata=about("mean requests per second", POSITIVE))


@attrs.frozen(kw_only=True)
class GammaArrival:
    """Gaps of a gamma distribution, as `vllm bench serve --burstiness` draws them."""

    rate_rps: float = field(metadata=about("mean requests per second", POSITIVE))
    burstiness: float = field(
        metadata=about("the shape of the gaps: 1 is Poisson, less comes in bursts, more is more even", SHAPE)
    )


@attrs.frozen(kw_only=True)
class ConstantArrival:
    """One arrival every 1/rate_rps seconds."""

    rate_rps: float = field(metadata=about("requests per second", POSITIVE))


@attrs.frozen(kw_only=True)
class RampArrival:
    """Independent arrivals at a rate that goes from one value to another in a straight line, and stays there."""

    from_rps: float = field(metadata=about("requests per second at the start", NOT_NEGATIVE))
    to_rps: float = field(metadata=about("requests per second from over_s on", POSITIVE))
    over_s: float = field(metadata=about("how long the way takes", DELAY))

    @property
    def rate_rps(self) -> float:
        """What it comes to in the long run."""
        return self.to_rps


@attrs.frozen(kw_only=True)
class DiurnalArrival:
    """Independent arrivals at a rate that swings about its mean: mean * (1 + swing * sin(2 pi t / period_s))."""

    rate_rps: float = field(metadata=about("mean requests per second", POSITIVE))
    swing: float = field(default=0.5, metadata=about("how far the rate leaves its mean, as a share of it", FRACTION))
    period_s: float = field(default=86400.0, metadata=about("from one peak to the next", SPAN))


@attrs.frozen(kw_only=True)
class ClosedArrival:
    """A fixed number of clients, each of which sends its next request when its last one has ended."""

    concurrency: int = field(metadata=about("requests in the system at any time", AT_LEAST_ONE))

    @property
    def rate_rps(self) -> None:
        """It has none of its own."""
        return


Arrival: TypeAlias = PoissonArrival | GammaArrival | ConstantArrival | RampArrival | DiurnalArrival | ClosedArrival


@attrs.frozen(kw_only=True)
class FixedLength:
    """Every request has the same length. A bare integer in the file means this."""

    tokens: int = field(metadata=about("tokens", AT_LEAST_ONE))

    @property
    def low(self) -> int:
        """The least length that can be drawn."""
        return self.tokens

    @property
    def high(self) -> int:
        """The greatest length that can be drawn."""
        return self.tokens


@attrs.frozen(kw_only=True)
class UniformLength:
    """Whole numbers from low to high, both included, equally likely."""

    low: int = field(metadata=about("least tokens", AT_LEAST_ONE))
    high: int = field(metadata=about("most tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class LognormalLength:
    """Lengths whose logarithm is normal, many short and a few very long ones, cut off at low and high."""

    median: float = field(metadata=about("half of all lengths are below it", POSITIVE))
    sigma: float = field(metadata=about("standard deviation of the logarithm: 1 has a p95 of 5.2 medians", SHAPE))
    low: int = field(default=1, metadata=about("least tokens", AT_LEAST_ONE))
    high: int = field(metadata=about("most tokens, included", AT_LEAST_ONE))

    def __attrs_post_init__(self) -> None:
        _in_order(self.low, self.high)


@attrs.frozen(kw_only=True)
class EmpiricalLength:
    """Lengths that have been seen, drawn again."""

    tokens: tuple[int, ...] = field(metadata=about("the lengths, such as a histogram's", NOT_EMPTY))
    weights: tuple[float, ...] = field(default=(), metadata=about("how often each comes; equally often if absent"))

    def __attrs_post_init__(self) -> None:
        if any(length < 1 for length in self.tokens):
            raise ValueError(f"tokens holds {min(self.tokens)}, expected numbers of at least 1")
        if self.weights and len(self.weights) != len(self.tokens):
            raise ValueError(
                f"weights has {len(self.weights)} numbers, expected one for each of {len(self.tokens)} tokens"
            )
        if self.weights and (min(self.weights) < 0 or not 0 < sum(self.weights) < inf):
            raise ValueError("weights are expected to be at least 0, and not all 0")

    @property
    def low(self) -> int:
        """The least length that can be drawn."""
        return min(self.tokens)

    @property
    def high(self) -> int:
        """The greatest length that can be drawn."""
        return max(self.tokens)


def _in_order(low: int, high: int) -> None:
    if low > high:
        raise ValueError(f"high is {high}, expected at least low, which is {low}")


Length: TypeAlias = FixedLength | UniformLength | LognormalLength | EmpiricalLength


@attrs.frozen(kw_only=True)
class Columns:
    """Which columns of a CSV trace say what; at most one of the four that say when."""

    arrival_s: str | None = field(default=None, metadata=about("arrival in seconds", NOT_EMPTY))
    arrival_ms: str | None = field(default=None, metadata=about("arrival in milliseconds", NOT_EMPTY))
    arrival_ns: str | None = field(default=None, metadata=about("arrival in nanoseconds", NOT_EMPTY))
    arrival_stamp: str | None = field(
        default=None, metadata=about("arrival as a date and time, such as 2023-11-16 18:17:03.9799600", NOT_EMPTY)
    )
    input_tokens: str | None = field(default=None, metadata=about("prompt length", NOT_EMPTY))
    output_tokens: str | None = field(default=None, metadata=about("output length", NOT_EMPTY))
    class_: str | None = field(
        default=None,
        metadata=about("name of the request's class, which [slo.class] may speak of", NOT_EMPTY, key="class"),
    )

    def __attrs_post_init__(self) -> None:
        if len(self.arrival) > 1:
            raise ValueError(f"{' and '.join(self.arrival)} both say when; give one of them")

    @property
    def arrival(self) -> dict[str, str]:
        """The column that says when, under the key that says its unit; empty if there is none."""
        keys = ("arrival_s", "arrival_ms", "arrival_ns", "arrival_stamp")
        return {key: name for key in keys if (name := getattr(self, key)) is not None}


TraceFormat: TypeAlias = Literal[
    "mooncake",
    "azure",
    "burstgpt",
    "vidur",
    "llmservingsim",
    "splitwise",
    "csv",
    "sharegpt",
    "vllm-custom",
    "servegen",
]


@attrs.frozen(kw_only=True)
class Trace:
    """A recorded workload: arrival times, lengths and, where it has them, prefix hashes and classes."""

    path: str = field(metadata=about("the trace file, relative to the scenario file", NOT_EMPTY))
    format: TraceFormat = field(metadata=about("whose format it is in: docs/traces.md describes each"))
    columns: Columns = field(factory=Columns, metadata=about("of a CSV trace: which columns say what"))
    dataset: str | None = field(
        default=None,
        metadata=about("of a servegen client: the file of its lengths; beside the trace and named like it if absent"),
    )
    characters_per_token: float = field(
        default=4.0, metadata=about("of texts without token counts: how many characters make a token", POSITIVE)
    )
    start_s: float | None = field(
        default=None, metadata=about("leave out what arrives before, and let time begin there", NOT_NEGATIVE)
    )
    end_s: float | None = field(default=None, metadata=about("leave out what arrives then or later", NOT_NEGATIVE))
    skip: int = field(default=0, metadata=about("leave out so many of the first requests", NOT_NEGATIVE))
    time_scale: float = field(
        default=1.0, metadata=about("arrival times are multiplied by it: 0.5 doubles the rate", SCALE)
    )

    def __attrs_post_init__(self) -> None:
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise ValueError(f"end_s is {self.end_s:g}, expected more than start_s, which is {self.start_s or 0:g}")


MODELS = ("mooncake-conversation", "azure-code", "azure-conv")
"""Bundled models of published traces."""


@attrs.frozen(kw_only=True)
class Workload:
    """[workload]: who asks for what, and when: an `arrival` process, a `trace`, both, or `like` a model."""

    requests: int | None = field(
        default=None,
        metadata=about("how many requests; of a trace the first ones (all if absent)", AT_LEAST_ONE),
    )
    arrival: Arrival | None = field(
        default=None,
        metadata=about("a synthetic arrival process; lengths are then needed, or a trace, which lends its own"),
    )
    input_tokens: Length | None = field(default=None, metadata=about("prompt length: a number or a distribution"))
    output_tokens: Length | None = field(default=None, metadata=about("output length: a number or a distribution"))
    trace: Trace | None = field(default=None, metadata=about("replay a recorded trace"))
    like: str | None = field(
        default=None,
        metadata=about(
            f"draw from a model of a trace: {', '.join(MODELS)}, or a file that `pdflow trace model` wrote", NOT_EMPTY
        ),
    )
    rate_rps: float | None = field(default=None, metadata=about("with `like`: requests per second, absolute", POSITIVE))
    rate_scale: float | None = field(
        default=None, metadata=about("with `like`: requests per second, as a multiple of the trace's", SCALE)
    )
    warmup_s: float = field(
        default=0.0, metadata=about("requests that arrive before then are served, and counted in no figure", DELAY)
    )


@attrs.frozen(kw_only=True)
class ConstantCost:
    """Times that depend on nothing, for tests against queueing theory."""

    prefill_s: float = field(default=0.0, metadata=about("one prefill, whatever its length", DELAY))
    decode_step_s: float = field(default=0.0, metadata=about("one decode step, whatever its batch", DELAY))


@attrs.frozen(kw_only=True)
class RooflineCost:
    """Times from data sheets: what arithmetic and memory traffic take, plus host time. Its factors are the GPU's."""


@attrs.frozen(kw_only=True)
class FittedCost:
    """Times fitted to published measurements of one model on one GPU."""

    table: str = field(metadata=about("the table's name: `pdflow presets` lists them", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class AiconfiguratorCost:
    """Times of NVIDIA's measured kernels, tabulated by aiconfigurator-core, plus host time."""

    host_step_s: float | None = field(default=None, metadata=about("host time of a step; the GPU's if absent", DELAY))
    host_seq_s: float | None = field(
        default=None, metadata=about("host time of each decoding sequence of a step; the GPU's if absent", DELAY)
    )


@attrs.frozen(kw_only=True)
class MeasuredCost:
    """Times from a file, such as one that was calibrated on one's own engines."""

    path: str = field(metadata=about("the cost file, relative to the scenario file", NOT_EMPTY))


Cost: TypeAlias = ConstantCost | RooflineCost | FittedCost | AiconfiguratorCost | MeasuredCost
COST_KINDS: Final[Mapping[str, type[Cost]]] = {
    "constant": ConstantCost,
    "roofline": RooflineCost,
    "fitted": FittedCost,
    "aiconfigurator": AiconfiguratorCost,
    "measured": MeasuredCost,
}

Role: TypeAlias = Literal["prefill", "decode", "aggregated"]


@attrs.frozen(kw_only=True)
class Pool:
    """[[pool]]: engines that are alike."""

    name: str = field(metadata=about("name of the pool; its engines are NAME-0, NAME-1, ...", NOT_EMPTY))
    role: Role = field(metadata=about("what its engines do: compute prompts, decode from them, or both by themselves"))
    replicas: int = field(default=1, metadata=about("how many engines", ENGINES))
    gpu: GpuSpec = field(metadata=about("a GPU preset's name, or a table { preset, ... } that overrides some of it"))
    tp: int = field(default=1, metadata=about("tensor-parallel size of each engine", AT_LEAST_ONE))
    pp: int = field(default=1, metadata=about("pipeline-parallel size of each engine; prefill only", AT_LEAST_ONE))
    cost: Cost = field(factory=RooflineCost, metadata=about("what a step takes"))
    max_num_seqs: int = field(default=256, metadata=about("most sequences in one step", AT_LEAST_ONE))
    max_num_batched_tokens: int = field(default=8192, metadata=about("most tokens in one step", AT_LEAST_ONE))
    block_size: int = field(default=16, metadata=about("tokens in one KV block", AT_LEAST_ONE))
    gpu_memory_utilization: float = field(
        default=0.9, metadata=about("share of the GPU's memory that the engine may use", FRACTION)
    )
    kv_tokens: int | None = field(
        default=None,
        metadata=about("KV capacity of one engine in tokens; computed from the GPU's memory if absent", KV_TOKENS),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=about("prompts are computed from where they differ from those before, if the workload names prefixes"),
    )

    @property
    def leg(self) -> Literal["prefill", "decode"]:
        """Which of a request's two legs the router sends to its engines. To an aggregated one no other follows."""
        return "decode" if self.role == "decode" else "prefill"


@attrs.frozen(kw_only=True)
class Transfer:
    """[transfer]: how KV moves, and the protocol's timers."""

    method: Literal["nixl-push", "nixl-pull"] = field(
        default="nixl-push", metadata=about("who moves the bytes: P writes (push) or D reads (pull)")
    )
    dialect: Literal["strict", "vllm-compat", "vllm-stock"] = field(
        default="strict",
        metadata=about(
            "whose frames and rules: ours, vLLM 0.32's with the fixes C1 to C13, or as it is (simulate only)"
        ),
    )
    kv_lease_duration_s: float = field(
        default=30.0, metadata=about("P holds finished blocks this long unless renewed", TIMER)
    )
    deadline_s: float = field(default=600.0, metadata=about("a request's total deadline", TIMER))
    sync_s: float = field(default=1.0, metadata=about("between SYNCs of a pair with something open", TIMER))
    stall_s: float = field(default=30.0, metadata=about("no progress of a ready or running transfer", TIMER))
    suspect_s: float = field(default=5.0, metadata=about("silence after which a peer is suspect", TIMER))
    dead_s: float = field(default=15.0, metadata=about("silence after which a peer's requests are given up", TIMER))
    registration_ttl_s: float = field(default=60.0, metadata=about("P keeps an unrenewed registration", TIMER))
    no_request_s: float = field(
        default=10.0,
        metadata=about("P answers NO_REQUEST when a registration finds no prefill for this long", TIMER),
    )
    release_lease_s: float = field(default=2.0, metadata=about("the lease that RELEASE shortens to", TIMER))
    cancel_first_s: float = field(default=0.2, metadata=about("first retransmission of CANCEL", TIMER))
    cancel_last_s: float = field(default=2.0, metadata=about("longest gap between CANCELs", TIMER))
    handshake_timeout_s: float = field(default=5.0, metadata=about("a handshake's reply, per rank", TIMER))
    backoff_first_s: float = field(default=1.0, metadata=about("pause after a failed handshake", TIMER))
    backoff_last_s: float = field(default=60.0, metadata=about("longest pause after failed handshakes", TIMER))
    push_registration_timeout_s: float = field(
        default=480.0, metadata=about("vllm-compat: D's watchdog over a registration", TIMER)
    )
    join_s: float = field(
        default=2.0, metadata=about("vllm-compat: P waits this long for the other ranks' registrations", TIMER)
    )
    writer_poll_s: float = field(default=0.001, metadata=about("vllm-compat push: the writer thread's poll", DELAY))
    quarantine_fraction: float = field(
        default=0.25, metadata=about("share of D's pool that one peer may hold registered or quarantined", FRACTION)
    )
    quarantine_suspect_fraction: float = field(
        default=0.10, metadata=about("share of D's pool in quarantine above which suspect peers get nothing", FRACTION)
    )

    def timers(self) -> Timers:
        """The protocol's durations; what vLLM derives from the lease is derived as there."""
        lease_ns = seconds_to_ns(self.kv_lease_duration_s)
        return Timers(
            lease_ns=lease_ns,
            lease_extension_ns=lease_ns * 2 // 3,
            heartbeat_ns=lease_ns // 6,
            release_lease_ns=seconds_to_ns(self.release_lease_s),
            registration_ttl_ns=seconds_to_ns(self.registration_ttl_s),
            no_request_ns=seconds_to_ns(self.no_request_s),
            join_ns=seconds_to_ns(self.join_s),
            sync_ns=seconds_to_ns(self.sync_s),
            suspect_ns=seconds_to_ns(self.suspect_s),
            dead_ns=seconds_to_ns(self.dead_s),
            stall_ns=seconds_to_ns(self.stall_s),
            deadline_ns=seconds_to_ns(self.deadline_s),
            watchdog_ns=seconds_to_ns(self.push_registration_timeout_s),
            cancel_first_ns=seconds_to_ns(self.cancel_first_s),
            cancel_last_ns=seconds_to_ns(self.cancel_last_s),
            backoff_first_ns=seconds_to_ns(self.backoff_first_s),
            backoff_last_ns=seconds_to_ns(self.backoff_last_s),
            handshake_queue_ns=seconds_to_ns(self.handshake_timeout_s),
        )


@attrs.frozen(kw_only=True)
class Link:
    """One shared resource on a path: a switch port, an uplink."""

    name: str = field(metadata=about("name that paths refer to", NOT_EMPTY))
    bandwidth_bytes_per_s: int | None = field(
        metadata=about("capacity, shared max-min fairly; inf is unlimited (None)", AT_LEAST_ONE, rate=True)
    )
    latency_s: float = field(default=0.0, metadata=about("delay that it adds", DELAY))


@attrs.frozen(kw_only=True)
class LinkPath:
    """What bytes between two pools pass, besides the two NICs."""

    from_pool: str = field(metadata=about("pool that sends", NOT_EMPTY, key="from"))
    to_pool: str = field(metadata=about("pool that receives", NOT_EMPTY, key="to"))
    via: tuple[str, ...] = field(metadata=about("names of links, in order", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class Network:
    """[network]: one NIC per GPU, the control channel, and explicit links. A preset supplies what is not said."""

    preset: str = field(default="rdma-400g", metadata=about("a link preset's name"))
    bandwidth_bytes_per_s: int | None = field(
        metadata=about("each NIC, each direction; inf is unlimited (None)", AT_LEAST_ONE, preset=True, rate=True)
    )
    latency_s: float = field(metadata=about("one way, between two NICs", DELAY, preset=True))
    per_message_s: float = field(metadata=about("posting one transfer", DELAY, preset=True))
    per_descriptor_s: float = field(metadata=about("each descriptor of a transfer", DELAY, preset=True))
    control_latency_s: float = field(metadata=about("one control message, one way", DELAY, preset=True))
    handshake_s: float = field(metadata=about("first contact of two engines", DELAY, preset=True))
    http_latency_s: float = field(metadata=about("one hop of HTTP, one way", DELAY, preset=True))
    poll: bool = field(metadata=about("whether what a protocol polls waits for the poll", preset=True))
    links: tuple[Link, ...] = field(default=(), metadata=about("shared resources"))
    paths: tuple[LinkPath, ...] = field(default=(), metadata=about("which pools' bytes pass which links"))


@attrs.frozen(kw_only=True)
class Router:
    """[router]: which engines serve a request, and in which order its two legs start."""

    policy: Literal["round-robin", "least-loaded"] = field(
        default="round-robin", metadata=about("how a request's engines are chosen")
    )
    dispatch: Literal["sequential", "concurrent"] = field(
        default="sequential",
        metadata=about(
            "the decode leg starts after the prefill leg's reply, or with it (a pull always waits for the reply)"
        ),
    )
    first_token: Literal["decode", "prefill"] = field(
        default="decode", metadata=about("whose first token the client gets: TTFT ends with it")
    )
    max_attempts: int = field(default=1, metadata=about("attempts of a request, the first included", AT_LEAST_ONE))


@attrs.frozen(kw_only=True)
class ClassSlo:
    """What requests of one class must meet; [slo] does not hold for them."""

    ttft_ms: float | None = field(default=None, metadata=about("time to first token", POSITIVE))
    tpot_ms: float | None = field(default=None, metadata=about("time per output token after the first", POSITIVE))
    e2e_ms: float | None = field(default=None, metadata=about("whole request", POSITIVE))


@attrs.frozen(kw_only=True)
class Slo:
    """[slo]: what each request must meet to count as good."""

    ttft_ms: float | None = field(default=None, metadata=about("time to first token", POSITIVE))
    tpot_ms: float | None = field(default=None, metadata=about("time per output token after the first", POSITIVE))
    e2e_ms: float | None = field(default=None, metadata=about("whole request", POSITIVE))
    classes: dict[str, ClassSlo] = field(
        factory=dict, metadata=about("bounds of a class of the trace's requests, instead of these", key="class")
    )


@attrs.frozen(kw_only=True)
class Scenario:
    """A whole scenario, presets resolved and checked."""

    name: str
    seed: int
    workload: Workload
    model: ModelSpec
    pools: tuple[Pool, ...]
    transfer: Transfer
    network: Network
    router: Router
    slo: Slo
    path: str
    """The scenario file. A trace's path is relative to its folder."""
    faults: tuple[Fault, ...] = ()
    fault_table: Faults = field(factory=Faults)

    @property
    def base_dir(self) -> Path:
        """The folder that paths in the scenario start from."""
        return Path(self.path).parent

    def pool(self, name: str) -> Pool:
        """The pool of that name."""
        return next(pool for pool in self.pools if pool.name == name)


def seconds_to_ns(seconds: float) -> int:
    """A duration of the edge as the inside counts it, rounded to the nearest nanosecond."""
    return round(seconds * 1_000_000_000)
