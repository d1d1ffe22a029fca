"""The fit of a workload model to any trace: quantiles, probabilities and rates, never a row of it.

Fitted are arrivals (`fit_arrivals`), lengths (quantiles of prompts, and of answers in ten groups of prompts) and
conversations: a request returns to the last earlier one that holds its deepest shared prefix block. The trace is cut
off, so the time until a return is estimated by Kaplan and Meier's product limit, which counts a request at risk only
while the trace could still have shown its return.

Left out: classes; prefixes, where fewer than RETURNING requests return to an earlier one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.values import S
from pdflow.workload.fitting.fit_arrivals import LEVELS, Floats, Ints, fit_arrivals, quantiles
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request

GROUPS = 10
FEWEST = 100
"""The fewest requests whose percentiles are meaningful."""
RETURNING = 20
STRONG = 0.3
"""Cramér's V from which a dependence is worth ten numbers instead of one."""


class UnfitError(PdflowError):
    """The trace cannot be modelled; the message says why."""

    exit_code = EXIT_BAD_INPUT


def fit(requests: list[Request]) -> dict[str, Any]:
    """Compute the figures of one trace. Raises UnfitError if it has too few requests."""
    if len(requests) < FEWEST:
        raise UnfitError(f"the trace has {len(requests)} requests, expected at least {FEWEST} for a model")
    at = np.array([r.arrival_ns for r in requests], dtype=np.int64)
    if at[-1] - at[0] < S:
        raise UnfitError("all requests arrive within one second, expected a trace with arrival times")
    arrivals = fit_arrivals(at - at[0])
    parents = returns(requests)
    if parents is None or sum(parent is not None for parent in parents) < RETURNING:
        return {"arrivals": arrivals, "lengths": fit_lengths(requests, requests)}
    first = [request for request, parent in zip(requests, parents, strict=True) if parent is None]
    return {
        "arrivals": arrivals,
        "lengths": fit_lengths(first, requests),
        "conversations": fit_conversations(requests, parents),
    }


def fit_lengths(fresh: list[Request], everyone: list[Request]) -> dict[str, Any]:
    """Compute prompt quantiles, and answer quantiles by prompt group."""
    prompts = np.array([r.input_tokens for r in fresh])
    answers = np.array([r.output_tokens for r in fresh])
    return {
        "longest_input_tokens": max(r.input_tokens for r in everyone),
        "input_tokens": quantiles(prompts),
        "output_tokens": grouped(answers, prompts, GROUPS),
    }


def grouped(values: Floats | Ints, by: Floats | Ints, count: int) -> list[list[float]]:
    """Return quantiles of `values` in groups of equal size, in order of `by`; fewer groups of fewer values."""
    order = np.argsort(by, kind="stable")
    return [quantiles(values[indices]) for indices in np.array_split(order, min(count, len(order)))]


def returns(requests: list[Request]) -> list[int | None] | None:
    """Return for each request the one that it returns to, or None; None for a trace without prefixes."""
    if not any(request.prefix for request in requests):
        return None
    common = common_blocks(requests)
    holder: dict[int, int] = {}
    parents: list[int | None] = []
    for index, request in enumerate(requests):
        shared = shared_blocks(request, holder)
        parents.append(holder[request.prefix[shared - 1]] if shared > common else None)
        holder.update(dict.fromkeys(request.prefix, index))
    return parents


def shared_blocks(request: Request, seen: dict[int, int]) -> int:
    """Count the leading blocks of a request that were seen before."""
    return next((i for i, block in enumerate(request.prefix) if block not in seen), len(request.prefix))


def common_blocks(requests: list[Request]) -> int:
    """Count the leading blocks that nine in ten requests share."""
    depth = 0
    while True:
        blocks = Counter(request.prefix[depth] for request in requests if len(request.prefix) > depth)
        if not blocks or max(blocks.values()) < 0.9 * len(requests):
            return depth
        depth += 1


def fit_conversations(requests: list[Request], parents: list[int | None]) -> dict[str, Any]:
    """Compute the figures of conversations: how requests return, and the tokens that they add."""
    end = requests[-1].arrival_ns
    child = {parent: index for index, parent in reversed([*enumerate(parents)]) if parent is not None}

    def after_s(index: int) -> tuple[float, bool]:
        follower = child.get(index)
        until = end if follower is None else requests[follower].arrival_ns
        return (until - requests[index].arrival_ns) / S, follower is not None

    everyone = range(len(requests))
    first = [i for i in everyone if parents[i] is None]
    later = [i for i in everyone if parents[i] is not None]
    times, reached = product_limit([after_s(i) for i in everyone])
    shape = np.array(reached) / reached[-1]
    kept, edited, added, answers = _continuations(requests, parents)
    return {
        "common_blocks": common_blocks(requests),
        "returns_after_first": _by_prompt(first, [requests[i].input_tokens for i in first], child.keys(), after_s),
        "returns_after_later": _last(product_limit([after_s(i) for i in later])[1]),
        "edited": round(len(kept) / len(later), 4),
        "after_s": [round(float(t), 1) for t in np.interp(LEVELS, [0, *shape], [times[0], *times])],
        "kept": quantiles(kept or [0.0], 3),
        "edited_tokens": quantiles(np.maximum(0, edited or [0])),
        "added_tokens": quantiles(added or [0]),
        "output_tokens": grouped(np.array(answers), np.array(added or [0] * len(answers)), 4),
    }


def _by_prompt(
    first: list[int], prompts: list[int], returned: Container[int], after_s: Callable[[int], tuple[float, bool]]
) -> float | list[float]:
    """Return the probability that a first request is followed by another: one number, or one for each group of prompts
    where that depends strongly on their length, as it does where only long documents are asked about again."""
    groups = [[first[k] for k in indices] for indices in np.array_split(np.argsort(prompts, kind="stable"), GROUPS)]
    seen = np.array([[sum(i in returned for i in group), len(group)] for group in groups if group], dtype=float)
    returning, sizes = seen[:, 0], seen[:, 1]
    share = returning.sum() / sizes.sum()
    if not 0.0 < share < 1.0:
        return _last(product_limit([after_s(i) for i in first])[1])
    chi_squared = float((((returning - sizes * share) ** 2) / (sizes * share * (1 - share))).sum())
    if chi_squared < STRONG**2 * len(first):
        return _last(product_limit([after_s(i) for i in first])[1])
    return [_last(product_limit([after_s(i) for i in group])[1]) for group in groups]


def _last(reached: list[float]) -> float:
    return round(reached[-1], 4) if reached else 0.0


def _continuations(
    requests: list[Request], parents: list[int | None]
) -> tuple[list[float], list[int], list[int], list[int]]:
    """Return the figures of returning requests: of edited prompts the share that is kept and the tokens after it, of
    others the tokens that are new and those of the answer. If all were edited, the answers are theirs."""
    kept, edited, added, answers, to_edited = [], [], [], [], []
    holder: dict[int, int] = {}
    for index, (request, parent) in enumerate(zip(requests, parents, strict=True)):
        if parent is not None:
            last, shared = requests[parent], shared_blocks(request, holder)
            if shared < last.input_tokens // PREFIX_BLOCK_TOKENS:
                kept.append(shared / len(last.prefix))
                edited.append(request.input_tokens - shared * PREFIX_BLOCK_TOKENS)
                to_edited.append(request.output_tokens)
            else:
                added.append(request.input_tokens - last.input_tokens - last.output_tokens)
                answers.append(request.output_tokens)
        holder.update(dict.fromkeys(request.prefix, index))
    return kept, edited, added, answers or to_edited


def product_limit(waits: Sequence[tuple[float, bool]]) -> tuple[list[float], list[float]]:
    """Return Kaplan and Meier's estimate: times of events, and the probability that the event comes by then."""
    every = np.sort([wait for wait, _ in waits])
    seen, counts = np.unique([wait for wait, seen in waits if seen], return_counts=True)
    at_risk = len(every) - np.searchsorted(every, seen, side="left")
    staying, times, reached = 1.0, [], []
    for time, count, risk in zip(seen.tolist(), counts.tolist(), at_risk.tolist(), strict=True):
        staying *= 1 - count / risk
        times.append(time)
        reached.append(1 - staying)
    return times, reached
