"""The API servers of the engines: how long a request takes from the router to an engine's queue.

Whatever comes for a request passes its engine's API server and takes as long as the request itself, so that nothing
overtakes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pdflow.engine.noise import MILLION


class ApiServers:
    """The way of requests to engines. Args:

    http_ns: one HTTP hop.
    of_legs: mean time at the API server of each engine, in ns, by the kind of leg that it gets.
    noise_ppm: by how much requests' times differ from the mean, in millionths, used in turn; empty: they do not.
    """

    def __init__(self, http_ns: int, of_legs: Mapping[str, list[int]], noise_ppm: Sequence[int]) -> None:
        self.http_ns = http_ns
        self.prefill, self.decode = of_legs["prefill"], of_legs["decode"]
        self.noise_ppm = noise_ppm

    def delay_ns(self, leg: Literal["prefill", "decode"], engine: int, request: int) -> int:
        """Return how long it takes from the router to the queue of the engine of this position, for such a leg."""
        mean = (self.prefill if leg == "prefill" else self.decode)[engine]
        ppm = self.noise_ppm
        if not mean or not ppm:
            return self.http_ns + mean
        draw = 2 * request if leg == "prefill" else 2 * request + 1
        return self.http_ns + mean + mean * ppm[draw % len(ppm)] // MILLION
