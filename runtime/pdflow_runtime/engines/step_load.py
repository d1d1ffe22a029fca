"""The copies of KV into blocks that one step waits for, layer by layer, while it computes.

When a layer may be computed is decided in `pdflow/engine/layered.py`. Here is a thread that copies one layer after the
other, and the wait of the thread that computes. The copies belong to the step: it begins them, and it has not ended
before they have, however it ends. So no copy writes into blocks that a step's end has freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from pdflow.engine.layered import LayeredLoad
from pdflow_runtime.clock import clock_for_threads

CopyLayer: TypeAlias = Callable[[int], None]
"""Copies a layer of a prompt's KV at all ranks that keep it; the copy has ended when it returns."""


class LoadFailedError(RuntimeError):
    """A layer could not be copied. The step has no result: its blocks do not hold the prompt's KV."""


class StepLoad:
    """The copies of all sequences that one step loads. Made in trio's thread. Args: `layers` of the model."""

    def __init__(self, layers: int) -> None:
        self.rule: Final = LayeredLoad(layers)
        self._copies: Final[list[tuple[CopyLayer, Callable[[], None]]]] = []
        self._now: Final = clock_for_threads()
        self._changed: Final = threading.Condition()
        self._failure: LoadFailedError | None = None

    def add(self, copy: CopyLayer, copied: Callable[[], None]) -> None:
        """Add a sequence's copies, before the step begins. `copied` is called in the copying thread when all layers
        have been copied."""
        self.rule.begin(1)
        self._copies.append((copy, copied))

    def run(self, bring: CopyLayer | None = None) -> None:
        """Copy layer after layer. `bring` is called with a layer whose copies have been made, and does what is left to
        do before it is in the blocks. A failure is raised by `wait_for` and `check`, in the thread that computes."""
        layer = 0
        try:
            for layer in range(self.rule.layers):
                for copy, _ in self._copies:
                    copy(layer)
                if bring is not None:
                    bring(layer)
                with self._changed:
                    for _ in self._copies:
                        self.rule.copied(layer, self._now())
                    self._changed.notify_all()
            for _, copied in self._copies:
                copied()
        except BaseException as error:
            # Whatever it is: the computing thread waits for this one.
            failure = LoadFailedError(
                f"layer {layer} of the KV that a step loads could not be copied into blocks ({type(error).__name__}: "
                f"{error}): this engine ends, and the requests have to be sent to another one"
            )
            failure.__cause__ = error
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def wait_for(self, layer: int) -> None:
        """Wait until the layer may be computed. LoadFailedError if it never may."""
        with self._changed:
            while not self.rule.may_compute(layer):
                self.check()
                self._changed.wait()

    def check(self) -> None:
        """Raise LoadFailedError if a copy has failed."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def running(self, bring: CopyLayer | None) -> Iterator[None]:
        """Copy in a thread of its own. The context ends when that thread has ended."""
        thread = threading.Thread(target=self.run, args=(bring,), name="pdflow-load")
        thread.start()
        try:
            yield
        finally:
            thread.join()
        self.check()
