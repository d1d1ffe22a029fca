"""Step costs from data sheets: the larger of arithmetic and memory traffic, attention, all-reduces, and host time.

Weights are read once per step, by all tokens of it together; the KV of every decoding sequence is read once per step.
A step's work is divided by `tp`. Pipeline stages follow one another, so `pp` divides a rank's memory but not a step's
time: one batch is in flight at a time (vLLM keeps up to `pp`, so a pipelined pool's throughput is understated).
Mixtures of experts are in `experts.py`.

Sources: the vendors' data sheets (rates), docs/costs.md (factors), docs/validation.md (errors).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from pdflow.cost.allreduce import with_allreduce
from pdflow.cost.expert_parallel import BALANCEDNESS
from pdflow.cost.experts import with_experts
from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.cost.step import PS_PER_S, LinearTable, LinearTime, StepCost, to_ps


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int = 1,
    pp: int = 1,
    *,
    dp: int = 1,
    ep: int = 1,
    expert_balancedness: float = BALANCEDNESS,
    host_step_s: float | None = None,
    host_seq_s: float | None = None,
) -> StepCost:
    """Build the cost of a step of `model` on `tp` x `pp` x `dp` of `gpu`. `dp`: replicas of attention; `ep`: GPUs that
    experts are spread over, 1 or all; `expert_balancedness`: see `busiest_share`. Options that are None are the GPU's
    own.

    Raises ValueError for a tp or pp that the model does not allow, and for 8-bit arithmetic on a GPU without it.
    """
    model.check_parallel(tp, pp)
    flops = product_flops(gpu, model.activation_dtype)
    reached = reached_share(gpu, model.activation_dtype)
    step_s = gpu.host_step_s if host_step_s is None else host_step_s
    seq_s = gpu.host_seq_s if host_seq_s is None else host_seq_s
    compute_rate = _reached_rate(gpu, model.activation_dtype)
    attention_rate = Fraction(gpu.bf16_flops) * Fraction(gpu.ec) / PS_PER_S  # Whatever the linear layers compute in.
    index_rate = Fraction(gpu.fp8_flops or gpu.bf16_flops) * Fraction(gpu.ec) / PS_PER_S
    memory_rate = Fraction(gpu.hbm_bytes_per_s) * Fraction(gpu.em) / PS_PER_S
    bytes_per_param = Fraction(model.weight_bytes_per_param)
    always_read = model.shared_parameters * bytes_per_param + model.head_parameters * Fraction(
        model.embedding_bytes_per_param
    )
    routed_ps = 0
    slope_ps = round(2 * model.linear_parameters / (tp * compute_rate))
    if model.moe is not None:
        routed_ps = round(slope_ps * (1 - Fraction(model.shared_parameters, model.linear_parameters)))
        faster = _reached_rate(gpu, model.expert_products) / compute_rate
        if faster != 1:
            slope_ps -= routed_ps
            routed_ps = round(routed_ps / faster)
            slope_ps += routed_ps
    dense = LinearTime(
        slope_ps=slope_ps,
        floor_ps=round(always_read / (tp * memory_rate)),
    )
    linear: LinearTime | LinearTable
    if model.moe is None:
        linear, experts = with_allreduce(dense, model, gpu, tp, 2), None
    else:
        linear, experts = with_experts(dense, routed_ps, model, gpu, memory_rate, tp, dp, ep, expert_balancedness)
    attention: Any = _attention(model, tp, attention_rate, memory_rate, index_rate)
    return StepCost(
        h0=to_ps(step_s),
        h1=to_ps(seq_s),
        **attention,
        linear=linear,
        experts=experts,
        provenance=(
            f"roofline of {model.name} on {gpu.name}, tp {tp}, pp {pp}{_spread(dp, ep)}: {reached * 100:g} % of "
            f"{flops / 1e12:g} TFLOP/s, {gpu.em * 100:g} % of {gpu.hbm_bytes_per_s / 1e9:g} GB/s, "
            f"host {step_s * 1e3:g} ms + {seq_s * 1e6:g} us per sequence"
        ),
    )


def product_flops(gpu: GpuSpec, dtype: str) -> float:
    """Return the FLOP/s of products of a dtype. 4-bit weights on a GPU without 4-bit products are computed in 16 bits
    (vLLM's Marlin kernels, W4A16). Raises ValueError for 8-bit ones on a GPU without them."""
    if dtype in ("fp8", "int8"):
        if gpu.fp8_flops is None:
            raise ValueError(f"gpu {gpu.name!r} has no 8-bit arithmetic (fp8_flops is not set)")
        return gpu.fp8_flops
    if dtype == "fp4" and gpu.fp4_flops is not None:
        return gpu.fp4_flops
    return gpu.bf16_flops


def reached_share(gpu: GpuSpec, dtype: str) -> float:
    """Return the share of these FLOP/s that products of a dtype reach."""
    return gpu.ec_fp8 if dtype in ("fp8", "int8") and gpu.ec_fp8 is not None else gpu.ec


def _reached_rate(gpu: GpuSpec, dtype: str) -> Fraction:
    """Return the FLOP per ps that products of a dtype reach."""
    return Fraction(product_flops(gpu, dtype)) * Fraction(reached_share(gpu, dtype)) / PS_PER_S


def _attention(
    model: ModelSpec, tp: int, rate: Fraction, memory_rate: Fraction, index_rate: Fraction
) -> dict[str, int]:
    """Return the coefficients of attention, of whichever kind, by their names in StepCost. `index_rate`: that of 8-bit
    products, in which indexers score positions; every rank does that by itself."""
    reading_ps = model.kv_bytes_per_layer_per_rank(tp) / memory_rate
    products_ps = 2 * _decode_values(model) / (tp * rate)
    decode_ps, prefill_ps = max(reading_ps, products_ps), 2 * _attention_values(model) / (tp * rate)
    sparse, linear = model.sparse_attention, model.linear_attention
    if sparse is not None:
        scores_ps = 2 * sparse.layers * sparse.heads * sparse.head_dim / index_rate
        # Prompts are computed on the latent, too: each token has other positions.
        return {
            "a2": round(scores_ps),
            "c2": round(max(model.index_bytes_per_token / memory_rate, scores_ps)),
            "window": sparse.topk,
            "aw": round(model.num_layers * products_ps),
            "cw": round(model.num_layers * decode_ps),
        }
    whole = model.attention_layers - model.window_layers
    found = {"a2": round(whole * prefill_ps), "c2": round(whole * decode_ps)}
    if model.window is not None:
        found |= {
            "window": model.window.tokens,
            "aw": round(model.window_layers * prefill_ps),
            "cw": round(model.window_layers * decode_ps),
        }
    if linear is not None:
        # A token reads the state, corrects it and reads it again; a decode brings it from memory and back.
        rule_ps = 2 * linear.layers * 3 * linear.state_values / (tp * rate)
        found |= {
            "a1": round(rule_ps),
            "c1": round(max(rule_ps, 2 * model.state_bytes / (tp * memory_rate))),
        }
    return found


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
