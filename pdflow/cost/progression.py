"""Exact arithmetic of back-to-back steps whose durations grow by a constant.

In steady decode every step reads one more token of context per sequence, so step times are an arithmetic progression.
Integers only: a boundary found through floats would, sooner or later, differ from the step-by-step sum by one step
(CORE_SHAPE.md pitfall 2).
"""

from __future__ import annotations

from math import isqrt


def span_of(first: int, delta: int, steps: int) -> int:
    """Duration of `steps` steps, the first of `first`, each next one longer by `delta`."""
    return steps * first + delta * (steps * (steps - 1) // 2)


def steps_to_reach(first: int, delta: int, span: int) -> int:
    """The least k with `span_of(first, delta, k) >= span`; for "strictly after", ask for `span + 1`.

    Raises ValueError if no number of steps is enough, that is if steps take no time at all.
    """
    if span <= 0:
        return 0
    if first > 0:
        # Enough in any case, and nearly always the least: over one gap between arrivals steps hardly grow.
        k = -(-span // first)
        before = k - 1
        if before * first + delta * (before * (before - 1) // 2) < span:
            return k
    elif delta == 0:
        raise ValueError("steps that take no time never reach a positive span")
    b = 2 * first - delta
    k = max(1, (isqrt(b * b + 8 * delta * span) - b) // (2 * delta))
    while span_of(first, delta, k) < span:
        k += 1
    while k > 1 and span_of(first, delta, k - 1) >= span:
        k -= 1
    return k
