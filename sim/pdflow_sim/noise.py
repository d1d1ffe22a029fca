"""The draws behind [noise]: tables that are drawn once for a run and used in turn.

An index decides which draw applies: the number of a step, a request or an operation. Results therefore do not depend
on the order in which a run asks, nor on how many steps are planned at once.
"""

from __future__ import annotations

import functools
from typing import Final

from pdflow.cost.step import StepCost
from pdflow.engine.noise import MILLION, StepNoise
from pdflow.scenario.schema.noise import Noise
from pdflow.scenario.schema.scenario import ConstantCost, Pool
from pdflow.workload.rng import Rng, Stream, standard_gamma, standard_normal

DRAWS: Final = 1021
"""A prime: engines that begin at different draws stay apart, and the table fits into a processor's cache."""
STRIDE: Final = 389
"""Between the first draws of two engines."""
OTHER_STRIDE: Final = 577
"""The same for two incarnations of one engine."""
MOST: Final = 3.0
"""Standard deviations at which normal draws end."""


class NoiseTables:
    """The draws of one run."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self.noise = noise
        self.rng = Rng(seed)

    def of_steps(self, pool: Pool, engine: int, generation: int, cost: StepCost) -> StepNoise | None:
        """Return the noise of the steps of one incarnation of the `engine`-th engine, whose blocks begin behind this
        generation; None if they have none."""
        if not self.noise.of_steps(isinstance(pool.cost, ConstantCost)):
            return None
        return StepNoise(self.step_ppm, (engine * STRIDE + generation * OTHER_STRIDE) % DRAWS, cost)

    @functools.cached_property
    def step_ppm(self) -> list[int]:
        """By how much steps differ from the cost model, in millionths."""
        return normal_ppm(self.noise.of_steps(constant_cost=False), self.rng.stream("noise of steps"))

    def of_api_servers(self) -> list[int]:
        """Return by how much requests' times in API servers differ from their mean, in millionths."""
        return gamma_ppm(self.noise.api_server, self.rng.stream("noise of API servers"))

    def of_links(self) -> list[int]:
        """Return by how much operations' latencies differ from their mean, in millionths."""
        return gamma_ppm(self.noise.links, self.rng.stream("noise of links"))


def normal_ppm(share: float, stream: Stream) -> list[int]:
    """Draw deviations of a normal distribution with this standard deviation, in millionths; their mean is 0."""
    draws = [max(-MOST, min(MOST, standard_normal(stream))) for _ in range(DRAWS)]
    return _centred(draws, share)


def gamma_ppm(share: float, stream: Stream) -> list[int]:
    """Draw deviations of a gamma distribution of mean 1 with this standard deviation, in millionths; their mean is 0.

    Empty if there are none.
    """
    if not share:
        return []
    shape = share**-2
    return _centred([standard_gamma(shape, stream) / shape - 1.0 for _ in range(DRAWS)], 1.0)


def _centred(draws: list[float], scale: float) -> list[int]:
    # A table's own mean would be a bias of the whole run.
    mean = sum(draws) / len(draws)
    return [max(1 - MILLION, round((draw - mean) * scale * MILLION)) for draw in draws]
