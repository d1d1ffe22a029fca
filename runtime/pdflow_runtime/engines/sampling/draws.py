"""Sampling: from logits to tokens, greedy or random, with their logprobs.

What is drawn depends on the logits, the request's seed and how far its answer is: no generator has a state that the
company in a batch, or a preemption, could move. As vLLM does, constraints come first, then temperature, min-p, top-k
and top-p, and logprobs are those of the model, before all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from pdflow_runtime.engines.job import Sampled, Sampling, TokenRequest
from pdflow_runtime.engines.rows import at_least_float32
from pdflow_runtime.engines.sampling.constraints import Constraints, History, forbidden
from pdflow_runtime.engines.sampling.logprobs import Logprobs, PromptScores


def sample(logits: Tensor, token_requests: Seq[TokenRequest]) -> list[Sampled]:
    """Return a token for each row of `[token_requests, vocab]`."""
    likeliest = logits.argmax(-1).tolist()
    if all(each.sampling.is_plain for each in token_requests):
        return [Sampled(token) for token in likeliest]
    sampled = []
    for row, (token_request, greedy) in enumerate(zip(token_requests, likeliest, strict=True)):
        sampling, constrained = token_request.sampling, logits[row]
        if sampling.constraints is not None and token_request.history is not None:
            constrained = _constrained(constrained, sampling.constraints, token_request.history)
            greedy = int(constrained.argmax())
        token = greedy if sampling.temperature == 0 else _drawn(constrained, sampling, token_request.index)
        sampled.append(Sampled(token, _logprobs(logits[row], token, sampling.logprobs)))
    return sampled


def score(logits: Tensor, rows: Seq[tuple[PromptScores, int]]) -> None:
    """Write the logprobs of tokens of prompts: row by row of `[rows, vocab]`, a prompt and the position whose logits
    these are."""
    every = logits.log_softmax(-1, at_least_float32(logits.dtype))
    following = [scores.tokens[position + 1] for scores, position in rows]
    chosen = every.gather(1, torch.tensor(following, device=every.device)[:, None])[:, 0].tolist()
    values, tokens = every.topk(min(max(scores.top for scores, _ in rows), every.shape[1]))
    for (scores, position), logprob, ids, likeliest in zip(rows, chosen, tokens.tolist(), values.tolist(), strict=True):
        top = tuple(zip(ids, likeliest, strict=True))[: scores.top]
        scores.logprobs[position + 1] = Logprobs(logprob, top)


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) for the answer's `index`th token."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _constrained(logits: Tensor, constraints: Constraints, history: History) -> Tensor:
    """Return a copy of the logits `[vocab]` as the request's constraints change them."""
    device = logits.device
    logits = logits.to(at_least_float32(logits.dtype), copy=True)
    fixed = _fixed(constraints, len(logits), device)
    if fixed.excluded is not None:
        logits.masked_fill_(fixed.excluded, -torch.inf)
    if never := forbidden(constraints, history, len(logits)):
        logits[torch.tensor(sorted(never), device=device)] = -torch.inf
    if fixed.biases is not None:
        logits[fixed.biased] += fixed.biases.to(logits.dtype)
    if constraints.repetition_penalty != 1:
        # A token that came twice is written twice, with the same value.
        seen = torch.tensor(history.tokens, dtype=torch.long, device=device)
        found = logits[seen]
        penalty = constraints.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if constraints.frequency_penalty or constraints.presence_penalty:
        answer = torch.tensor(history.answer, dtype=torch.long, device=device)
        counts = torch.bincount(answer, minlength=len(logits)).to(logits.dtype)
        logits -= constraints.frequency_penalty * counts + constraints.presence_penalty * (counts > 0)
    return logits


class _Fixed(NamedTuple):
    """The rules that are the same for all tokens of an answer, as tensors."""

    excluded: Tensor | None
    """True for tokens that are not allowed `[vocab]`; None if all are."""
    biased: Tensor | None
    biases: Tensor | None


def _fixed(constraints: Constraints, vocab_size: int, device: torch.device) -> _Fixed:
    """Return these rules. They are made once for a request: a list of a whole vocabulary takes milliseconds."""
    found: _Fixed | None = constraints.prepared.get(str(device))
    if found is None:
        excluded = biased = biases = None
        if constraints.allowed is not None:
            excluded = torch.ones(vocab_size, dtype=torch.bool)
            flags = torch.frombuffer(bytearray(constraints.allowed_flags), dtype=torch.bool)[:vocab_size]
            excluded[: len(flags)] = ~flags
            excluded = excluded.to(device)
        if constraints.logit_bias:
            tokens, values = zip(*constraints.logit_bias, strict=True)
            biased = torch.tensor(tokens, device=device)
            biases = torch.tensor(values, dtype=torch.float64).to(device)
        found = constraints.prepared[str(device)] = _Fixed(excluded, biased, biases)
    return found


def _drawn(logits: Tensor, sampling: Sampling, index: int) -> int:
    scaled = logits.double() / sampling.temperature
    drawn = uniform(sampling.seed, index)
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return _at(scaled.softmax(-1).cumsum(-1), drawn)
    if 0 < sampling.top_k < len(scaled):
        scaled, tokens = scaled.topk(sampling.top_k)
    else:
        scaled, tokens = scaled.sort(descending=True, stable=True)
    if sampling.min_p:
        # From the likeliest down, those that are likely enough.
        scaled = scaled[: int((scaled >= scaled[0] + math.log(sampling.min_p)).sum())]
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
