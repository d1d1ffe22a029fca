"""The figures of `pdflow trace describe`; their layout is in `described.py`.

Requests stream through; what stays of each is three numbers, and the time of the last use of every prefix block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from pdflow.protocol.values import S
from pdflow.workload.fitting.fit_arrivals import Ints, dispersion
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99)
SCALES_S = (1, 10, 60, 300, 3600)
"""Window lengths of dispersion; each needs ten of them in the trace."""
PEAKS_S = (1, 60)
PLOTTED = 64
"""The number of windows in the plot of the rate over time."""


@attrs.define
class _Prefixes:
    """An unlimited prefix cache, in which every request's prefix stays."""

    seen: set[int] = attrs.field(factory=set)
    blocks: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    hit_requests: int = 0

    def pass_through(self, request: Request) -> None:
        hits = 0
        for block in request.prefix:
            if block not in self.seen:
                break
            hits += 1
        self.blocks += len(request.prefix)
        self.hit_blocks += hits
        self.hit_tokens += min(hits * PREFIX_BLOCK_TOKENS, request.input_tokens)
        self.hit_requests += hits > 0
        self.seen.update(request.prefix)


def describe(requests: Iterable[Request], timed: bool) -> dict[str, Any]:
    """Compute the figures of a trace, as plain data with a fixed order of keys. What does not apply is None."""
    at, prompts, answers = array("q"), array("q"), array("q")
    prefixes = _Prefixes()
    classes: dict[str, array[int]] = {}
    for request in requests:
        if request.class_:
            classes.setdefault(request.class_, array("q")).append(len(at))
        at.append(request.arrival_ns)
        prompts.append(request.input_tokens)
        answers.append(request.output_tokens)
        if request.prefix:
            prefixes.pass_through(request)
    inputs, outputs, instants = (np.array(column, dtype=np.int64) for column in (prompts, answers, at))
    return {
        "requests": len(at),
        "arrivals": _arrivals(instants) if timed and len(at) > 1 and at[-1] > at[0] else None,
        "input_tokens": _lengths(inputs),
        "output_tokens": _lengths(outputs),
        "prefix": _sharing(prefixes, len(at), int(inputs.sum())),
        "classes": {name: _class(inputs[chosen], outputs[chosen], len(at)) for name, chosen in sorted(classes.items())}
        or None,
    }


def _arrivals(at: Ints) -> dict[str, Any]:
    at = at - at[0]
    gaps = np.diff(at)
    last = int(at[-1])
    span_ns = last + int(gaps.mean())
    rates = np.bincount(np.minimum(at * PLOTTED // span_ns, PLOTTED - 1), minlength=PLOTTED) * (PLOTTED * S / span_ns)
    return {
        "span_s": last / S,
        "rate_rps": len(at) * S / span_ns,
        "peak_rps": {f"{scale} s": _peak(at, scale) for scale in PEAKS_S if scale * S <= last},
        "gap_cv": float(gaps.std() / gaps.mean()),
        "same_instant": float((gaps == 0).mean()),
        "dispersion": {
            f"{scale} s": dispersion(at, scale * S, span_ns) for scale in SCALES_S if 10 * scale * S <= span_ns
        },
        "over_time": {"window_s": span_ns / PLOTTED / S, "rate_rps": [float(rate) for rate in rates]},
    }


def _peak(at: Ints, scale_s: int) -> float:
    return float(np.unique(at // (scale_s * S), return_counts=True)[1].max() / scale_s)


def _lengths(tokens: Ints) -> dict[str, Any]:
    if not len(tokens):
        return {"total": 0}
    levels = np.percentile(tokens, PERCENTILES)
    return {
        "total": int(tokens.sum()),
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, levels, strict=True)},
        "max": int(tokens.max()),
    }


def _sharing(prefixes: _Prefixes, requests: int, tokens: int) -> dict[str, Any] | None:
    if not prefixes.blocks:
        return None
    return {
        "blocks": prefixes.blocks,
        "distinct_blocks": len(prefixes.seen),
        "hit_blocks": prefixes.hit_blocks / prefixes.blocks,
        "hit_tokens": prefixes.hit_tokens / tokens,
        "requests_with_hits": prefixes.hit_requests / requests,
    }


def _class(inputs: Ints, outputs: Ints, of: int) -> dict[str, Any]:
    return {
        "requests": len(inputs),
        "share": len(inputs) / of,
        "input_tokens": _lengths(inputs),
        "output_tokens": _lengths(outputs),
    }
