"""The keys of a scenario that only the simulator honours, of those that it sets to another value than their default.

[network], [workload] and [slo] describe hardware and traffic: a live cluster has its own. Keys that a live cluster
refuses are in `build.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pdflow.scenario.schema.noise import Noise
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario, RooflineCost
from pdflow.scenario.schema.transfer import Transfer


def live_notes(scenario: ResolvedScenario) -> Iterator[str]:
    """Yield the scenario's notes, and one that lists its keys without effect in a live cluster."""
    yield from scenario.notes
    if keys := simulated_only(scenario):
        yield f"no effect in a live cluster, in simulations only: {', '.join(keys)}"


def simulated_only(scenario: ResolvedScenario) -> list[str]:
    """Return these keys, pools by their names."""
    # A router that weighs a transfer against a prompt's steps computes both from the scenario.
    weighs = scenario.router.disaggregate_above_tokens == "auto"
    keys = ["reads_on"] if weighs else ["connector", "reads_on"]
    found = [f"transfer.{key}" for key in [*keys, "nccl_max_groups"] if _is_set(scenario.transfer, key)]
    found += [f"noise.{field.name}" for field in attrs.fields(Noise) if _is_set(scenario.noise, field.name)]
    if not weighs:
        found += [f"pool.{pool.name}.{key}" for pool in scenario.pools for key in _of_pool(pool)]
    return found


def _of_pool(pool: Pool) -> Iterator[str]:
    for key in ("api_server_s", "api_server_s_per_token"):
        if _is_set(pool, key):
            yield key
    if pool.engine == "torch" and pool.cost != RooflineCost():
        yield "cost"


def _is_set(table: Transfer | Noise | Pool, key: str) -> bool:
    return bool(getattr(table, key) != getattr(attrs.fields(type(table)), key).default)
