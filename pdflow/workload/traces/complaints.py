"""The problems of a trace's lines, collected until all lines have been read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdflow.errors import Problem, ScenarioError

REPORTED: Final = 20
"""Problems of one trace that are reported one by one; the rest are counted."""


class TraceError(ScenarioError):
    """Lines of a trace cannot be read. `problems` has the first of them, `more` is the number of others."""

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        super().__init__(problems)
        self.more = more
        if more:
            self.args = (f"{self}\nand {more} more problems of this kind",)


class Complaints:
    """The problems found in a trace so far."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.problems: list[Problem] = []
        self.more = 0

    def add(self, line: int, message: str) -> None:
        """Note a problem of one line, counted from 1."""
        if len(self.problems) < REPORTED:
            self.problems.append(Problem(f"{self.location}:{line}", "", message))
        else:
            self.more += 1

    def raise_any(self) -> None:
        """Raise TraceError if anything was noted."""
        if self.problems:
            raise TraceError(self.problems, self.more)

    def refuse(self, line: int, message: str) -> TraceError:
        """Return the error to raise when the rest of the trace cannot be read at all."""
        self.add(line, message)
        return TraceError(self.problems, self.more)
