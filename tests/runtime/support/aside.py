"""Memory beside the blocks that calls its places as the checker's world does, and nodes whose copies a test ends.

Which number a memory gives a place depends on who came before, and the world's endpoints know no such numbers
(sim/pdflow_sim/check/engines/plan.py). Who has room, and when, is the memory's that is asked: the world's own kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.methods.staging import Staging
from pdflow.protocol.values import Allocation
from pdflow.serving.core import Port
from pdflow.serving.effects import Drop
from pdflow.serving.events import CopiedIn, CopiedOut, Handle, LayerReady
from pdflow.serving.sending import ProgressiveSending
from pdflow.serving.staged_sending import StagedSending
from pdflow_runtime.nodes.layered_prefill_node import LiveLayeredPrefillNode
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.nodes.staged_decode_node import LiveStagedDecodeNode
from pdflow_sim.check.engines.layered_role import step_of


class Aside(Staging):
    """Args: `inner` says who has room; `staged`, what it is called."""

    def __init__(self, inner: Staging, staged: Mapping[Handle, Allocation]) -> None:
        super().__init__(inner.size, inner.evicts)
        self.inner: Final = inner
        self.staged: Final = staged
        self.waiting = inner.waiting
        self._called: dict[int, Allocation] = {}
        """What the inner one calls a place, by its generation here."""

    def fits_ever(self, num_tokens: int) -> bool:
        return self.inner.fits_ever(num_tokens)

    def victims(self) -> list[str]:
        return self.inner.victims()

    def admit_next(self) -> tuple[str, Allocation] | None:
        admission = self.inner.admit_next()
        if admission is None:
            return None
        handle, called = admission
        staged = self.staged[handle]
        assert staged.generation not in self.held
        self.held[staged.generation] = (handle, staged.blocks)
        self._called[staged.generation] = called
        self.generation = max(self.generation, staged.generation)
        return handle, staged

    def release(self, allocation: Allocation) -> None:
        del self.held[allocation.generation]
        self.inner.release(self._called.pop(allocation.generation))


class SlowCopies(LiveNode):
    """With `slow`, what has been copied says so when a test says so."""

    slow = False

    def __init__(self, *args: Any) -> None:
        self.copied: list[CopiedOut | CopiedIn] = []
        super().__init__(*args)

    def put(self, port: Port, event: Any) -> None:
        if self.slow and isinstance(event, CopiedOut | CopiedIn):
            self.copied.append(event)
        else:
            super().put(port, event)

    def end_copy(self, handle: Handle) -> None:
        """The first of this one's."""
        event = next(event for event in self.copied if event.handle == handle)
        self.copied.remove(event)
        super().put(self.role, event)


class ReplayedPrefillNode(SlowCopies, LiveLayeredPrefillNode):
    """Each prompt is computed in steps of its own, as in the world."""

    def drop(self, port: Port, effect: Drop) -> None:
        super().drop(port, effect)
        self.run_out(effect.handle)

    def run_out(self, handle: Handle) -> None:
        """Steps that have begun go on without this prompt."""
        sending = self.prefilling.sending
        assert isinstance(sending, ProgressiveSending | StagedSending)
        steps = sending.steps
        for step in [step for step in steps.chunks if step // 100 == step_of(handle, 0) // 100]:
            for layer in range(steps.ready[step], self.layers):
                self.put(self.role, LayerReady(step, layer))


class ReplayedDecodeNode(SlowCopies, LiveStagedDecodeNode):
    """Room is due when a test says so."""

    def admit_soon(self) -> None:
        pass
