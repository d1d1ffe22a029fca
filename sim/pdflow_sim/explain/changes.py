"""The what-ifs of a request: changes of its scenario, one at a time, or the reason why one does not apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.results.explanation.simulated import LeftOut
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario, Role
from pdflow_sim.experiments.edits import faster_network

BLOCK_SIZE: Final = 64
TIMES: Final = 2
"""How many times the bandwidth of all links."""
COUNTERPARTS: Final[Mapping[str, str]] = {
    "nixl-push": "nixl-pull",
    "nixl-pull": "nixl-push",
    "p2p-nccl-put": "p2p-nccl-get",
    "p2p-nccl-put-async": "p2p-nccl-get",
    "p2p-nccl-get": "p2p-nccl-put-async",
}
"""The method that moves KV in the same way, ordered from the other side."""
_MORE: Final[Mapping[Role, str]] = {"prefill": "+1 P", "decode": "+1 D", "aggregated": "+1 engine"}


@attrs.frozen
class ScenarioChange:
    """One change: a short name, what it is in words, and the edits by dotted key."""

    name: str
    text: str
    edits: Mapping[str, Any]


def changes_of(scenario: ResolvedScenario, engines: tuple[str | None, ...]) -> Iterator[ScenarioChange | LeftOut]:
    """Yield the what-ifs of a request that these engines served."""
    roles = {pool.role for pool in scenario.pools}
    moves = {"prefill", "decode"} <= roles
    yield _other_method(scenario) if moves else LeftOut("pull", "aggregated engines transfer no KV")
    if any(pool.block_size != BLOCK_SIZE for pool in scenario.pools):
        sizes = {f"pool.{pool.name}.block_size": BLOCK_SIZE for pool in scenario.pools}
        yield ScenarioChange(f"block {BLOCK_SIZE}", f"block_size = {BLOCK_SIZE} in all pools", sizes)
    else:
        yield LeftOut(f"block {BLOCK_SIZE}", f"block_size is {BLOCK_SIZE} already")
    name = f"{TIMES} x link"
    if not moves:
        yield LeftOut(name, "aggregated engines transfer no KV")
    elif faster := faster_network(scenario.network, TIMES):
        yield ScenarioChange(name, f"{TIMES} times the bandwidth of every NIC and link", faster)
    else:
        yield LeftOut(name, "no NIC and no link has a limit")
    for role, more in _MORE.items():
        if role in roles:
            pool = _pool(scenario, role, engines)
            edits = {f"pool.{pool.name}.replicas": pool.replicas + 1}
            yield ScenarioChange(more, f"pool.{pool.name}.replicas = {pool.replicas + 1}", edits)
        elif role != "aggregated":
            yield LeftOut(more, f"there is no {role} pool")


def _other_method(scenario: ResolvedScenario) -> ScenarioChange | LeftOut:
    method = scenario.transfer.method
    pulls = METHODS[method].pulls
    name = "push" if pulls else "pull"
    other = COUNTERPARTS.get(method)
    if other is None:
        return LeftOut(name, f"{method} has no counterpart that {'pushes' if pulls else 'pulls'}")
    return ScenarioChange(name, f"transfer.method = {other}", {"transfer.method": other})


def _pool(scenario: ResolvedScenario, role: Role, engines: tuple[str | None, ...]) -> Pool:
    """Return the pool of that role that served the request, or else the first one."""
    pools = [pool for pool in scenario.pools if pool.role == role]
    names = {name.rpartition("-")[0] for name in engines if name is not None}
    return next((pool for pool in pools if pool.name in names), pools[0])
