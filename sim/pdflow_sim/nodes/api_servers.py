"""The API servers of the engines: how long a request takes from the router to an engine's queue.

Whatever comes for a request passes its engine's API server and takes as long as the request itself, so that nothing
overtakes it. Both legs of a request have the same draw, since they tokenise the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdflow.engine.noise import varied
from pdflow.scenario.costs.step_costs import ApiServerTime


class ApiServers:
    """The API servers of all engines. Args:

    http_ns: one HTTP hop.
    of_legs: the mean time at the API server of each engine, by the kind of leg that it gets.
    noise_ppm: by how much requests' times differ from the mean, in millionths, used in turn; empty: they do not.
    """

    def __init__(self, http_ns: int, of_legs: Mapping[str, list[ApiServerTime]], noise_ppm: Sequence[int]) -> None:
        self.http_ns = http_ns
        self.of_legs = of_legs
        self.noise_ppm = noise_ppm

    def delay_ns(self, leg: str, engine: int, request: int, tokens: int) -> int:
        """Return how long it takes from the router to the queue of the engine of this position, for a request whose
        prompt has so many tokens."""
        mean, ppm = self.of_legs[leg][engine].ns(tokens), self.noise_ppm
        return self.http_ns + (varied(mean, ppm, request) if ppm else mean)
