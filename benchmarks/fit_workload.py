"""Computes the bundled workload models from published traces: python benchmarks/fit_workload.py ../shared/data/traces

Writes pdflow/workload/models/*.toml: quantiles, probabilities and rates, never a row of a trace. Fitted are

- lengths: quantiles of prompts, and of answers in ten groups of prompts;
- arrivals: the index of dispersion of counts (variance / mean) on scales from 10 ms to 5 min. A rate whose levels are
  redrawn every w seconds has an autocovariance that falls from v to 0 over w; window lengths and variances are those
  whose dispersion is nearest the trace's in least squares of logarithms;
- conversations: a request returns to the last earlier one that holds its deepest shared prefix block. The trace is cut
  off, so the time until a return is estimated by Kaplan and Meier's product limit, which counts a request at risk only
  while the trace could still have shown its return.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import gammaincinv

from pdflow.workload.readers import read_trace
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request
from pdflow.workload.traces import TraceFormat

LEVELS = (
    *(0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85),
    *(0.9, 0.925, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995, 1.0),
)
SCALES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GROUPS = 10
MODELS = Path(__file__).resolve().parents[1] / "pdflow" / "workload" / "models"

MOONCAKE = {
    "title": "Mooncake conversation trace, its first 2,000 requests",
    "url": "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces",
    "commit": "3b5a5941",
    "licence": "Apache-2.0",
    "cite": "Qin et al., Mooncake: Trading More Storage for Less Computation, FAST '25",
}
AZURE = {
    "url": "https://github.com/Azure/AzurePublicDataset",
    "commit": "b469a113",
    "licence": "CC-BY 4.0",
    "cite": "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA '24",
}
TRACES: dict[str, tuple[str, TraceFormat, dict[str, str]]] = {
    "mooncake-conversation": ("mooncake_conversation_first2000.jsonl", "mooncake", MOONCAKE),
    "azure-code": ("azure2023_code_full.csv", "azure", {"title": "Azure LLM inference trace 2023, code", **AZURE}),
    "azure-conv": (
        "azure2023_conv_full.csv",
        "azure",
        {"title": "Azure LLM inference trace 2023, conversation", **AZURE},
    ),
}


def main(folder: Path) -> None:
    """Fit and write all models."""
    for name, (file, form, source) in TRACES.items():
        requests = list(read_trace(folder / file, form))
        (MODELS / f"{name}.toml").write_text(toml(name, file, source, fit(requests)), encoding="utf-8")
        print(f"{name}: {len(requests)} requests")


def fit(requests: list[Request]) -> dict[str, Any]:
    """The figures of one trace."""
    arrivals = fit_arrivals(np.array([r.arrival_ns for r in requests]) / 1e9)
    parents = returns(requests)
    if parents is None:
        return {"arrivals": arrivals, "lengths": fit_lengths(requests, requests)}
    first = [request for request, parent in zip(requests, parents, strict=True) if parent is None]
    return {
        "arrivals": arrivals,
        "lengths": fit_lengths(first, requests),
        "conversations": fit_conversations(requests, parents),
    }


def quantiles(values: Sequence[float] | np.ndarray, digits: int = 0) -> list[float]:
    """A sample's values at LEVELS, rounded."""
    rounded = np.round(np.quantile(np.asarray(values, dtype=float), LEVELS), digits)
    return [float(value) if digits else int(value) for value in rounded]


def fit_lengths(fresh: list[Request], everyone: list[Request]) -> dict[str, Any]:
    """Prompt quantiles, and answer quantiles by prompt group."""
    prompts = np.array([r.input_tokens for r in fresh])
    answers = np.array([r.output_tokens for r in fresh])
    return {
        "longest_input_tokens": max(r.input_tokens for r in everyone),
        "input_tokens": quantiles(prompts),
        "output_tokens": grouped(answers, prompts, GROUPS),
    }


def grouped(values: np.ndarray, by: np.ndarray, count: int) -> list[list[float]]:
    """Quantiles of `values` in groups of equal size, in order of `by`."""
    order = np.argsort(by, kind="stable")
    return [quantiles(values[part]) for part in np.array_split(order, count)]


def fit_arrivals(at: np.ndarray) -> dict[str, Any]:
    """Rate, step, batches and levels."""
    gaps = np.diff(at)
    together = float((gaps == 0).mean())
    step_s = float(np.median(gaps[gaps > 0.5])) if together > 0.5 else 0.0  # one clock step for most requests
    span = at[-1] + (step_s or gaps.mean())
    rate = float(len(at) / span)
    scales = [scale for scale in SCALES_S if scale <= span / 10]
    if step_s:  # whole steps, and bins that begin between two of them
        scales = sorted({max(1, round(scale / step_s)) * step_s for scale in scales})
        at = at + step_s / 2
    measured = np.array([dispersion(at, scale, span) for scale in scales])
    # Arrivals within a few ms of one another are batches: geometric ones of continuation b have dispersion
    # (1 + b) / (1 - b), and the finest scale sees nothing else.
    batch = 0.0 if step_s else max(0.0, (measured[0] - 1) / (measured[0] + 1))
    batch = float(batch) if batch > 0.05 else 0.0
    close = gaps[gaps < 0.01]
    levels = fit_levels(np.array(scales), measured, rate, (1 + batch) / (1 - batch), step_s)
    return {
        "rate_rps": round(rate, 4),
        "step_ns": round(step_s * 1e9),
        "batch_probability": round(batch, 4),
        "batch_gap_s": quantiles(close, 6) if batch else [0.0] * len(LEVELS),
        "level": [
            {"window_s": window, "relative_rate": gamma_quantiles(variance)} for window, variance in levels if variance
        ],
    }


def dispersion(at: np.ndarray, scale: float, span: float) -> float:
    """Variance over mean of counts in windows of `scale` seconds."""
    counts = np.histogram(at, bins=np.arange(0, span // scale * scale + scale / 2, scale))[0]
    return float(counts.var() / counts.mean())


def fit_levels(
    scales: np.ndarray, measured: np.ndarray, rate: float, floor: float, step_s: float
) -> list[tuple[float, float]]:
    """(window, variance) of the two levels whose product has a dispersion nearest the measured one."""
    best: tuple[float, list[tuple[float, float]]] = (np.inf, [])
    windows = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
    for fast, slow in product(windows, windows):
        if fast >= slow or fast < step_s:
            continue

        def miss(logs: np.ndarray, pair: tuple[float, float] = (fast, slow)) -> float:
            model = floor + rate * np.array([spread(scale, pair, np.exp(logs)) for scale in scales])
            return float(np.sum((np.log(model) - np.log(measured)) ** 2))

        found = minimize(miss, x0=np.log([0.05, 0.05]), method="Nelder-Mead", bounds=[(-12, 1.5)] * 2)
        if found.fun < best[0] - 1e-9:
            variances = [float(v) if v > 1e-4 else 0.0 for v in np.exp(found.x)]
            best = (found.fun, [(slow, variances[1]), (fast, variances[0])])
    return best[1]


def spread(scale: float, windows: tuple[float, ...], variances: np.ndarray) -> float:
    """Variance of the relative rate, averaged over `scale` seconds, times `scale`."""
    lag = (np.arange(400) + 0.5) / 400 * scale
    together = np.ones_like(lag)
    for window, variance in zip(windows, variances, strict=True):
        together *= 1 + variance * np.maximum(0, 1 - lag / window)
    return float(2 * np.mean((1 - lag / scale) * (together - 1)) * scale)


def gamma_quantiles(variance: float) -> list[float]:
    """A gamma distribution of mean 1, cut at its 99.9 % point and scaled back to mean 1 as straight lines have it."""
    shape = 1 / variance
    values = np.array([gammaincinv(shape, min(level, 0.999)) / shape for level in LEVELS])
    levels = np.array(LEVELS)
    mean = np.sum(np.diff(levels) * (values[1:] + values[:-1]) / 2)
    return [float(value) for value in np.round(values / mean, 5)]


def returns(requests: list[Request]) -> list[int | None] | None:
    """For each request the one that it returns to, or None; None for a trace without prefixes."""
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
    """Leading blocks of a request that were seen before."""
    return next((i for i, block in enumerate(request.prefix) if block not in seen), len(request.prefix))


def common_blocks(requests: list[Request]) -> int:
    """Leading blocks that nine in ten requests share."""
    depth = 0
    while True:
        blocks = [request.prefix[depth] for request in requests if len(request.prefix) > depth]
        if not blocks or blocks.count(max(set(blocks), key=blocks.count)) < 0.9 * len(requests):
            return depth
        depth += 1


def fit_conversations(requests: list[Request], parents: list[int | None]) -> dict[str, Any]:
    """How requests come back, and with what."""
    end = requests[-1].arrival_ns
    child = {parent: index for index, parent in reversed([*enumerate(parents)]) if parent is not None}

    def after_s(index: int) -> tuple[float, bool]:
        follower = child.get(index)
        until = end if follower is None else requests[follower].arrival_ns
        return (until - requests[index].arrival_ns) / 1e9, follower is not None

    everyone = range(len(requests))
    first = [i for i in everyone if parents[i] is None]
    later = [i for i in everyone if parents[i] is not None]
    times, reached = product_limit([after_s(i) for i in everyone])
    shape = np.array(reached) / reached[-1]
    kept, edited, added, answers = [], [], [], []
    holder: dict[int, int] = {}
    for index, (request, parent) in enumerate(zip(requests, parents, strict=True)):
        if parent is not None:
            last, shared = requests[parent], shared_blocks(request, holder)
            if shared < last.input_tokens // PREFIX_BLOCK_TOKENS:
                kept.append(shared / len(last.prefix))
                edited.append(request.input_tokens - shared * PREFIX_BLOCK_TOKENS)
            else:
                added.append(request.input_tokens - last.input_tokens - last.output_tokens)
                answers.append(request.output_tokens)
        holder.update(dict.fromkeys(request.prefix, index))
    return {
        "common_blocks": common_blocks(requests),
        "returns_after_first": round(product_limit([after_s(i) for i in first])[1][-1], 4),
        "returns_after_later": round(product_limit([after_s(i) for i in later])[1][-1], 4),
        "edited": round(len(kept) / len(later), 4),
        "after_s": [round(float(t), 1) for t in np.interp(LEVELS, [0, *shape], [times[0], *times])],
        "kept": quantiles(kept, 3),
        "edited_tokens": quantiles(np.maximum(0, edited)),
        "added_tokens": quantiles(added),
        "output_tokens": grouped(np.array(answers), np.array(added), 4),
    }


def product_limit(waits: list[tuple[float, bool]]) -> tuple[list[float], list[float]]:
    """Kaplan and Meier's estimate: times of events, and the probability that the event comes by then."""
    staying, times, reached = 1.0, [], []
    for time in sorted({wait for wait, seen in waits if seen}):
        at_risk = sum(wait >= time for wait, _ in waits)
        staying *= 1 - sum(seen and wait == time for wait, seen in waits) / at_risk
        times.append(time)
        reached.append(1 - staying)
    return times, reached


def toml(name: str, file: str, source: dict[str, str], figures: dict[str, Any]) -> str:
    """A model file."""
    lines = [
        f"# Workload model {name}: figures about a trace, no row of it.",
        f"# Computed by benchmarks/fit_workload.py from {file}.",
        f"quantile_levels = {row(LEVELS)}",
        "",
        "[source]",
        *(f'{key} = "{value}"' for key, value in source.items()),
    ]
    for table, content in figures.items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {row(value)}" for key, value in content.items() if key != "level"]
        for level in content.get("level", []):
            lines += ["", f"[[{table}.level]]", *(f"{key} = {row(value)}" for key, value in level.items())]
        if "level" in content and not content["level"]:
            lines.append("level = []")
    return "\n".join(lines) + "\n"


def row(value: Any) -> str:
    """A number or a nested list of numbers, wrapped."""
    if not isinstance(value, (list, tuple)):
        return repr(value)
    if value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {row(inner)},\n" for inner in value) + "]"
    return (
        "["
        + ", ".join(f"{number:g}" if isinstance(number, float) and number == 0 else repr(number) for number in value)
        + "]"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
