"""Sampling: from logits to tokens, greedy or random, with their logprobs.

What is drawn depends on the logits, the request's seed and how far its answer is: no generator has a state that the
company in a batch, or a preemption, could move. As vLLM does, temperature comes first, then top-k, then top-p, and
logprobs are those of the model, before all of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b

import torch
from torch import Tensor

from pdflow_runtime.engines.job import Logprobs, Sampled, Sampling, TokenRequest
from pdflow_runtime.engines.rows import at_least_float32


def sample(logits: Tensor, token_requests: Seq[TokenRequest]) -> list[Sampled]:
    """Return a token for each row of `[token_requests, vocab]`."""
    likeliest = logits.argmax(-1).tolist()
    if all(each.sampling.temperature == 0 and each.sampling.logprobs is None for each in token_requests):
        return [Sampled(token) for token in likeliest]
    sampled = []
    for row, (token_request, greedy) in enumerate(zip(token_requests, likeliest, strict=True)):
        sampling = token_request.sampling
        token = greedy if sampling.temperature == 0 else _drawn(logits[row], sampling, token_request.index)
        sampled.append(Sampled(token, _logprobs(logits[row], token, sampling.logprobs)))
    return sampled


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) for the answer's `index`th token."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _drawn(logits: Tensor, sampling: Sampling, index: int) -> int:
    scaled = logits.double() / sampling.temperature
    drawn = uniform(sampling.seed, index)
    if not sampling.top_k and sampling.top_p == 1:
        return _at(scaled.softmax(-1).cumsum(-1), drawn)
    if 0 < sampling.top_k < len(scaled):
        scaled, tokens = scaled.topk(sampling.top_k)
    else:
        scaled, tokens = scaled.sort(descending=True, stable=True)
    # From the likeliest down: top-p takes the first ones, the one that reaches p included.
    reached = scaled.softmax(-1).cumsum(-1)
    count = int(torch.searchsorted(reached, sampling.top_p)) + 1
    return int(tokens[_at(reached[:count], drawn)])


def _at(reached: Tensor, drawn: float) -> int:
    """Return the index whose share of the cumulated probabilities `reached` the number `drawn`, from [0, 1), falls
    in."""
    found = int(torch.searchsorted(reached, drawn * float(reached[-1]), right=True))
    return min(found, len(reached) - 1)


def _logprobs(logits: Tensor, token: int, count: int | None) -> Logprobs | None:
    if count is None:
        return None
    every = logits.log_softmax(-1, at_least_float32(logits.dtype))
    values, tokens = every.topk(min(count, len(every)))
    return Logprobs(float(every[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
