"""What it costs that the experts of a mixture are spread over GPUs: moving tokens there and back, and uneven shares.

Each layer sends every token's hidden state to the GPUs that hold its experts (dispatch) and returns their results
(combine). Two kinds of kernels do this: low-latency ones, which send a copy to each expert, for small batches, and
high-throughput ones, which send one copy to each GPU (within a node) or node. The rates are those of DeepEP, scaled
from its H800 (200 GB/s NVLink, a 400 Gb/s NIC for each GPU) to other GPUs by their links. Overlap of these with
computing, as of two half batches, is not modelled.

Source: the tables of DeepEP V1 (deepseek-ai/DeepEP at 0297fc80, its page "legacy"): 128 and 4,096 tokens a GPU, 7,168
values each, 8 experts a token, dispatch in 8 bits, combine in 16.
"""

from __future__ import annotations

from itertools import pairwise
from math import log, log2, sqrt
from typing import Final

from pdflow.cost.specs import GpuSpec, ModelSpec, MoeDims

NODE_GPUS: Final = 8
"""GPUs that NVLink connects."""
H800_NVLINK, H800_NIC = 200e9, 50e9
"""Bytes per second of the machines that were measured."""
LOW_LATENCY_TOKENS: Final = 256
"""The most tokens of a GPU for which low-latency kernels are used: DeepEP's documentation advises fewer."""
LOW_LATENCY: Final = {
    8: (98e9, 127e9),
    16: (63e9, 74e9),
    32: (48e9, 53e9),
    64: (43e9, 46e9),
    128: (39e9, 39e9),
    256: (39e9, 40e9),
}
"""By the number of GPUs that experts are spread over: bytes per second of dispatch and of combine, a copy an expert."""
HIGH_THROUGHPUT: Final = {8: (153e9, 158e9), 16: (43e9, 43e9), 32: (58e9, 57e9), 64: (51e9, 50e9)}
"""The same, a copy for each GPU within a node, and for each node beyond one: bytes on the bottleneck, NVLink or NIC."""


def exchange_s(model: ModelSpec, gpu: GpuSpec, ep: int, tokens: float) -> float:
    """Return the seconds of one layer's dispatch and combine over `ep` GPUs, each with so many tokens."""
    assert model.moe is not None
    quick = tokens <= LOW_LATENCY_TOKENS
    copies = model.moe.experts_per_token if quick else _copies(model.moe, ep)
    values = tokens * copies * model.hidden_size
    within = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    scale = within / H800_NVLINK if ep <= NODE_GPUS else gpu.nic_bytes_per_s / H800_NIC
    dispatch, combine = _rates(LOW_LATENCY if quick else HIGH_THROUGHPUT, ep)
    sent_bytes = 1 if model.expert_products in ("fp8", "int8") else 2
    least = gpu.allreduce_latency_s * log2(ep)
    return max(least, values * sent_bytes / (dispatch * scale)) + max(least, values * 2 / (combine * scale))


BALANCEDNESS: Final = 0.94
"""Mean by maximum of the tokens that the GPUs of an engine get: the median of Kimi K3 on 16 GPUs without balancing
(vLLM PR #50647, 97 samples; with balancing it was 0.99)."""


def busiest_share(moe: MoeDims, ep: int, tokens: int, balancedness: float = BALANCEDNESS) -> float:
    """Return how much more than the mean the GPU has to compute that most of a layer's tokens are sent to.

    Two causes: some experts are chosen more often than others, which `balancedness` describes, whatever the batch; and
    of few tokens chance sends more to some GPUs. If experts were chosen evenly and independently, the largest of `ep`
    Poisson numbers with mean m would be about m + sqrt(2 m ln ep). The larger of the two counts.
    """
    if ep == 1:
        return 1.0
    mean = tokens * moe.experts_per_token / ep
    return min(float(ep), max(1 / balancedness, 1 + sqrt(2 * log(ep) / mean)))


def _copies(moe: MoeDims, ep: int) -> float:
    """Return the mean number of GPUs of a node, or of nodes, that one token is sent to."""
    targets = ep if ep <= NODE_GPUS else -(-ep // NODE_GPUS)
    return targets * (1 - (1 - 1 / targets) ** moe.experts_per_token)


def _rates(table: dict[int, tuple[float, float]], ep: int) -> tuple[float, float]:
    """Return the rates at so many GPUs, on straight lines over the logarithm of their number."""
    sizes = sorted(table)
    if ep <= sizes[0]:
        return table[sizes[0]]
    for low, high in pairwise(sizes):
        if ep <= high:
            share = log2(ep / low) / log2(high / low)
            (d0, c0), (d1, c1) = table[low], table[high]
            return d0 + (d1 - d0) * share, c0 + (c1 - c0) * share
    return table[sizes[-1]]
