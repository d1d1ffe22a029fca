"""Step costs from data sheets: the larger of arithmetic and memory traffic, attention, all-reduces, and host time.

Weights are read once per step, by all tokens of it together; the KV of every decoding sequence is read once per step.
A step's work is divided by `tp`. Pipeline stages follow one another, so `pp` divides a rank's memory but not a step's
time: one batch is in flight at a time (vLLM keeps up to `pp`, so a pipelined pool's throughput is understated).
Of a mixture of experts a step reads the weights that its tokens touch: with tokens sent to experts evenly and
independently, of E experts E(1 - (1 - k/E)^T). Real routing is less even, and touches fewer. The products of experts
are many and small: their arithmetic takes longer than that of dense layers, and overlaps less with reading weights.

With `dp` replicas of attention, each computes attention and dense layers of its own sequences on `tp` GPUs, with all of
their weights; experts are on all tp x dp GPUs, either whole (`ep`) or each cut into as many slices. In the first case
tokens are dispatched to them (`expert_parallel.py`), in the second every GPU gets all tokens, which an all-reduce over
all GPUs stands for here.

Sources: the vendors' data sheets (rates), docs/costs.md (factors), docs/validation.md (errors).
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from math import log2

import attrs

from pdflow.cost.expert_parallel import busiest_share, exchange_s
from pdflow.cost.specs import GpuSpec, ModelSpec, MoeDims
from pdflow.cost.step import PS_PER_S, LinearTable, LinearTime, StepCost, to_ps

TABLE_TOKENS = tuple(sorted({n << i for i in range(13) for n in (1, 3)} | {16384, 32768}))
"""Where a mixture of experts' curve is computed; it is straight in between."""
EXPERT_ARITHMETIC, EXPERT_OVERLAP = 1.5, 1.25
"""How much longer the arithmetic of experts takes than that of dense layers of as many FLOPs, because tiles are partly
empty; and the exponent p of (reading^p + arithmetic^p)^(1/p), the time of both: 1 without overlap, infinite with the
whole. Fitted to NVIDIA's kernel tables of Qwen3-30B-A3B on H100, H200, B200 and RTX PRO 6000 and of DeepSeek-V3 on H200
(the presets' cost files). From 16 to 8,192 tokens the mean error of L is 11 %; with 1 and infinite, as of dense layers,
it is 21 %. `python benchmarks/expert_costs.py` prints both."""
REL_ERROR = {"tpot": "±25 %", "e2e": "±30 %", "ttft": "±40 % below 70 % load, a factor of 2 or more above 85 %"}
"""For data sheets with default factors, judged from replays of published runs (docs/validation.md)."""


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    pp: int = 1,
    *,
    dp: int = 1,
    ep: int = 1,
    compute_efficiency: float | None = None,
    memory_efficiency: float | None = None,
    host_step_s: float | None = None,
    host_seq_s: float | None = None,
) -> StepCost:
    """Build the cost of a step of `model` on `tp` x `pp` x `dp` of `gpu`. `dp`: replicas of attention; `ep`: GPUs that
    experts are spread over, 1 or all. Options that are None are the GPU's own.

    Raises ValueError for a tp or pp that the model does not allow, and for 8-bit arithmetic on a GPU without it.
    """
    model.check_parallel(tp, pp)
    flops = gpu.bf16_flops
    if model.activation_dtype in ("fp8", "int8"):
        if gpu.fp8_flops is None:
            raise ValueError(f"gpu {gpu.name!r} has no 8-bit arithmetic (fp8_flops is not set)")
        flops = gpu.fp8_flops
    ec = gpu.ec if compute_efficiency is None else compute_efficiency
    em = gpu.em if memory_efficiency is None else memory_efficiency
    step_s = gpu.host_step_s if host_step_s is None else host_step_s
    seq_s = gpu.host_seq_s if host_seq_s is None else host_seq_s
    compute_rate = Fraction(flops) * Fraction(ec) / PS_PER_S
    attention_rate = Fraction(gpu.bf16_flops) * Fraction(ec) / PS_PER_S  # Whatever the linear layers compute in.
    memory_rate = Fraction(gpu.hbm_bytes_per_s) * Fraction(em) / PS_PER_S
    bytes_per_param = Fraction(model.weight_bytes_per_param)
    always_read = model.shared_parameters * bytes_per_param + model.head_parameters * Fraction(
        model.embedding_bytes_per_param
    )
    dense = LinearTime(
        slope_ps=round(2 * model.linear_parameters / (tp * compute_rate)),
        floor_ps=round(always_read / (tp * memory_rate)),
    )
    together = model.moe is not None and (dp > 1 or ep > 1)
    whole = _with_allreduce(dense, model, gpu, tp, 1 if together else 2)
    linear: LinearTime | LinearTable = whole
    experts = None
    if model.moe is not None:
        gpus = tp * dp
        ps_per_param = float(Fraction(model.bytes_per_expert_param) / (gpus * memory_rate))
        own, routed = _split(whole, model)
        experts = _experts(model, model.moe, routed * tp // gpus, ps_per_param, ep)
        if together:
            linear, experts = own, _with_exchange(experts, model, gpu, gpus, ep)
        else:
            linear, experts = _summed(own, experts), None
    kv_bytes = model.kv_bytes_per_token_per_rank(tp)
    reading_ps, products_ps = (
        kv_bytes / memory_rate,
        2 * model.num_layers * _decode_values(model) / (tp * attention_rate),
    )
    return StepCost(
        h0=to_ps(step_s),
        h1=to_ps(seq_s),
        a2=round(2 * model.num_layers * _attention_values(model) / (tp * attention_rate)),
        c2=round(max(reading_ps, products_ps)),
        linear=linear,
        experts=experts,
        provenance=(
            f"roofline of {model.name} on {gpu.name}, tp {tp}, pp {pp}{_spread(dp, ep)}: {ec * 100:g} % of "
            f"{flops / 1e12:g} TFLOP/s, {em * 100:g} % of {gpu.hbm_bytes_per_s / 1e9:g} GB/s, "
            f"host {step_s * 1e3:g} ms + {seq_s * 1e6:g} us per sequence"
        ),
        rel_error=REL_ERROR,
    )


def _spread(dp: int, ep: int) -> str:
    return (f", dp_attention {dp}" if dp > 1 else "") + (f", ep {ep}" if ep > 1 else "")


def _attention_values(model: ModelSpec) -> int:
    """Multiply-adds of one query with one key and one value, all heads of a layer."""
    if model.mla is None:
        return 2 * model.num_heads * model.head_dim
    mla = model.mla
    return model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def _decode_values(model: ModelSpec) -> int:
    """Multiply-adds of a decoding query with one cached token, all heads of a layer: latent attention works on the
    latent itself."""
    if model.mla is None:
        return 2 * model.num_heads * model.head_dim
    return model.num_heads * (2 * model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)


def _split(linear: LinearTime, model: ModelSpec) -> tuple[LinearTime, int]:
    """Return L(T) of what is no routed expert, and the slope of these."""
    routed_ps = round(linear.slope_ps * (1 - Fraction(model.shared_parameters, model.linear_parameters)))
    return attrs.evolve(linear, slope_ps=linear.slope_ps - routed_ps), routed_ps


def _experts(model: ModelSpec, moe: MoeDims, slope_ps: int, ps_per_param: float, ep: int) -> LinearTable:
    """Return the time of the routed experts: the weights read grow with those that the step's tokens touch."""
    all_experts = model.routed_parameters * ps_per_param
    times = []
    for tokens in TABLE_TOKENS:
        touched = 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** tokens
        reading = all_experts * touched
        arithmetic = EXPERT_ARITHMETIC * slope_ps * tokens * busiest_share(moe, ep, tokens)
        times.append(round((reading**EXPERT_OVERLAP + arithmetic**EXPERT_OVERLAP) ** (1 / EXPERT_OVERLAP)))
    return LinearTable(tokens=TABLE_TOKENS, ps=_never_falling(times))


def _with_exchange(experts: LinearTable, model: ModelSpec, gpu: GpuSpec, gpus: int, ep: int) -> LinearTable:
    """Add what it takes to bring tokens to experts on `gpus` GPUs and back, in all layers that have some. Whole experts
    can be brought all tokens too, as slices must be, if that is faster: between two GPUs it is."""
    gathered = _with_allreduce(LinearTime(), model, gpu, gpus, 1)
    times = []
    for tokens, ps in zip(experts.tokens, experts.ps, strict=True):
        exchange = gathered.of(tokens)
        if ep > 1:
            exchange = min(exchange, to_ps(model.expert_layers * exchange_s(model, gpu, ep, tokens / gpus)))
        times.append(ps + exchange)
    return LinearTable(tokens=experts.tokens, ps=_never_falling(times))


def _never_falling(times: Iterable[int]) -> tuple[int, ...]:
    """A larger batch that other kernels would make faster takes as long as a smaller one."""
    return tuple(accumulate(times, max))


def _summed(linear: LinearTime, experts: LinearTable) -> LinearTable:
    times = [linear.of(tokens) + ps for tokens, ps in zip(experts.tokens, experts.ps, strict=True)]
    return LinearTable(tokens=experts.tokens, ps=tuple(times))


def _with_allreduce(linear: LinearTime, model: ModelSpec, gpu: GpuSpec, tp: int, per_layer: int) -> LinearTime:
    """Add all-reduces of one activation (2 bytes) per token, two per layer or one, as a ring moves them.

    The latency of even a small one grows with the number of ranks. Real vLLM of 64 and 80 layers on H100 and H200
    decodes by 1.6 to 1.9 ms a step more slowly at TP 4 than a latency that does not grow says, at TP 8 by 3.1 to 3.6
    ms, and at TP 2 not at all: a logarithm (docs/validation.md, section 2, on the rows that may be fitted on).
    """
    if tp == 1:
        return linear
    per_token = Fraction(model.hidden_size * 2 * 2 * (tp - 1), tp) / (Fraction(gpu.allreduce_bytes_per_s) / PS_PER_S)
    return attrs.evolve(
        linear,
        allreduce_ps=per_layer * model.num_layers * to_ps(gpu.allreduce_latency_s * log2(tp)),
        allreduce_slope_ps=round(per_layer * model.num_layers * per_token),
    )
