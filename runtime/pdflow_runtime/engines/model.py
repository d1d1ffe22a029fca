"""The Llama network over a paged KV cache: embeddings to logits, for a step's tokens of many sequences at once.

**On a CPU a sequence's numbers do not depend on who else is in the step**, nor on how its prompt was cut: not by a bit,
in float32 and bfloat16 with one or two threads on the CPUs it was tried on, so that a prompt computed on one engine and
continued on another gives the tokens of one engine alone, near-ties included. (With three threads, and in float64, the
last bit may differ.) Three habits make it so. Rows are padded to a multiple of `ROWS`: a product with fewer takes other
paths through the library. Attention multiplies each sequence's rows with its own context, in matrices of
its own. And it sums over the context in tiles of a fixed width, from the start on, whatever the context's length
(attention/gathered.py).

On a GPU, cuBLAS chooses among its kernels by the number of rows, so the last bits do depend on who else is in the step.

Sources: transformers' modeling_llama.py, and its model Qwen3, whose roundings it follows (norms and rotations in
float32 or better; on a GPU, compiled functions round once where it rounds after each operation).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (its name everywhere)

from pdflow_runtime.engines.config import ModelConfig
from pdflow_runtime.engines.kv_cache import KvCache
from pdflow_runtime.engines.rows import RowFunctions, padded
from pdflow_runtime.engines.weights import Layer, Weights

# With AMX, oneDNN cuts a bfloat16 product's sums by how many rows there are: a prompt that is computed in other chunks,
# or beside another one, gets other last bits, and P with D other tokens than one engine alone. Read at torch's first
# product. Whoever sets it otherwise has what is set. Set here and not for the whole package: a vLLM that loads pdflow's
# connector computes as it would without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


SCORED_ROWS: Final = 256
"""The rows whose logits are computed at once, where those of a prompt are wanted."""


class Attends(Protocol):
    """Rows of a step that attend together."""

    @property
    def rows(self) -> slice: ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Return the attention of `q` `[rows, heads, head_dim]` over the layer's KV, in the same shape."""


class Scored(Protocol):
    """Rows of a step whose logits score the tokens of a prompt."""

    @property
    def rows(self) -> Tensor: ...

    def take(self, first: int, logits: Tensor) -> None:
        """Take the logits `[some, vocab]` of the rows from the index `first` on."""


@attrs.frozen(kw_only=True, eq=False)
class StepInput:
    """The rows of all sequences in a step, one after the other: `[rows]` each. Padding beyond them is not used."""

    tokens: Tensor
    positions: Tensor
    slot_mapping: Seq[Tensor]
    """The slots that their KV is written to."""
    attending: Seq[Attends]
    logits_indices: Tensor
    """Rows whose logits are wanted."""
    kv_rows: Tensor | None = None
    """For each row, the row whose KV it writes; None: its own."""
    scored: Scored | None = None


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config: Final = config
        self.weights: Final = weights
        self._heads: Final = config.num_attention_heads
        self._kv_heads: Final = config.num_key_value_heads
        self.group: Final = self._heads // self._kv_heads
        self._cos, self._sin = _rotations(config, weights)
        self._do: Final = RowFunctions(weights.device)

    @torch.inference_mode()
    def forward(
        self,
        step: StepInput,
        cache: KvCache,
        written: Callable[[int], None] | None = None,
        wait_for: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the logits `[len(logits_indices), vocab]`; the rows' KV is then in the cache.
        `written` is called with each layer whose KV is, or, on a GPU, will be when what has been queued is done.
        `wait_for` is called with each layer before anything of it is computed, and returns when it may be."""
        weights, eps, do = self.weights, self.config.rms_norm_eps, self._do
        x = F.embedding(padded(step.tokens), weights.embedding)
        positions = padded(step.positions)
        cos, sin = self._cos[positions], self._sin[positions]
        more: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if wait_for is not None:
                wait_for(index)
            if more is None:
                y = do.norm(x, layer.input_norm, eps)
            else:
                x, y = do.added_norm(x, more, layer.input_norm, eps)
            attended = self._attention(index, layer, y, cos, sin, step, cache, written)
            x, y = do.added_norm(x, attended, layer.mlp_norm, eps)
            more = F.linear(do.gated(F.linear(y, layer.gate_up)), layer.down)
        assert more is not None
        x = x + more
        if step.scored is not None:
            # Some rows at a time: the logits of a whole prompt may be larger than the model.
            first = 0
            for rows in torch.split(step.scored.rows, SCORED_ROWS):
                step.scored.take(first, self._logits(x, rows))
                first += len(rows)
        return self._logits(x, step.logits_indices)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        last = self._do.norm(x[padded(rows)], self.weights.norm, self.config.rms_norm_eps)
        return F.linear(last, self.weights.head)[: len(rows)]

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: StepInput,
        cache: KvCache,
        written: Callable[[int], None] | None,
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        rows = len(step.tokens)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, -1)
        if layer.qk_norm is not None:
            qkv = self._do.normed_qk(qkv, layer.qk_norm, self.config.rms_norm_eps)
        q, kv = self._do.rotated_qkv(qkv, cos, sin, heads, kv_heads, step.kv_rows)
        cache.write(index, step.slot_mapping, kv[:rows].view(rows, 2, kv_heads, -1))
        if written is not None:
            written(index)
        return F.linear(_attended(index, q, step.attending).flatten(1), layer.out)


def _attended(layer: int, q: Tensor, attending: Seq[Attends]) -> Tensor:
    if len(attending) == 1 and attending[0].rows == slice(0, len(q)):
        return attending[0].attend(layer, q)
    out = torch.zeros_like(q)
    for batch in attending:
        out[batch.rows] = batch.attend(layer, q[batch.rows])
    return out


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
