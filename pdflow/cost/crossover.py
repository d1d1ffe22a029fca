"""The prompt length from which a prefill engine serves a prompt better than the decode engine that needs it.

The two sides are compared by the time that all requests wait. On D, beside B decoding sequences, n prompt tokens
lengthen the steps that they are in; the request and all B wait for that:

    (B + 1) x (the steps with the prompt - the same steps without it)

On P, which is taken to be idle, only the request waits: for the prompt's own steps there, and for its KV to come. The
step of D that yields the first token is the same either way. Up to the threshold the first of the two is not longer.
The batch's context cancels out, so a threshold depends on B alone: without a bound for an idle D as fast as P, and as B
grows about as many tokens as a step takes for nothing, while it waits for weights to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from pdflow.cost.step import PS_PER_NS, StepCost


@attrs.frozen
class EngineSteps:
    """The step cost of one engine, and the most tokens that one of its steps may have."""

    cost: StepCost
    max_num_batched_tokens: int


@attrs.frozen
class TransferRoute:
    """A prefill engine, and the time in ns that the KV of a number of tokens takes to be moved from it."""

    prefill: EngineSteps
    transfer_ns: Callable[[int], int]


def added_ps(stage: EngineSteps, tokens: int, decodes: int) -> int:
    """Return by how many ps a prompt lengthens the steps that it is in; without decodes, their whole duration."""
    cost = stage.cost
    room = max(1, stage.max_num_batched_tokens - decodes) if cost.chunks else tokens
    alone = cost.decode_step_ps(decodes, 0) if decodes else 0
    time = done = 0
    while done < tokens:
        new = min(room, tokens - done)
        attended = new * done + new * (new + 1) // 2
        time += cost.step_sums_ps(new, attended, decodes, 0) - alone
        time += cost.window_ps(cost.within_window(new, done), 0)
        done += new
    return time


def thresholds(
    decode: EngineSteps, routes: Sequence[TransferRoute], most_decodes: int, most_tokens: int
) -> tuple[int, ...]:
    """Return the longest prompts that stay on D beside 0, 1, ... `most_decodes` sequences; `most_tokens` is the longest
    of all. Of several routes the fastest is the alternative to D."""

    def stays(tokens: int, decodes: int) -> bool:
        elsewhere = min(added_ps(route.prefill, tokens, 0) + route.transfer_ns(tokens) * PS_PER_NS for route in routes)
        return (decodes + 1) * added_ps(decode, tokens, decodes) <= elsewhere

    return tuple(_last(most_tokens, decodes, stays) for decodes in range(most_decodes + 1))


def _last(most: int, decodes: int, stays: Callable[[int, int], bool]) -> int:
    """Return the last length before a prompt is better computed elsewhere: to the token, between the first power of two
    that is and the one before. With small budgets there may be several such lengths."""
    low, high = 0, 1
    while high <= most and stays(high, decodes):
        low, high = high, 2 * high
    if high > most:
        return most if stays(most, decodes) else _between(low, most, decodes, stays)
    return _between(low, high, decodes, stays)


def _between(low: int, high: int, decodes: int, stays: Callable[[int, int], bool]) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if stays(middle, decodes):
            low = middle
        else:
            high = middle
    return low
