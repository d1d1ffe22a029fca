"""The canonical cost of one engine step, in integers of a picosecond, and its closed forms for runs of decode steps.

    t = h0 + h1*D + hp*[P>0] + L(P+D) + a1*P + a2*A + aw*Aw + c0*[D>0] + c1*D + c2*C + cw*Cw (+ hw)

P prefill tokens in the step; A attended positions of these, the sum over chunks of n*prefix + n(n+1)/2; D decoding
sequences; C context tokens that they read. Aw and Cw are the same sums in layers that attend to at most `window`
positions: of each token's positions, and of each sequence's context, no more than that count. L is what every token of
the step passes through together: the linear layers, bound by weights read or by arithmetic, and the all-reduces. hw
comes on top of the first step of an engine that stood still, which is for the engine to know.

With data-parallel attention an engine is several replicas in lockstep: all of the above is of the replica that takes
longest, and E(T), of the tokens of all replicas, is added: experts, and moving tokens to them.

Coefficients are rounded to picoseconds once, when a cost is built; from there everything is exact, so k steps taken at
once last as long as k steps taken one by one. `step_ps` serves the latter: it walks over requests and shares only the
coefficients with the rest. docs/costs.md describes the form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from pdflow.cost.progression import span_of, steps_to_reach

PS_PER_S = 10**12
PS_PER_NS = 1000


@attrs.frozen(kw_only=True)
class LinearTime:
    """L(T): arithmetic that grows with the tokens, never less than reading the weights, plus the all-reduces."""

    slope_ps: int = 0
    floor_ps: int = 0
    allreduce_ps: int = 0
    allreduce_slope_ps: int = 0

    def of(self, tokens: int) -> int:
        if tokens == 0:
            return 0
        compute = self.slope_ps * tokens
        floor = self.floor_ps
        return (compute if compute > floor else floor) + self.allreduce_ps + self.allreduce_slope_ps * tokens


@attrs.frozen(kw_only=True)
class LinearTable:
    """L(T) where no formula is: straight lines between points, and on past the last one as between the last two."""

    tokens: tuple[int, ...]
    """At least two, increasing, the first of them 1."""
    ps: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.tokens) != len(self.ps) or self.tokens[0] != 1:
            raise ValueError("a table of L(T) has at least two points, the first of them at 1 token")
        if any(a >= b for a, b in pairwise(self.tokens)) or any(a > b for a, b in pairwise(self.ps)) or self.ps[0] < 0:
            raise ValueError("a table of L(T) has increasing tokens and times that never decrease")

    def of(self, tokens: int) -> int:
        if tokens == 0:
            return 0
        at = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1)
        low, high = self.tokens[at - 1], self.tokens[at]
        start = self.ps[at - 1]
        return start + (self.ps[at] - start) * (tokens - low) // (high - low)


@attrs.frozen(kw_only=True)
class StepCost:
    """The cost of one engine step. `chunks`: True if a prompt may be cut to fit the token budget (False: always
    whole)."""

    h0: int = 0
    h1: int = 0
    hp: int = 0
    hw: int = 0
    a1: int = 0
    a2: int = 0
    c0: int = 0
    c1: int = 0
    c2: int = 0
    window: int = 0
    """The most positions that `aw` and `cw` are of; 0: no layer has a window, and both are 0."""
    aw: int = 0
    cw: int = 0
    linear: LinearTime | LinearTable = LinearTime()
    experts: LinearTable | None = None
    """E(T), if T are the tokens of all replicas; None: all layers are in `linear`."""
    chunks: bool = True
    provenance: str = ""
    """Where the coefficients come from; printed with every result."""
    rel_error: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    """Metric -> how far off it may be, in words; printed with every result."""

    def step_ps(self, prefill: Sequence[tuple[int, int]], decode_contexts: Sequence[int]) -> int:
        """Return the ps of one step, request by request: (new tokens, prefix) of each chunk, the context of each
        decode. All are of one replica."""
        time, tokens = self._own_step_ps(prefill, decode_contexts)
        return time + self.experts_ps(tokens)

    def experts_ps(self, tokens: int) -> int:
        """Return E(T): what all replicas need for experts in a step of so many tokens."""
        return 0 if self.experts is None else self.experts.of(tokens)

    def lockstep_ps(self, replicas: Sequence[tuple[Sequence[tuple[int, int]], Sequence[int]]]) -> int:
        """Return the ps of one step of all replicas, request by request, as `step_ps` takes those of each."""
        own = [self._own_step_ps(prefill, contexts) for prefill, contexts in replicas]
        slowest = max([time for time, tokens in own if tokens], default=0)
        return slowest + self.experts_ps(sum([tokens for _, tokens in own]))

    def _own_step_ps(self, prefill: Sequence[tuple[int, int]], decode_contexts: Sequence[int]) -> tuple[int, int]:
        """Return the ps of one replica's step without E(T), and its tokens."""
        time = self.h0
        tokens = 0
        for new, prefix in prefill:
            attended = sum(range(prefix + 1, prefix + new + 1))
            time += self.a1 * new + self.a2 * attended
            if self.window:
                time += self.aw * sum([min(each, self.window) for each in range(prefix + 1, prefix + new + 1)])
            tokens += new
        if prefill:
            time += self.hp
        for context in decode_contexts:
            time += self.h1 + self.c1 + self.c2 * context + self.cw * min(context, self.window)
            tokens += 1
        if decode_contexts:
            time += self.c0
        return time + self.linear.of(tokens), tokens

    def within_window(self, new: int, prefix: int) -> int:
        """Return the share of Aw of a chunk of `new` tokens behind `prefix` others."""
        return _positions(prefix + new, self.window) - _positions(prefix, self.window)

    def window_ps(self, attended: int, context: int) -> int:
        """Return the ps that layers with a window add to `step_sums_ps`, from the sums Aw and Cw."""
        return self.aw * attended + self.cw * context

    def step_sums_ps(self, prefill_tokens: int, attended: int, decodes: int, context: int) -> int:
        """Return the ps of one step from the sums P, A, D, C, without layers that have a window; all are of one
        replica."""
        time = self.own_sums_ps(prefill_tokens, attended, decodes, context)
        return time + self.experts_ps(prefill_tokens + decodes)

    def own_sums_ps(self, prefill_tokens: int, attended: int, decodes: int, context: int) -> int:
        """Return the ps of one replica's step without E(T), from its sums P, A, D, C."""
        time = self.h0
        if decodes:
            time += self.c0 + (self.h1 + self.c1) * decodes + self.c2 * context
        if prefill_tokens:
            time += self.hp + self.a1 * prefill_tokens + self.a2 * attended
        return time + self.linear.of(prefill_tokens + decodes)

    def decode_step_ps(self, decodes: int, context: int) -> int:
        """Return the ps of one step of decodes only, in O(1). At constant D the next lasts `c2 * decodes` longer."""
        return self.step_sums_ps(0, 0, decodes, context)

    def run_ps(self, decodes: int, context: int, steps: int) -> int:
        """Return the ps of `steps` decode steps back to back at constant D; C grows by D with each."""
        return span_of(self.decode_step_ps(decodes, context), self.c2 * decodes, steps)

    def steps_until(self, decodes: int, context: int, span_ps: int) -> int:
        """Return the least number of decode steps that last `span_ps` or more; for "longer" ask `span_ps + 1`."""
        return steps_to_reach(self.decode_step_ps(decodes, context), self.c2 * decodes, span_ps)


def _positions(tokens: int, window: int) -> int:
    """Return the sum of min(n, window) over the first `tokens` tokens."""
    whole = min(tokens, window)
    return whole * (whole + 1) // 2 + (tokens - whole) * window


def constant(prefill_s: float = 0.0, decode_step_s: float = 0.0) -> StepCost:
    """Return a cost by which a step that prefills takes `prefill_s`, one that decodes `decode_step_s`, both the sum.

    Neither lengths nor numbers matter, and prompts are never cut, so that queueing theory applies. Both may be 0.
    """
    if prefill_s < 0 or decode_step_s < 0:
        raise ValueError(f"constant cost: prefill_s {prefill_s} and decode_step_s {decode_step_s} must not be negative")
    return StepCost(
        hp=to_ps(prefill_s),
        c0=to_ps(decode_step_s),
        chunks=False,
        provenance=f"constant: {prefill_s} s per prefill step, {decode_step_s} s per decode step",
        rel_error={"all": "not a model of a GPU"},
    )


def to_ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)
