"""A design: the engines of a cluster and the options that they run with, as edits of the scenario that is planned.

A design knows nothing of the traffic. Its pools are the scenario's own with other GPUs, sizes and numbers, so that what
the file says of an engine (memory share, API server, noise) holds in every design; a key that depends on the size of
an engine, such as `kv_tokens`, holds where that is the file's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final, TypeAlias

import attrs

from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import Pool, Role
from pdflow_sim.plan.options import OPTIONS, Kind

SIZED_KEYS: Final = ("kv_tokens",)
"""Keys of a pool that are of engines of one size and GPU. Costs are kept: the loader refuses those of other engines."""
_REPLACED_KEYS: Final = ("name", "role", "replicas", "gpu", "tp", "pp", "dp_attention", "ep", "devices")


@attrs.frozen(order=True)
class EngineShape:
    """The GPUs of one engine: their type, and how they share the model."""

    gpu: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    named: bool = attrs.field(default=False, eq=False, order=False)
    """Whether its text says which GPUs they are: where a plan has several types."""

    @property
    def gpus(self) -> int:
        """The GPUs of one engine."""
        return self.tp * self.dp

    def __str__(self) -> str:
        spread = f" DP{self.dp}" if self.dp > 1 else ""
        experts = f" EP{self.ep}" if self.ep > 1 else ""
        return f"TP{self.tp}{spread}{experts}" + (f" {self.gpu}" if self.named else "")


@attrs.frozen(order=True)
class PoolShape:
    """A number of engines of one role."""

    role: Role
    engine: EngineShape
    replicas: int

    @property
    def gpus(self) -> int:
        """The GPUs of the pool."""
        return self.engine.gpus * self.replicas

    def __str__(self) -> str:
        letter = {"prefill": "P", "decode": "D", "aggregated": "x"}[self.role]
        return f"{self.replicas}{letter} {self.engine}"


Options: TypeAlias = tuple[tuple[str, Any], ...]
"""Values of a design's options by the key of the search (`options.OPTIONS`), sorted by key."""


@attrs.frozen
class Design:
    """A cluster: its pools, and the options that differ from the scenario's own."""

    pools: tuple[PoolShape, ...]
    options: Options = ()

    @property
    def kind(self) -> Kind:
        """Whether one engine computes prompts and decodes, or two."""
        return "aggregated" if any(pool.role == "aggregated" for pool in self.pools) else "disaggregated"

    @property
    def gpus(self) -> int:
        """The GPUs of the cluster."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def gpu_counts(self) -> Mapping[str, int]:
        """The number of GPUs of each type."""
        counts: dict[str, int] = {}
        for pool in self.pools:
            counts[pool.engine.gpu] = counts.get(pool.engine.gpu, 0) + pool.gpus
        return counts

    def of_role(self, role: Role) -> PoolShape | None:
        """Return the pool of a role, None if there is none."""
        return next((pool for pool in self.pools if pool.role == role), None)

    def with_option(self, key: str, value: Any) -> Design:
        """Return the same cluster with another value of one option."""
        return attrs.evolve(self, options=tuple(sorted({**dict(self.options), key: value}.items())))

    def without_options(self) -> Design:
        """Return the same cluster with the scenario's own options."""
        return attrs.evolve(self, options=())

    def resized(self, role: Role, more: int) -> Design:
        """Return the design with so many more engines of a role."""
        pools = [attrs.evolve(p, replicas=p.replicas + more) if p.role == role else p for p in self.pools]
        return attrs.evolve(self, pools=tuple(pools))

    @property
    def shape_text(self) -> str:
        """The cluster in words, as in "3P TP1 + 5D TP1"."""
        return " + ".join(str(pool) for pool in self.pools)

    @property
    def text(self) -> str:
        """The cluster and its options in words."""
        return ", ".join([self.shape_text, *(f"{key} {_shown(value)}" for key, value in self.options)])

    def __str__(self) -> str:
        return self.text


OWN: Final = Design(())
"""The scenario's own cluster, whatever its pools are: no edits."""


def _shown(value: Any) -> str:
    return "off" if value is None else str(value)


class DesignEditor:
    """Turns designs into edits of one scenario, as `Scenario.with_` takes them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        document = scenario.document()
        self._tables: list[dict[str, Any]] = document["pool"]
        self._has_paths = bool(document.get("network", {}).get("paths"))
        self._has_faults = "fault" in document or "faults" in document
        self._has_scales = "scale" in document

    @property
    def left_out(self) -> str:
        """What of the scenario no design has; "" if nothing."""
        gone = [("faults", self._has_faults), ("changes of size", self._has_scales)]
        return " and ".join(name for name, has in gone if has)

    @cached_property
    def own(self) -> Design | None:
        """The scenario's own cluster as a design; None if it has two pools of one role, or pipeline stages."""
        pools = self._scenario.resolved.pools
        roles = {pool.role for pool in pools}
        if len(roles) < len(pools) or any(pool.pp > 1 for pool in pools) or roles == {"decode", "aggregated"}:
            return None
        order = {"prefill": 0, "aggregated": 0, "decode": 1}
        shapes = [PoolShape(p.role, shape_of(p), p.replicas) for p in sorted(pools, key=lambda p: order[p.role])]
        return Design(tuple(shapes))

    def edits(self, design: Design) -> dict[str, Any]:
        """Return the edits that make this cluster of the scenario. Faults and changes of size name pools and engines
        that are gone, so they are taken away."""
        if design == OWN:
            return {}
        edits: dict[str, Any] = {"pool": list(self._pools(design))}
        if self._has_faults:
            edits |= {"fault": None, "faults": None}
        if self._has_scales:
            edits["scale"] = None
        if self._has_paths and design.kind == "aggregated":
            edits["network.paths"] = None
        for name, value in design.options:
            if not OPTIONS[name].roles:
                edits[OPTIONS[name].key] = value
        return edits

    def _pools(self, design: Design) -> Iterator[dict[str, Any]]:
        for pool in design.pools:
            template, before = self._template(pool.role)
            engine = pool.engine
            same = shape_of(before) == engine and before.role == pool.role
            kept = {
                key: value
                for key, value in template.items()
                if key not in _REPLACED_KEYS and (same or key not in SIZED_KEYS)
            }
            gpu = template["gpu"] if before.gpu.name == engine.gpu else engine.gpu
            called = before.name if before.role == pool.role else pool.role
            table = {"name": called, "role": pool.role, "replicas": pool.replicas, "gpu": gpu, "tp": engine.tp, **kept}
            if engine.dp > 1 or engine.ep > 1:
                table |= {"dp_attention": engine.dp, "ep": engine.ep}
            for name, value in design.options:
                if pool.role in OPTIONS[name].roles:
                    table[OPTIONS[name].key] = value
            yield table

    def _template(self, role: Role) -> tuple[dict[str, Any], Pool]:
        """Return the table of the scenario's pool that comes nearest to a role, and that pool."""
        pools = self._scenario.resolved.pools
        preferred = {
            "prefill": ("prefill", "aggregated", "decode"),
            "decode": ("decode", "aggregated", "prefill"),
            "aggregated": ("aggregated", "decode", "prefill"),
        }[role]
        index = min(range(len(pools)), key=lambda i: preferred.index(pools[i].role))
        return self._tables[index], pools[index]


def shape_of(pool: Pool) -> EngineShape:
    """Return the shape of a pool's engines."""
    return EngineShape(pool.gpu.name, pool.tp, pool.attention_replicas, pool.ep)
