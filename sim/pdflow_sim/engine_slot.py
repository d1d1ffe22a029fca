"""Where engines stand: one slot for each engine that a scenario ever has, whatever its incarnation.

A slot is all that a new incarnation is made from. Which node stands in it now is not known here.
"""

from __future__ import annotations

from typing import Literal

import attrs

from pdflow.cost.step import StepCost
from pdflow.engine.sequence import Limits
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId
from pdflow.scenario.schema.scenario import Pool


@attrs.frozen(kw_only=True)
class EngineSlot:
    """One engine of a pool."""

    index: int
    """Among all engines of the scenario."""
    pool: Pool
    position: int
    """Among the engines that get the same legs."""
    info: EngineInfo
    """The id and the shards of its first incarnation: what the scenario calls it."""
    limits: Limits
    cost: StepCost
    blocks: int
    block_bytes: int
    span: int
    """KV blocks in one of the prefix blocks that its engines remember; 0 if they remember none."""

    @property
    def name(self) -> EngineId:
        """The id of its first incarnation."""
        return self.info.engine

    @property
    def leg(self) -> Literal["prefill", "decode"]:
        """Which legs the router sends it."""
        return self.pool.leg


class EngineSlots:
    """All of them, by name, and under which other ids their engines have come back."""

    def __init__(self) -> None:
        self.by_name: dict[EngineId, EngineSlot] = {}
        self.names: dict[EngineId, EngineId] = {}
        """The slot of an engine that came back under another id."""

    def add(self, slot: EngineSlot) -> None:
        self.by_name[slot.name] = slot

    def of_leg(self, leg: str) -> list[EngineSlot]:
        """Those of engines that get such legs, by their position."""
        return [slot for slot in self.by_name.values() if slot.leg == leg]

    def of_pool(self, pool: str) -> list[EngineSlot]:
        """Those of a pool, by its name."""
        return [slot for slot in self.by_name.values() if slot.pool.name == pool]

    def name_of(self, engine: EngineId) -> EngineId:
        """The name of the slot in which an engine of this id stands."""
        return self.names.get(engine, engine)
