"""The layers of a model with a mixture of experts, of which each token passes a few.

A step reads the weights that its tokens touch: with tokens sent to experts evenly and independently, of E experts
E(1 - (1 - k/E)^T). Real routing is less even, and touches fewer. The products of experts are many and small: their
arithmetic takes longer than that of dense layers, and overlaps less with reading weights.

With `dp` replicas of attention, each computes attention and dense layers of its own sequences on `tp` GPUs, with all of
their weights; experts are on all tp x dp GPUs, either whole (`ep`) or each cut into as many slices. In the first case
tokens are dispatched to them (`expert_parallel.py`), in the second every GPU gets all tokens, which an all-reduce over
all GPUs stands for here.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate

import attrs

from pdflow.cost.allreduce import with_allreduce
from pdflow.cost.expert_parallel import NODE_GPUS, busiest_share, exchange_s
from pdflow.cost.specs import GpuSpec, ModelSpec, MoeDims
from pdflow.cost.step import LinearTable, LinearTime, to_ps

TABLE_TOKENS = tuple(sorted({n << i for i in range(13) for n in (1, 3)} | {16384, 32768}))
"""Where a mixture of experts' curve is computed; it is straight in between."""
EXPERT_ARITHMETIC, EXPERT_OVERLAP = 1.5, 1.25
"""How much longer the arithmetic of experts takes than that of dense layers of as many FLOPs, because tiles are partly
empty; and the exponent p of (reading^p + arithmetic^p)^(1/p), the time of both: 1 without overlap, infinite with the
whole. Fitted to NVIDIA's kernel tables of Qwen3-30B-A3B on H100, H200, B200 and RTX PRO 6000 and of DeepSeek-V3 on H200
(the presets' cost files). From 16 to 8,192 tokens the mean error of L is 11 %; with 1 and infinite, as of dense layers,
it is 21 %. `python benchmarks/expert_costs.py` prints both."""


def with_experts(
    dense: LinearTime,
    routed_ps: int,
    model: ModelSpec,
    gpu: GpuSpec,
    memory_rate: Fraction,
    tp: int,
    dp: int,
    ep: int,
    balancedness: float,
) -> tuple[LinearTime | LinearTable, LinearTable | None]:
    """Return L(T) and E(T) of a model with experts. E(T), of the tokens of all replicas, is None with tensor
    parallelism alone: then L(T) has the experts.

    Args: `dense`: the arithmetic of all that a token passes, and the reading of all but routed experts, on `tp` GPUs;
    `routed_ps`: the routed experts' part of that arithmetic; `memory_rate`: bytes per ps of one GPU;
    `balancedness`: that of the GPUs that whole experts are on (`busiest_share`).
    """
    assert model.moe is not None
    gpus = tp * dp
    together = dp > 1 or ep > 1
    own = with_allreduce(dense, model, gpu, tp, 1 if together else 2)
    own = attrs.evolve(own, slope_ps=own.slope_ps - routed_ps)
    ps_per_param = float(Fraction(model.bytes_per_expert_param) / (gpus * memory_rate))
    experts = _experts(model, model.moe, routed_ps * tp // gpus, ps_per_param, ep, balancedness)
    if together:
        return own, _with_exchange(experts, model, gpu, gpus, ep)
    return _summed(own, experts), None


def _experts(
    model: ModelSpec, moe: MoeDims, slope_ps: int, ps_per_param: float, ep: int, balancedness: float
) -> LinearTable:
    """Return the time of the routed experts: the weights read grow with those that the step's tokens touch."""
    all_experts = model.routed_parameters * ps_per_param
    times = []
    for tokens in TABLE_TOKENS:
        touched = 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** tokens
        reading = all_experts * touched
        arithmetic = EXPERT_ARITHMETIC * slope_ps * tokens * busiest_share(moe, ep, tokens, balancedness)
        times.append(round((reading**EXPERT_OVERLAP + arithmetic**EXPERT_OVERLAP) ** (1 / EXPERT_OVERLAP)))
    return LinearTable(tokens=TABLE_TOKENS, ps=_never_falling(times))


def _with_exchange(experts: LinearTable, model: ModelSpec, gpu: GpuSpec, gpus: int, ep: int) -> LinearTable:
    """Add what it takes to bring tokens to experts on `gpus` GPUs and back, in all layers that have experts.

    Slices of experts need every token on every GPU, which an all-reduce stands for; beyond a node it runs at the NICs'
    rate. Whole experts within a node get them in this manner too if it is faster.
    """
    gathered = with_allreduce(LinearTime(), model, gpu, gpus, 1)
    if gpus > NODE_GPUS:
        slower = (gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s) / gpu.nic_bytes_per_s
        gathered = attrs.evolve(gathered, allreduce_slope_ps=round(gathered.allreduce_slope_ps * max(1.0, slower)))
    times = []
    for tokens, ps in zip(experts.tokens, experts.ps, strict=True):
        exchange = gathered.of(tokens) * model.expert_layers // model.num_layers
        if ep > 1:
            sent = to_ps(model.expert_layers * exchange_s(model, gpu, ep, tokens / gpus))
            exchange = min(exchange, sent) if gpus <= NODE_GPUS else sent
        times.append(ps + exchange)
    return LinearTable(tokens=experts.tokens, ps=_never_falling(times))


def _never_falling(times: Iterable[int]) -> tuple[int, ...]:
    """A larger batch that other kernels would make faster takes as long as a smaller one."""
    return tuple(accumulate(times, max))


def _summed(linear: LinearTime, experts: LinearTable) -> LinearTable:
    times = [linear.of(tokens) + ps for tokens, ps in zip(experts.tokens, experts.ps, strict=True)]
    return LinearTable(tokens=experts.tokens, ps=tuple(times))
