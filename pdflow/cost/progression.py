"""Exact arithmetic of back-to-back steps whose durations grow by a constant.

In steady decode every step reads one more token of context per sequence, so step times are an arithmetic progression.
Integers only: a boundary found through floats would, sooner or later, differ from the step-by-step sum by one step.
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
    if delta == 0:
        if first == 0:
            raise ValueError("steps that take no time never reach a positive span")
        return -(-span // first)
    b = 2 * first - delta
    k = max(1, (isqrt(b * b + 8 * delta * span) - b) // (2 * delta))
    while span_of(first, delta, k) < span:
        k += 1
    while k > 1 and span_of(first, delta, k - 1) >= span:
        k -= 1
    return k


def boundary_after(start: int, first: int, delta: int, instant: int) -> tuple[int, int]:
    """(k, end of the k-th step) for the first step that ends strictly after an instant, of steps that begin at `start`.

    At least one step. Raises ValueError if there is none, that is if steps take no time at all.
    """
    gone = instant - start
    if first > 0 and gone >= 0:
        # No more than this many steps are over, and nearly always no fewer: between two arrivals steps hardly grow.
        over = gone // first
        span = over * first + delta * (over * (over - 1) // 2)
        if span <= gone:
            return over + 1, start + span + first + delta * over
    steps = steps_to_reach(first, delta, gone + 1) or 1
    return steps, start + span_of(first, delta, steps)
