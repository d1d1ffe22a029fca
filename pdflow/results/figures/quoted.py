"""The latencies and percentiles that `vllm bench serve` reports: --percentile-metrics and --metric-percentiles.

Keys and their order are those of vllm/benchmarks/serve.py (`process_one_metric`): of each latency the mean, the median,
the deviation and its percentiles, whole ones without decimals. Of nothing, every figure is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.figures import spread
from pdflow.results.records import IntColumn

LATENCIES: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")


@attrs.frozen
class Quoted:
    """The latencies to report, some of LATENCIES, and their percentiles, which are exact."""

    latencies: tuple[str, ...] = LATENCIES[:3]
    percents: tuple[Fraction, ...] = (Fraction(99),)

    def figures(self, samples_ns: Mapping[str, IntColumn | npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return the figures in ms, by vLLM's keys; `samples_ns` has the samples of each latency by its name."""
        found: dict[str, float] = {}
        for name in self.latencies:
            samples = samples_ns[name]
            whole = spread.of_floats(samples.astype(np.float64))
            found[f"mean_{name}_ms"] = whole.mean_ms
            found[f"median_{name}_ms"] = whole.p50_ms
            found[f"std_{name}_ms"] = whole.std_ms
            values = spread.percentiles(samples, self.percents) or [0.0] * len(self.percents)
            for percent, value in zip(self.percents, values, strict=True):
                found[f"p{_percent_name(percent)}_{name}_ms"] = value / spread.NS_PER_MS
        return found


def _percent_name(percent: Fraction) -> str:
    return str(int(percent)) if percent.denominator == 1 else str(float(percent))
