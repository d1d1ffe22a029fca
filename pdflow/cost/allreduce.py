"""The time of all-reduces between the tensor-parallel GPUs of an engine."""

from __future__ import annotations

from fractions import Fraction
from math import log2

import attrs

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.cost.step import PS_PER_S, LinearTime, to_ps


def with_allreduce(linear: LinearTime, model: ModelSpec, gpu: GpuSpec, tp: int, per_layer: int) -> LinearTime:
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
