"""Summary statistics of a workload, by which a model is compared with the trace it was made from."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from pdflow.protocol.values import S
from pdflow.workload.request import Request

PERCENTILES = (50, 90, 99)
SCALES_S = (30, 300)


@attrs.frozen
class Statistics:
    """The figures of one workload, by name."""

    figures: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.figures[name]


def statistics(requests: Sequence[Request]) -> Statistics:
    """Compute rates, burstiness, lengths and prefix sharing of requests in order of arrival."""
    at_s = np.array([request.arrival_ns for request in requests]) / S
    prompts = np.array([request.input_tokens for request in requests])
    answers = np.array([request.output_tokens for request in requests])
    figures = {"requests": float(len(requests)), "rate_rps": len(requests) / max(float(at_s[-1]), 1e-9)}
    for scale in SCALES_S:
        figures[f"dispersion of counts, {scale} s"] = _dispersion(at_s, scale)
    for name, values in (("input", prompts), ("output", answers)):
        figures[f"{name} tokens, mean"] = float(values.mean())
        for percent in PERCENTILES:
            figures[f"{name} tokens, p{percent}"] = float(np.percentile(values, percent))
    figures["rank correlation of input and output"] = _rank_correlation(prompts, answers)
    if any(request.prefix for request in requests):
        figures |= _sharing(requests)
    return Statistics(figures)


def compare(model: Sequence[Request], trace: Sequence[Request]) -> str:
    """Return the figures of a model and of its trace side by side, as a text table."""
    ours, theirs = statistics(model).figures, statistics(trace).figures
    lines = [f"{'':40}{'trace':>12}{'model':>12}{'model/trace':>14}"]
    for name, figure in theirs.items():
        ratio = f"{ours[name] / figure:14.2f}" if figure and name in ours else f"{'':14}"
        lines.append(f"{name:40}{_shown(figure):>12}{_shown(ours.get(name, 0.0)):>12}{ratio}")
    return "\n".join(lines)


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


def _dispersion(at_s: np.ndarray, scale_s: float) -> float:
    """Return variance over mean of the counts in windows of `scale_s`: 1 for a Poisson process, 0 of too few."""
    windows = int(at_s[-1] / scale_s)
    if windows < 2:
        return 0.0
    counts = np.bincount((at_s / scale_s).astype(int), minlength=windows)[:windows]
    return float(counts.var() / counts.mean())


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation, which a few long prompts don't decide alone; 0 if either is constant."""
    ranks = [np.searchsorted(np.sort(x), x, side="left") + np.searchsorted(np.sort(x), x, side="right") for x in (a, b)]
    if any(rank.min() == rank.max() for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _sharing(requests: Sequence[Request]) -> dict[str, float]:
    """Compute the hits of an unlimited prefix cache: leading blocks that an earlier request has had, too."""
    last_use: dict[int, int] = {}
    blocks, shared, ages = 0, [], []
    for request in requests:
        hits = 0
        for block in request.prefix:
            if block not in last_use:
                break
            hits += 1
        blocks += len(request.prefix)
        shared.append(hits)
        if hits > 1:
            ages.append((request.arrival_ns - last_use[request.prefix[hits - 1]]) / S)
        last_use.update(dict.fromkeys(request.prefix, request.arrival_ns))
    several = [hits for hits in shared if hits > 1]
    return {
        "prefix blocks hit, unlimited cache": sum(shared) / blocks,
        "requests that hit more than one block": len(several) / len(requests),
        "blocks hit by those, mean": sum(several) / max(1, len(several)),
        "blocks hit by those, p50": float(np.percentile(several or [0], 50)),
        "seconds since the last use, p50": float(np.percentile(ages or [0], 50)),
        "seconds since the last use, p90": float(np.percentile(ages or [0], 90)),
    }
