"""The Llama network over a paged KV cache: embeddings to logits, for a step's tokens of many sequences at once.

**A sequence's numbers do not depend on who else is in the step**, nor on how its prompt was cut: not by a bit, in
float32 and bfloat16 with one or two threads on the CPUs it was tried on, so that a prompt computed on one engine and
continued on another gives the tokens of one engine alone, near-ties included. (With three threads, and in float64, the
last bit may differ.) Three habits make it so. Rows are padded to a multiple of `ROWS`: a product with fewer takes other
paths through the library. Attention multiplies each sequence's rows with its own context, in matrices of
its own. And it sums over the context in tiles of a fixed width, from the start on, whatever the context's length.

Sources: transformers' modeling_llama.py, whose roundings it follows (norms and rotations in float32 or better).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.weights import Layer, Weights

# With AMX, oneDNN cuts a bfloat16 product's sums by how many rows there are: a prompt that is computed in other chunks,
# or beside another one, gets other last bits, and P with D other tokens than one engine alone. Read at torch's first
# product. Whoever sets it otherwise has what is set. Set here and not for the whole package: a vLLM that loads pdflow's
# connector computes as it would without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROWS: Final = 16
TILE: Final = 128
"""Positions of context that are summed over at once."""
QUERIES: Final = 256
"""Tokens of one sequence whose attention is computed at once: bounds what a long prompt's scores take."""
CONTEXT_BYTES: Final = 2**22
"""K and V of one layer that several sequences gather at once: what fits a cache is faster than fewer products."""


@attrs.frozen(kw_only=True, eq=False)
class Attending:
    """Rows of a step that attend together: several rows of one sequence, or one row of each of several."""

    rows: slice
    sequences: int
    tables: Seq[Tensor]
    """The tables of their contexts, in whole tiles."""
    beyond: Tensor
    """The mask of positions that each may not see: `[sequences, 1, group * tokens, positions]`."""


@attrs.frozen(kw_only=True, eq=False)
class StepInput:
    """The rows of all sequences in a step, one after the other: `[rows]` each. Padding beyond them is not used."""

    tokens: Tensor
    positions: Tensor
    slot_mapping: Seq[Tensor]
    """The slots that their KV is written to."""
    attending: Seq[Attending]
    logits_indices: Tensor
    """Rows whose logits are wanted."""


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config: Final = config
        self.weights: Final = weights
        self._heads: Final = config.num_attention_heads
        self._kv_heads: Final = config.num_key_value_heads
        self.group: Final = self._heads // self._kv_heads
        self._cos, self._sin = _rotations(config, weights)

    @torch.inference_mode()
    def forward(self, step: StepInput, cache: KvCache, written: Callable[[int], None] | None = None) -> Tensor:
        """Return the logits `[len(logits_indices), vocab]`, in float32 or better; the rows' KV is then in the cache.
        `written` is called with each layer whose KV is."""
        weights, eps = self.weights, self.config.rms_norm_eps
        x = F.embedding(_padded(step.tokens), weights.embedding)
        positions = _padded(step.positions)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(index, layer, _norm(x, layer.input_norm, eps), cos, sin, step, cache)
            if written is not None:
                written(index)
            x = x + self._mlp(layer, _norm(x, layer.mlp_norm, eps))
        logits_indices = step.logits_indices
        x = _norm(x[_padded(logits_indices)], weights.norm, eps)
        return F.linear(x, weights.head)[: len(logits_indices)].to(_at_least_float32(x.dtype))

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, step: StepInput, cache: KvCache
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        rows = len(step.tokens)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, -1)
        turned = _rotated(qkv[:, : heads + kv_heads], cos, sin)
        kv = torch.cat((turned[:rows, heads:], qkv[:rows, heads + kv_heads :]), 1)
        cache.write(index, step.slot_mapping, kv.view(rows, 2, kv_heads, -1))
        out = torch.zeros_like(turned[:, :heads])
        for batch in step.attending:
            context = cache.gather(index, batch.tables)
            out[batch.rows] = _attended(turned[batch.rows, :heads], context, batch)
        return F.linear(out.flatten(1), layer.out)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, 1)
        return F.linear(F.silu(gate) * up, layer.down)


def context_blocks(positions: int, block_size: int) -> int:
    """Return how many blocks to gather for a context, so that it is whole tiles."""
    return -(-(-(-positions // TILE) * TILE) // block_size)


def beyond(reaches: Tensor, group: int, length: int) -> Tensor:
    """Return the mask of `Attending.beyond` for `reaches`, each token's own position `[sequences, tokens]`."""
    return torch.arange(length).gt(reaches.repeat(1, group)[:, None, :, None])


def _attended(q: Tensor, kv: Tensor, batch: Attending) -> Tensor:
    """Return the attention of `q` `[rows, heads, head_dim]` over `kv` `[2, sequences, kv_heads, positions,
    head_dim]`."""
    sequences, (rows, heads, width) = batch.sequences, q.shape
    _, _, kv_heads, _, _ = kv.shape
    length = batch.beyond.shape[-1]
    tokens, tiles = rows // sequences, length // TILE
    # [sequences, kv_heads, group * tokens, head_dim]: queries of one KV head are the rows of one product.
    flat = q.view(sequences, tokens, kv_heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    count = flat.shape[2]
    padding = (0, 0, 0, -count % ROWS)
    scores = torch.matmul(F.pad(flat, padding), kv[0, :, :, :length].transpose(2, 3))[:, :, :count]
    weights = scores.to(_at_least_float32(q.dtype)) * width**-0.5
    weights.masked_fill_(batch.beyond, -math.inf)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    # Tile by tile, then the tiles in order: what is masked at the end adds exactly nothing, however much it is.
    total = weights.view(sequences, kv_heads, count, tiles, TILE).sum(-1).movedim(-1, 0).contiguous().sum(0)
    tiled = F.pad(weights.to(q.dtype), padding).view(sequences, kv_heads, -1, tiles, TILE).transpose(2, 3)
    values = kv[1, :, :, :length].view(sequences, kv_heads, tiles, TILE, width)
    out: Tensor = torch.matmul(tiled, values).to(weights.dtype).sum(2)[:, :, :count] / total[..., None]
    grouped: Tensor = out.to(q.dtype).view(sequences, kv_heads, -1, tokens, width)
    return grouped.permute(0, 3, 1, 2, 4).reshape(rows, heads, width)


def _padded(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, -len(rows) % ROWS))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(_at_least_float32(x.dtype))
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return exact.to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to `x` `[rows, heads, head_dim]`, halves against each other, as Hugging Face's weights
    want it."""
    low, high = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((high, low), -1), sin)


def _rotations(config: ModelConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[positions, 1, head_dim]` of every position and wave; the sine of the lower half is
    negative."""
    width, scaling = config.head_dim, config.rope_scaling
    waves = 1.0 / config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * waves / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        mix = ((turns - low) / (high - low)).clamp(0, 1)
        waves = (1 - mix) * waves / scaling.factor + mix * waves
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), waves)[:, None]
    angles = angles.to(weights.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(weights.dtype), torch.cat((-sin, sin), -1).to(weights.dtype)
