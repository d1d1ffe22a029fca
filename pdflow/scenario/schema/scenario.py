"""The schema of scenario files: one attrs class per table, one field per key.

It decides names, types, bounds and defaults. What the parts mean together (does the model fit, do the TP sizes divide)
is `validate.py`; reading files is `load.py`. [workload], [transfer], [network], [router], [serve] and the faults have
files of their own. Units stand at the end of names: `_s`, `_ms`, `_bytes`, `_bytes_per_s`. Engine keys have vLLM's
names.

A table that names a `preset` (model, gpu, network) starts from its values and overrides some; what is here is the
result, so that a reader of a Scenario never looks anything up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs
from attrs import field

from pdflow.cost.expert_parallel import BALANCEDNESS
from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.methods.method import PipelinePolicy
from pdflow.scenario.schema.faults import Fault, Faults
from pdflow.scenario.schema.fields import (
    AT_LEAST_ONE,
    DELAY,
    ENGINES,
    FRACTION,
    KV_TOKENS,
    NOT_EMPTY,
    NOT_NEGATIVE,
    PERCENTAGE,
    POSITIVE,
    SCALE,
    field_doc,
)
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.noise import Noise
from pdflow.scenario.schema.router import RouterConfig
from pdflow.scenario.schema.scale import Scale
from pdflow.scenario.schema.serve import Serve
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.schema.workload import Workload


@attrs.frozen(kw_only=True)
class Header:
    """[scenario]: the name of the run, and the seed of its random numbers."""

    name: str = field(default="", metadata=field_doc("name of the run; default: the file's name without .toml"))
    seed: int = field(default=0, metadata=field_doc("seed of all random streams of the run", NOT_NEGATIVE))


@attrs.frozen(kw_only=True)
class ConstantCost:
    """Fixed step times, for tests against queueing theory."""

    prefill_s: float = field(default=0.0, metadata=field_doc("time of one prefill step, for any prompt length", DELAY))
    decode_step_s: float = field(default=0.0, metadata=field_doc("time of one decode step, for any batch", DELAY))


@attrs.frozen(kw_only=True)
class RooflineCost:
    """Step times from data sheets: arithmetic, memory traffic and host time. The factors are keys of the pool's gpu."""


@attrs.frozen(kw_only=True)
class FittedCost:
    """Step times fitted to published measurements of one model on one GPU."""

    table: str = field(metadata=field_doc("name of the cost table; `pdflow presets` lists them", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class AiconfiguratorCost:
    """Times of kernels that NVIDIA measured, from aiconfigurator-core, plus host time."""

    host_step_s: float | None = field(
        default=None, metadata=field_doc("host time of each step; default: the gpu's host_step_s", DELAY)
    )
    host_seq_s: float | None = field(
        default=None,
        metadata=field_doc("host time of each decoding sequence in a step; default: the gpu's host_seq_s", DELAY),
    )


@attrs.frozen(kw_only=True)
class MeasuredCost:
    """Step times from a cost file, such as one that `pdflow calibrate` wrote."""

    path: str = field(metadata=field_doc("the cost file, relative to the scenario file", NOT_EMPTY))


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
    """[[pool]]: a group of identical engines."""

    name: str = field(metadata=field_doc("name of the pool; its engines are NAME-0, NAME-1, ...", NOT_EMPTY))
    role: Role = field(
        metadata=field_doc(
            "what its engines do: compute prompts, generate tokens from transferred KV, or both without a transfer"
        )
    )
    replicas: int = field(default=1, metadata=field_doc("number of engines", ENGINES))
    gpu: GpuSpec = field(
        metadata=field_doc("name of a GPU preset, or a table { preset, ... } that overrides some of its values")
    )
    tp: int = field(default=1, metadata=field_doc("tensor-parallel size of each engine", AT_LEAST_ONE))
    pp: int = field(
        default=1,
        metadata=field_doc("pipeline-parallel size of each engine; above 1 in prefill pools only", AT_LEAST_ONE),
    )
    dp_attention: int | None = field(
        default=None,
        metadata=field_doc(
            "models with experts: number of attention replicas of each engine, which work in lockstep on tp GPUs each; "
            "the engine has max_num_seqs, max_num_batched_tokens and kv_tokens for each; default: ep / tp, or 1",
            AT_LEAST_ONE,
        ),
    )
    ep: int = field(
        default=1,
        metadata=field_doc(
            "number of GPUs that whole experts are spread over: all of an engine, tp x dp_attention, or 1: every GPU "
            "has a slice of each expert",
            AT_LEAST_ONE,
        ),
    )
    expert_balancedness: float = field(
        default=BALANCEDNESS,
        metadata=field_doc(
            "with ep: mean by maximum of the tokens that the GPUs of an engine get, as vLLM logs it with "
            "eplb_config.log_balancedness; 1: experts are chosen evenly",
            FRACTION,
        ),
    )
    cost: Cost = field(
        factory=RooflineCost, metadata=field_doc("how long a step takes: the cost model; default: roofline")
    )
    step_time_factor: float = field(
        default=1.0,
        metadata=field_doc("factor on the time of every step, for what-if questions: 1.25 is 25 % slower", SCALE),
    )
    max_num_seqs: int = field(default=256, metadata=field_doc("maximum number of sequences in one step", AT_LEAST_ONE))
    max_num_batched_tokens: int = field(
        default=8192, metadata=field_doc("maximum number of tokens in one step", AT_LEAST_ONE)
    )
    async_scheduling: bool = field(
        default=True,
        metadata=field_doc(
            "the engine schedules a step while the previous one runs; a request that arrives during a step "
            "waits one step longer"
        ),
    )
    scheduling: Literal["v0", "v1"] | None = field(
        default=None,
        metadata=field_doc(
            "v1: each step decodes and computes prompts, in chunks. v0: as in vLLM V0, a step computes prompts as a "
            "whole, or decodes if none can be admitted, and async_scheduling is off; simulated only. Default: v0 with "
            "mooncake-v0 and kv-store as-published, otherwise v1"
        ),
    )
    api_server_s: float | None = field(
        default=None,
        metadata=field_doc(
            "time in the API server (HTTP, tokeniser) before the engine queues a request; simulated only; default: "
            "0.03, or 0 with cost model constant",
            DELAY,
        ),
    )
    api_server_s_per_token: float = field(
        default=0.0,
        metadata=field_doc(
            "additional time in the API server for each token of the prompt (tokeniser); simulated only", DELAY
        ),
    )
    block_size: int = field(
        default=16, metadata=field_doc("tokens in one KV block, as vLLM's --block-size", AT_LEAST_ONE)
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata=field_doc("share of the GPU memory that the engine may use", FRACTION)
    )
    kv_tokens: int | None = field(
        default=None,
        metadata=field_doc(
            "KV capacity of one engine in tokens (vLLM logs it as GPU KV cache size); default: computed from "
            "the GPU memory",
            KV_TOKENS,
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=field_doc(
            "reuse the KV of a prefix that the engine already has; has an effect only if the workload has prefixes"
        ),
    )

    engine: Literal["synthetic", "torch"] = field(
        default="synthetic",
        metadata=field_doc(
            "`pdflow serve` only: torch runs a transformer; synthetic computes nothing and waits as long as "
            "the cost model says"
        ),
    )
    device: Literal["cpu", "cuda"] = field(
        default="cpu",
        metadata=field_doc(
            "`pdflow serve` only: where torch engines compute and keep KV. cuda: each engine is on one GPU of its "
            "host, with all its ranks"
        ),
    )
    devices: tuple[int, ...] = field(
        default=(),
        metadata=field_doc(
            'with device = "cuda": the number of the GPU of each rank, engine by engine, as nvidia-smi counts them on '
            "the host, or as an index into CUDA_VISIBLE_DEVICES if that is set; all ranks of an engine have the same. "
            "Default, and for engines that are added at run time: all cuda engines take the host's GPUs in turn"
        ),
    )

    @property
    def step_tokens(self) -> int:
        """The most tokens in one step of a replica, of which every sequence in it has at least one."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    def computes_prompts_first(self, policy: PipelinePolicy) -> bool:
        """Return whether its engines have vLLM V0's scheduling, by this table or by a method's policy."""
        if self.scheduling is None:
            return policy.prompts_first and not (policy.loads_by_layer or self.attention_replicas > 1)
        return self.scheduling == "v0"

    @property
    def attention_replicas(self) -> int:
        """The replicas of attention of one engine."""
        return max(1, self.ep // self.tp) if self.dp_attention is None else self.dp_attention

    @property
    def tp_alone(self) -> bool:
        """True if the GPUs of an engine share its layers by tensor parallelism (and stages) alone."""
        return self.attention_replicas == 1 and self.ep == 1

    @property
    def gpus_per_engine(self) -> int:
        """The GPUs of one engine."""
        return self.tp * self.pp * self.attention_replicas

    @property
    def leg(self) -> Literal["prefill", "decode"]:
        """The leg of a request that the router sends to its engines. An aggregated engine's is followed by no other."""
        return "decode" if self.role == "decode" else "prefill"


@attrs.frozen(kw_only=True)
class ClassSlo:
    """The bounds of one class of requests, in place of those of [slo]."""

    ttft_ms: float | None = field(default=None, metadata=field_doc("bound on the time to first token", POSITIVE))
    tpot_ms: float | None = field(
        default=None, metadata=field_doc("bound on the time per output token after the first", POSITIVE)
    )
    itl_ms: float | None = field(
        default=None, metadata=field_doc("bound on the request's inter-token latencies", POSITIVE)
    )
    itl_percentile: float = field(
        default=99.0,
        metadata=field_doc("share of a request's inter-token latencies within itl_ms, in %; 100: all", PERCENTAGE),
    )
    e2e_ms: float | None = field(default=None, metadata=field_doc("bound on the time of the whole request", POSITIVE))


@attrs.frozen(kw_only=True)
class Slo(ClassSlo):
    """[slo]: the bounds that each request must meet to count as good."""

    classes: dict[str, ClassSlo] = field(
        factory=dict, metadata=field_doc("bounds of one class of requests, instead of these", key="class")
    )


@attrs.frozen(kw_only=True)
class ResolvedScenario:
    """A whole scenario, presets resolved and checked."""

    name: str
    seed: int
    workload: Workload
    model: ModelSpec
    pools: tuple[Pool, ...]
    transfer: Transfer
    network: Network
    router: RouterConfig
    slo: Slo
    path: str
    """The scenario file. A trace's path is relative to its folder."""
    noise: Noise = field(factory=Noise)
    faults: tuple[Fault, ...] = ()
    fault_table: Faults = field(factory=Faults)
    scales: tuple[Scale, ...] = ()
    serve: Serve = field(factory=Serve)
    from_config: tuple[str, ...] = ()
    """The values that came from the file that `transfer.config` names, in words."""
    notes: tuple[str, ...] = ()
    """Sentences on how names in the file were understood, such as which preset an alias stands for."""

    @property
    def base_dir(self) -> Path:
        """The folder that paths in the scenario start from."""
        return Path(self.path).parent

    def pool(self, name: str) -> Pool:
        """Return the pool of that name."""
        return next(pool for pool in self.pools if pool.name == name)
