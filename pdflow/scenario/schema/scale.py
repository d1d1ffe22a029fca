"""The schema of [[scale]]: how many engines of a pool serve, from an instant on or by load.

The other tables, and how to read this class, are in `scenario.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, DELAY, ENGINES, NOT_EMPTY, POSITIVE, TIMER, field_doc


@attrs.frozen(kw_only=True)
class Scale:
    """[[scale]]: how many of a pool's engines serve, at an instant (at_s, replicas) or by load (target_queue)."""

    pool: str = field(metadata=field_doc("name of the pool", NOT_EMPTY))
    at_s: float | None = field(default=None, metadata=field_doc("scheduled: time of the change", DELAY))
    replicas: int | None = field(default=None, metadata=field_doc("scheduled: number of engines from at_s on", ENGINES))
    target_queue: float | None = field(
        default=None,
        metadata=field_doc("by load: target for the mean number of open legs per engine", POSITIVE),
    )
    min_replicas: int = field(default=1, metadata=field_doc("by load: minimum number of engines", AT_LEAST_ONE))
    max_replicas: int | None = field(default=None, metadata=field_doc("by load: maximum number of engines", ENGINES))
    every_s: float = field(default=1.0, metadata=field_doc("by load: interval between two decisions", TIMER))
    calm_s: float = field(
        default=60.0, metadata=field_doc("by load: an engine stops after fewer have been enough for this long", DELAY)
    )
    start_lag_s: float = field(
        default=0.0, metadata=field_doc("time from the decision until a new engine accepts legs", DELAY)
    )

    def __attrs_post_init__(self) -> None:
        scheduled = self.at_s is not None and self.replicas is not None
        loaded = self.target_queue is not None and self.max_replicas is not None
        keys = [key for key in ("at_s", "replicas", "target_queue", "max_replicas") if getattr(self, key) is not None]
        if scheduled == loaded or len(keys) != 2:
            given = " and ".join(keys) if len(keys) < 3 else f"{', '.join(keys[:-1])} and {keys[-1]}"
            expected = "at_s and replicas (scheduled), or target_queue and max_replicas (by load)"
            raise ValueError(f"sets {given or 'none of its keys'}, expected {expected}")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, expected at least min_replicas, {self.min_replicas}"
            )

    @property
    def most(self) -> int:
        """The most engines that this table can ask for."""
        return self.replicas or self.max_replicas or 0

    def __str__(self) -> str:
        lag = f", {self.start_lag_s:g} s to start" if self.start_lag_s else ""
        if self.at_s is not None:
            return f"{self.pool}: {self.replicas} from {self.at_s:g} s on{lag}"
        bounds = f"{self.min_replicas} to {self.max_replicas}"
        return f"{self.pool}: {bounds}, by load, for {self.target_queue:g} open legs each{lag}"


def most_engines(pool: str, replicas: int, scales: Iterable[Scale]) -> int:
    """Return the most engines that a pool with these replicas at the start ever has."""
    return max(replicas, *(scale.most for scale in scales if scale.pool == pool), 0)
