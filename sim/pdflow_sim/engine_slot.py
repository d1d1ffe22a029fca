"""Slots of engines: one for each engine that a scenario ever has, whatever its incarnation.

A new incarnation is made from its slot alone. Which node is in a slot now is not known here.
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
    """The permanent description of one engine of a pool, from which its incarnations are made."""

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
        """The kind of legs that the router sends to the engine."""
        return self.pool.leg


class EngineSlots:
    """All slots by name, and the other ids under which their engines have come back."""

    def __init__(self) -> None:
        self.by_name: dict[EngineId, EngineSlot] = {}
        self.names: dict[EngineId, EngineId] = {}
        """The slot of each engine that came back under another id, by that id."""

    def add(self, slot: EngineSlot) -> None:
        self.by_name[slot.name] = slot

    def of_leg(self, leg: str) -> list[EngineSlot]:
        """Return the slots of engines that get such legs, by position."""
        return [slot for slot in self.by_name.values() if slot.leg == leg]

    def of_pool(self, pool: str) -> list[EngineSlot]:
        """Return the slots of the pool of this name."""
        return [slot for slot in self.by_name.values() if slot.pool.name == pool]

    def name_of(self, engine: EngineId) -> EngineId:
        """Return the name of the slot that has the engine of this id."""
        return self.names.get(engine, engine)
