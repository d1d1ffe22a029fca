"""The Llama network over a paged KV cache: embeddings to logits, for a step's tokens of many sequences at once.

**A sequence's numbers do not depend on who else is in the step**, nor on how its prompt was cut: not by a bit, in
float32 and bfloat16 on the CPUs it was tried on, so that a prompt computed on one engine and continued on another gives
the tokens of one engine alone, near-ties included. Three habits make it so. Rows are padded to a multiple of `ROWS`: a
product with fewer takes other paths through the library. Attention is computed for each sequence alone. And it sums
over the context in tiles of a fixed width, from the start on, whatever the context's length.

Sources: transformers' modeling_llama.py, whose roundings it follows (norms and rotations in float32 or better).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from runtime.engines.config import ModelConfig
from runtime.engines.kv_cache import KvCache
from runtime.engines.weights import Layer, Weights

ROWS: Final = 8
TILE: Final = 128
"""Positions of context that are summed over at once."""
QUERIES: Final = 256
"""Tokens of one sequence whose attention is computed at once: bounds what a long prompt's scores take."""


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One sequence's tokens in a step: rows `first` to `first + count`, at the positions from `start` on."""

    first: int
    count: int
    start: int
    blocks: Tensor


@attrs.frozen(kw_only=True, eq=False)
class StepInput:
    """Rows of all sequences, one after the other: `[rows]` each. What is padded beyond them goes nowhere."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    parts: Seq[Part]
    wanted: Tensor
    """Rows whose logits are wanted."""


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config: Final = config
        self.weights: Final = weights
        self._heads: Final = config.num_attention_heads
        self._kv_heads: Final = config.num_key_value_heads
        self._cos, self._sin = _rotations(config, weights)

    @torch.inference_mode()
    def forward(self, step: StepInput, cache: KvCache) -> Tensor:
        """Logits `[wanted, vocab]`, in float32 or better; the rows' KV is then in the cache."""
        weights, eps = self.weights, self.config.rms_norm_eps
        x = F.embedding(_padded(step.tokens), weights.embedding)
        positions = _padded(step.positions)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(index, layer, _norm(x, layer.input_norm, eps), cos, sin, step, cache)
            x = x + self._mlp(layer, _norm(x, layer.mlp_norm, eps))
        wanted = step.wanted
        x = _norm(x[_padded(wanted)], weights.norm, eps)
        return F.linear(x, weights.head)[: len(wanted)].to(_at_least_float32(x.dtype))

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, step: StepInput, cache: KvCache
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        rows = len(step.tokens)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, -1)
        qkv[:, : heads + kv_heads] = _rotated(qkv[:, : heads + kv_heads], cos, sin)
        kv = qkv[:rows, heads:].view(rows, 2, kv_heads, -1)
        cache.write(index, step.blocks, step.offsets, kv)
        out = torch.zeros_like(qkv[:, :heads])
        for part in step.parts:
            end = part.first + part.count
            out[part.first : end] = self._attend(qkv[part.first : end, :heads], part, cache.gather(index, part.blocks))
        return F.linear(out.flatten(1), layer.out)

    def _attend(self, q: Tensor, part: Part, kv: Tensor) -> Tensor:
        """`q` `[tokens, heads, head_dim]` over the sequence's own KV, its own included."""
        end = part.start + part.count
        # What lies beyond in the last block is anything at all, and 0 times infinity is no number.
        kv[1, :, end:] = 0
        grouped = q.view(part.count, self._kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
        parts = []
        for first in range(0, part.count, QUERIES):
            last = min(first + QUERIES, part.count)
            length = -(-(part.start + last) // TILE) * TILE
            parts.append(_tiled(grouped[:, :, first:last], kv[:, :, :length], part.start + first))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole.permute(2, 0, 1, 3).flatten(1, 2)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, 1)
        return F.linear(F.silu(gate) * up, layer.down)


def context_blocks(positions: int, block_size: int) -> int:
    """How many blocks to gather for a context, so that it is whole tiles."""
    return -(-(-(-positions // TILE) * TILE) // block_size)


def _tiled(q: Tensor, kv: Tensor, start: int) -> Tensor:
    """Causal attention of `q` `[kv_heads, group, tokens, head_dim]`, from position `start` on; whole tiles of KV."""
    kv_heads, group, tokens, width = q.shape
    rows, length = group * tokens, kv.shape[2]
    flat = F.pad(q.reshape(kv_heads, rows, width), (0, 0, 0, -rows % ROWS))
    scores = torch.matmul(flat, kv[0].transpose(1, 2)).to(_at_least_float32(q.dtype)).mul_(width**-0.5)
    reach = torch.arange(start, start + tokens).repeat(group)
    beyond = torch.arange(length) > F.pad(reach, (0, -rows % ROWS))[:, None]
    scores.masked_fill_(beyond, -math.inf)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    values = weights.to(q.dtype)
    out = torch.zeros_like(flat, dtype=scores.dtype)
    total = torch.zeros_like(scores[..., :1])
    for at in range(0, length, TILE):
        out += torch.matmul(values[..., at : at + TILE], kv[1, :, at : at + TILE])
        total += weights[..., at : at + TILE].sum(-1, keepdim=True)
    return (out / total).to(q.dtype)[:, :rows].view(kv_heads, group, tokens, width)


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, -len(rows) % ROWS))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(_at_least_float32(x.dtype))
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return exact.to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[rows, heads, head_dim]`, halves against each other, as Hugging Face's weights want it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _rotations(config: ModelConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[positions, 1, head_dim]` of every position and wave."""
    width, scaling = config.head_dim, config.rope_scaling
    waves = 1.0 / config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * waves / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        mix = ((turns - low) / (high - low)).clamp(0, 1)
        waves = (1 - mix) * waves / scaling.factor + mix * waves
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), waves)
    angles = torch.cat((angles, angles), -1)[:, None].to(weights.device)
    return angles.cos().to(weights.dtype), angles.sin().to(weights.dtype)
