"""The designs that a search begins with: every size of engine that the model fits on, in every ratio of P to D.

Which designs are sound is the scenario loader's to say: one that it refuses is left out, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import ConstantCost, Role
from pdflow_sim.plan.designs import Design, DesignEditor, EngineShape, PoolShape, shape_of
from pdflow_sim.plan.options import KINDS, Kind

TP_SIZES: Final = (1, 2, 4, 8)
"""The GPUs of one host, as all presets have them."""
_RATIOS: Final = 4
MOST_SPLITS: Final = 8
"""The most ratios of P to D that are tried of each two sizes of engines, before the neighbours of the best."""


@attrs.frozen
class Space:
    """What is searched of a cluster. Empty `tp` is the scenario's own sizes; without `xpyd`, its own numbers too."""

    gpus: tuple[str, ...]
    tp: tuple[int, ...] = TP_SIZES
    xpyd: bool = True
    ep: bool = True
    kinds: tuple[Kind, ...] = KINDS


class ShapeFinder:
    """Finds the clusters of a number of GPUs that a scenario's model can run on."""

    def __init__(self, scenario: Scenario, space: Space) -> None:
        self._scenario = scenario
        self._space = space
        self._editor = DesignEditor(scenario)
        self.refused: dict[str, str] = {}
        """Engines that the loader refuses, and its first reason."""
        self._sound: dict[tuple[Role, EngineShape], bool] = {}

    def designs(self, gpus: int) -> list[Design]:
        """Return the clusters that use as many of these GPUs as their engines' sizes allow, the scenario's own among
        them if it is one."""
        found: dict[Design, None] = {}
        own = self._editor.own
        if own is not None and own.kind in self._space.kinds and self._is_searched(own, gpus):
            pools = (attrs.evolve(pool, engine=self._named(pool.engine)) for pool in own.pools)
            found[attrs.evolve(own, pools=tuple(pools))] = None
        elif not self._space.xpyd:
            self.refused["the scenario's own cluster"] = self._why_not_own(own, gpus)
        if self._space.xpyd:
            for kind in self._space.kinds:
                found |= dict.fromkeys(self._aggregated(gpus) if kind == "aggregated" else self._pairs(gpus))
        return list(found)

    def _is_searched(self, own: Design, gpus: int) -> bool:
        """Whether the scenario's own cluster is one of those that are searched."""
        if own.gpus > gpus:
            return False
        if not self._space.xpyd:
            return True
        smallest = min(pool.engine.gpus for pool in own.pools)
        return own.gpus + smallest > gpus and all(pool.engine in self._engines(pool.role) for pool in own.pools)

    def _why_not_own(self, own: Design | None, gpus: int) -> str:
        if own is None:
            return "has two pools of one role, or pipeline stages, which a plan has not; search tp and xpyd"
        if own.gpus > gpus:
            return f"has {own.gpus} GPUs, which is more than {gpus}, and xpyd is not searched"
        return f"is {own.kind}, and other clusters are not searched without xpyd"

    def _named(self, engine: EngineShape) -> EngineShape:
        return attrs.evolve(engine, named=len(self._space.gpus) > 1)

    def scaled(self, design: Design, gpus: int) -> Iterator[Design]:
        """Yield a design on another number of GPUs: the same engines and options, and P to D as near as whole numbers
        come, with the ratios next to it."""
        prefill, decode = design.of_role("prefill"), design.of_role("decode")
        if prefill is None or decode is None:
            [pool] = design.pools
            replicas = gpus // pool.engine.gpus
            if replicas:
                yield attrs.evolve(design, pools=(attrs.evolve(pool, replicas=replicas),))
            return
        splits = _splits(prefill.engine.gpus, decode.engine.gpus, gpus)
        share = prefill.gpus / design.gpus
        nearest = sorted(splits, key=lambda split: abs(split[0] * prefill.engine.gpus / gpus - share))
        for split in nearest[:_RATIOS]:
            yield _pair(prefill.engine, decode.engine, *split, design)

    def neighbours(self, design: Design, gpus: int) -> Iterator[Design]:
        """Yield the clusters of the same engines with a ratio of P to D next to a design's."""
        prefill, decode = design.of_role("prefill"), design.of_role("decode")
        if prefill is None or decode is None or not self._space.xpyd:
            return
        splits = _splits(prefill.engine.gpus, decode.engine.gpus, gpus)
        at = splits.index((prefill.replicas, decode.replicas)) if (prefill.replicas, decode.replicas) in splits else -1
        for position in (at - 1, at + 1):
            if at >= 0 and 0 <= position < len(splits):
                yield _pair(prefill.engine, decode.engine, *splits[position], design)

    def _aggregated(self, gpus: int) -> Iterator[Design]:
        for engine in self._engines("aggregated"):
            if engine.gpus <= gpus:
                yield Design((PoolShape("aggregated", engine, gpus // engine.gpus),))

    def _pairs(self, gpus: int) -> Iterator[Design]:
        for prefill in self._engines("prefill"):
            for decode in self._engines("decode"):
                splits = _splits(prefill.gpus, decode.gpus, gpus)
                for split in _spread(splits, MOST_SPLITS):
                    yield _pair(prefill, decode, *split)

    def _engines(self, role: Role) -> list[EngineShape]:
        """Return the sizes of engines of a role, those alone that the loader accepts."""
        model, space = self._scenario.resolved.model, self._space
        shapes: dict[EngineShape, None] = {}
        for gpu in space.gpus:
            for tp in space.tp:
                shapes[EngineShape(gpu, tp)] = None
                if model.moe is not None and space.ep and tp > 1:
                    shapes |= dict.fromkeys((EngineShape(gpu, tp, 1, tp), EngineShape(gpu, 1, tp, tp)))
        if not space.tp:
            pools = self._scenario.resolved.pools
            mine = [pool for pool in pools if pool.role == role]
            shapes |= {shape_of(pool): None for pool in mine or pools if pool.pp == 1}
        return [self._named(shape) for shape in shapes if self._is_sound(role, shape)]

    def _is_sound(self, role: Role, engine: EngineShape) -> bool:
        key = role, engine
        if key not in self._sound:
            self._sound[key] = self._refusal(role, engine) is None
        return self._sound[key]

    def _refusal(self, role: Role, engine: EngineShape) -> str | None:
        """Return why no engine of this size can have this role; None if one can."""
        constant = self._constant_elsewhere(role, engine)
        if constant:
            self.refused[f"{engine} on {engine.gpu} as {role}"] = constant
            return constant
        roles: tuple[Role, ...] = ("aggregated",) if role == "aggregated" else ("prefill", "decode")
        pools = tuple(PoolShape(each, engine, 1) for each in roles)
        try:
            self._scenario.with_(self._editor.edits(Design(pools)))
        except ScenarioError as error:
            self.refused[f"{engine} on {engine.gpu}"] = error.problems[0].message
            return error.problems[0].message
        return None

    def _constant_elsewhere(self, role: Role, engine: EngineShape) -> str:
        """Return why constant step times do not hold for this engine; "" if they do, or if there are none."""
        pools = self._scenario.resolved.pools
        if not any(isinstance(pool.cost, ConstantCost) for pool in pools):
            return ""
        if any(pool.role == role and shape_of(pool) == engine for pool in pools):
            return ""
        return "constant step times are of the scenario's own engines only"


def _pair(prefill: EngineShape, decode: EngineShape, p: int, d: int, like: Design | None = None) -> Design:
    options = () if like is None else like.options
    return Design((PoolShape("prefill", prefill, p), PoolShape("decode", decode, d)), options)


def _splits(prefill_gpus: int, decode_gpus: int, gpus: int) -> list[tuple[int, int]]:
    """Return the numbers of P and D that use these GPUs, but for fewer than one more engine takes."""
    found = []
    for p in range(1, (gpus - decode_gpus) // prefill_gpus + 1):
        d = (gpus - p * prefill_gpus) // decode_gpus
        if gpus - p * prefill_gpus - d * decode_gpus < prefill_gpus:
            found.append((p, d))
    return found


def _spread(splits: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return at most so many of the splits, evenly spaced, the first and the last among them."""
    if len(splits) <= most:
        return list(splits)
    chosen = {round(position * (len(splits) - 1) / (most - 1)) for position in range(most)}
    return [splits[index] for index in sorted(chosen)]
