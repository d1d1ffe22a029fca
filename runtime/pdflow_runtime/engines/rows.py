"""What is done to each row of a step by itself: padding, norms, rotations, gates.

On a CPU each is a few calls of torch. On a GPU these calls would each read and write all rows, so they are compiled to
one kernel each, once for each process (a norm of 64 rows takes 2.7 us instead of 17.7 on an H200:
`python -m benchmarks.gpu kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

P = ParamSpec("P")
R = TypeVar("R")
ROWS: Final = 16
"""Rows are padded to a multiple of this: a product with fewer takes other paths through the library."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, -len(rows) % ROWS))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(at_least_float32(x.dtype))
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return exact.to(x.dtype) * weight


def added_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of two, and its norm."""
    x = x + more
    return x, norm(x, weight, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to `x` `[rows, heads, head_dim]`, halves against each other, as Hugging Face's weights
    want it."""
    low, high = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((high, low), -1), sin)


def normed_qk(qkv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `[rows, heads, head_dim]` with the first heads normed, each by itself: those that `weight`
    `[some, head_dim]` has a row for."""
    count = len(weight)
    return torch.cat((norm(qkv[:, :count], weight, eps), qkv[:, count:]), 1)


def rotated_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the queries `[rows, heads, head_dim]`, and K and V `[rows, 2 * kv_heads, head_dim]`, from
    `[rows, heads + 2 * kv_heads, head_dim]`: of these `rows`, or of all."""
    if rows is not None:
        qkv = qkv[rows]
    turned = rotated(qkv[:, : heads + kv_heads], cos, sin)
    # Compiled, it is written so; else a copy would follow it.
    q = turned[:, :heads].contiguous() if qkv.is_cuda else turned[:, :heads]
    return q, torch.cat((turned[:, heads:], qkv[:, heads + kv_heads :]), 1)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


class RowFunctions:
    """The functions above for one device: compiled where that is a GPU."""

    def __init__(self, device: torch.device) -> None:
        def on_device(function: Callable[P, R]) -> Callable[P, R]:
            # For the first number of rows; with the second one, for any number. Other sizes stay constants.
            return torch.compile(function) if device.type == "cuda" else function

        self.norm: Final = on_device(norm)
        self.added_norm: Final = on_device(added_norm)
        self.normed_qk: Final = on_device(normed_qk)
        self.rotated_qkv: Final = on_device(rotated_qkv)
        self.gated: Final = on_device(gated)
