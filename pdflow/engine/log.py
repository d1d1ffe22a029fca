"""The interface of the log of an engine's steps."""

from __future__ import annotations

from typing import Protocol


class StepLog(Protocol):
    """A log of rows of back-to-back steps, in order; `pdflow.results.steps.Steps` is one.

    The first of `steps` steps starts at `start_ps` and lasts `first_step_ps`, each next one `delta_ps` longer; in each,
    `itl_weight` sequences wait for a token after their first.
    """

    def add(self, start_ps: int, first_step_ps: int, delta_ps: int, steps: int, itl_weight: int, /) -> None: ...
