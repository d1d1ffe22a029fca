"""The schema of [noise]: how much durations vary from one time to the next.

Means are the cost model's and the network's. How the defaults were fitted is in docs/simulator.md. The other tables,
and how to read these classes, are in `scenario.py`.
"""

from __future__ import annotations

from typing import Final

import attrs
from attrs import field

from pdflow.scenario.schema.fields import Bound, field_doc

SPREAD = Bound(at_least=0, at_most=0.3)
"""Normal draws end at three standard deviations: a duration stays above 0."""
SHARE = Bound(at_least=0, at_most=1)
STEP_NOISE: Final = 0.05
"""Standard deviation of a step's duration, as a share: `python -m benchmarks.step_noise` says what real runs have."""


@attrs.frozen(kw_only=True)
class Noise:
    """[noise]: standard deviations of durations, as shares of their means; 0: they never vary."""

    steps: float | None = field(
        default=None,
        metadata=field_doc("of the duration of a step; default: 0.05, or 0 for pools with cost model constant", SPREAD),
    )
    api_server: float = field(default=0.1, metadata=field_doc("of a request's time in the API server", SHARE))
    links: float = field(default=0.4, metadata=field_doc("of the latency of a transfer", SHARE))

    def of_steps(self, constant_cost: bool) -> float:
        """Return the standard deviation of steps, of a pool with constant costs or another."""
        if self.steps is None:
            return 0.0 if constant_cost else STEP_NOISE
        return self.steps


NO_NOISE = Noise(steps=0.0, api_server=0.0, links=0.0)
