"""Step costs from data sheets: the larger of arithmetic and memory traffic, attention, all-reduces, and host time.

Weights are read once per step, by all tokens of it together; the KV of every decoding sequence is read once per step.
A step's work is divided by `tp`. Pipeline stages follow one another, so `pp` divides a rank's memory but not a step's
time: one batch is in flight at a time (vLLM keeps up to `pp`, so a pipelined pool's throughput is understated).
Not for mixtures of experts, whose weight traffic grows with the experts touched.

Source: GPU_COST_MODELS.md section 4 (formulas), 5 (factors), 6 (errors).
"""

from __future__ import annotations

from fractions import Fraction

import attrs

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.cost.step import PS_PER_S, LinearTime, StepCost, to_ps

REL_ERROR = {"tpot": "±25 %", "e2e": "±30 %", "ttft": "±40 % below 70 % load, a factor of 2 or more above 85 %"}
"""GPU_COST_MODELS.md section 6, row "data sheet + defaults"."""


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    pp: int = 1,
    *,
    compute_efficiency: float | None = None,
    memory_efficiency: float | None = None,
    host_step_s: float | None = None,
    host_seq_s: float | None = None,
    fp8_compute: bool = False,
) -> StepCost:
    """Build the cost of a step of `model` on `tp` x `pp` of `gpu`. Options that are None are the GPU's own.

    Raises ValueError for a tp or pp that the model does not allow, and for fp8 on a GPU without it.
    """
    model.check_parallel(tp, pp)
    flops = gpu.bf16_flops
    if fp8_compute:
        if gpu.fp8_flops is None:
            raise ValueError(f"gpu {gpu.name!r} has no fp8 arithmetic (fp8_flops is not set)")
        flops = gpu.fp8_flops
    ec = gpu.ec if compute_efficiency is None else compute_efficiency
    em = gpu.em if memory_efficiency is None else memory_efficiency
    step_s = gpu.host_step_s if host_step_s is None else host_step_s
    seq_s = gpu.host_seq_s if host_seq_s is None else host_seq_s
    compute_rate = Fraction(flops) * Fraction(ec) / PS_PER_S
    memory_rate = Fraction(gpu.hbm_bytes_per_s) * Fraction(em) / PS_PER_S
    weights_read = (model.linear_parameters + model.head_parameters) * Fraction(model.weight_bytes_per_param)
    linear = LinearTime(
        slope_ps=round(2 * model.linear_parameters / (tp * compute_rate)),
        floor_ps=round(weights_read / (tp * memory_rate)),
    )
    kv_bytes = model.kv_bytes_per_token_per_rank(tp)
    return StepCost(
        h0=to_ps(step_s),
        h1=to_ps(seq_s),
        a2=round(2 * model.num_layers * _attention_values(model) / (tp * compute_rate)),
        c2=round(kv_bytes / memory_rate),
        linear=_with_allreduce(linear, model, gpu, tp),
        provenance=(
            f"roofline of {model.name} on {gpu.name}, tp {tp}, pp {pp}: {ec:g} of {flops / 1e12:g} TFLOP/s, "
            f"{em:g} of {gpu.hbm_bytes_per_s / 1e9:g} GB/s, host {step_s * 1e3:g} ms + {seq_s * 1e6:g} us per sequence"
        ),
        rel_error=REL_ERROR,
    )


def _attention_values(model: ModelSpec) -> int:
    """Multiply-adds of one query with one key and one value, all heads of a layer."""
    if model.mla is None:
        return 2 * model.num_heads * model.head_dim
    mla = model.mla
    return model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def _with_allreduce(linear: LinearTime, model: ModelSpec, gpu: GpuSpec, tp: int) -> LinearTime:
    """Two all-reduces per layer of one activation (2 bytes) per token, as a ring moves them."""
    if tp == 1:
        return linear
    per_token = Fraction(model.hidden_size * 2 * 2 * (tp - 1), tp) / (Fraction(gpu.allreduce_bytes_per_s) / PS_PER_S)
    return attrs.evolve(
        linear,
        allreduce_ps=2 * model.num_layers * to_ps(gpu.allreduce_latency_s),
        allreduce_slope_ps=round(2 * model.num_layers * per_token),
    )
