"""A step log that also has the prompts of each step. A module of its own: it is compiled, as its base class is."""

from __future__ import annotations

from pdflow.engine.engine import Engine
from pdflow.results.explanation.inter_token import PromptTokens
from pdflow.results.steps import Steps


class ObservedSteps(Steps):
    """A step log that also has the prompts of each step."""

    __slots__ = ("engine", "logged", "prompts", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.logged = 0
        """The number of steps so far."""
        self.prompts: list[tuple[int, tuple[PromptTokens, ...]]] = []
        self.seen: object = None
        """The prompts of the last step that had any: a segment can be logged as several rows."""

    def add(self, start_ps: int, first_step_ps: int, delta_ps: int, steps: int, itl_weight: int) -> None:
        """Log the steps, and the prompts that the first of them computed."""
        chunks = [] if self.engine is None else self.engine.chunks
        if chunks and chunks is not self.seen:
            self.seen = chunks
            self.prompts.append((self.logged, tuple((seq.index, tokens) for seq, tokens in chunks)))
        self.logged += steps
        super().add(start_ps, first_step_ps, delta_ps, steps, itl_weight)
