"""A core alone with its engine: what the explorations of P's core and of D's share."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from pdflow.protocol.effects import FreeBlocks
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Core, Port
from pdflow.serving.effects import Drop, HoldEngine, ResumeEngine
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.search.forward import CopiedByMoves, Move, Violation


class CoreWorld(CopiedByMoves):
    """A state of a core and its engine. A move's verb is a method `do_VERB` of the world.

    Args: `names` of the requests; `failures` and `aborts` that may happen.
    """

    crash = Finding.CRASH
    core: Core
    phases: list[Any]
    """What the engine does with each request."""
    loading: ClassVar[IntEnum]
    """The phase in which a request has blocks and waits for its KV; in every later one, the blocks are the engine's."""

    def __init__(self, names: tuple[str, ...], failures: int, aborts: int) -> None:
        super().__init__()
        self.names = names
        self.blocks: list[Allocation | None] = [None] * len(names)
        """Blocks that the engine has given to a request and that are not free again."""
        self.asked = [False] * len(names)
        """Whether each request has been made."""
        self.dropping: dict[str, None] = {}
        self.held_engine = False
        self.generation = 0
        self.failures, self.aborts = failures, aborts

    @property
    def faults(self) -> int:
        return self.failures + self.aborts

    def perform_all(self, performed: dict[type, Any]) -> None:
        """Be the driver of the core. `performed`: the handlers of effects that not all cores have."""
        self.core.do[FreeBlocks] = self.free_blocks
        shared: dict[type, Any] = {
            Drop: self.drop,
            FreeBlocks: self.free_blocks,
            HoldEngine: self.hold_engine,
            ResumeEngine: self.resume_engine,
        }
        self.core.perform.update(shared | performed)

    def make(self, move: Move) -> None:
        verb, r, detail = move
        self.action = f"{verb} {self.names[r]}" + f" {detail}" * bool(detail)
        getattr(self, f"do_{verb}")(r, detail)

    def feed(self, event: Any, port: Port | None = None) -> None:
        self.core.feed(port or self.core.role, event, 0)

    def give_blocks(self, r: int) -> Allocation:
        self.generation += 1
        blocks = self.blocks[r] = Allocation(self.generation, (r,))
        return blocks

    # What the core asks of its driver.

    def nothing(self, port: Port, effect: object) -> None:
        """Nothing in this world depends on it."""

    def drop(self, port: Port, effect: Drop) -> None:
        if effect.handle in self.dropping:
            raise Violation(Finding.ANSWER, f"{effect.handle} is dropped twice")
        self.dropping[effect.handle] = None

    def free_blocks(self, port: Port, effect: FreeBlocks) -> None:
        r = next((r for r, blocks in enumerate(self.blocks) if blocks == effect.allocation), None)
        if r is None:
            raise Violation(Finding.TWICE, f"{effect.allocation} is freed, and no request has it")
        if self.phases[r] > self.loading:
            raise Violation(Finding.FREED, f"the blocks of {self.names[r]} are freed, which is {self.phases[r].name}")
        self.blocks[r] = None

    def hold_engine(self, port: Port, effect: HoldEngine) -> None:
        if self.held_engine:
            raise Violation(Finding.ANSWER, "the engine is held twice")
        self.held_engine = True

    def resume_engine(self, port: Port, effect: ResumeEngine) -> None:
        if not self.held_engine:
            raise Violation(Finding.ANSWER, "the engine goes on, and was not held")
        self.held_engine = False
