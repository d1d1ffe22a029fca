"""The exceptions of pdflow and the exit codes of its commands.

    PdflowError                  anything that pdflow says to a person
    ├── ScenarioError            bad input: every problem found, each with its location        exit 2
    ├── MissingBackendError      something optional that was asked for is not installed        exit 2
    ├── InvariantError           a safety invariant did not hold: a fault was found            exit 1
    ├── BudgetError              a limit on time or work came first                            exit 3
    └── RouterLostError          a live cluster's router ended again and again                 exit 4

`LocalProtocolError` (our caller misused the state machine) is defined in the protocol; what a peer sends is data and
raises nothing. KeyboardInterrupt, which Ctrl-C and SIGTERM raise, is no error of ours: the command keeps the results
that it has and exits with 130.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs

EXIT_DONE: Final = 0
EXIT_NOT_SO: Final = 1
"""The thing asked about is not so: an invariant was violated, no design meets the SLO, a fault was found."""
EXIT_BAD_INPUT: Final = 2
EXIT_BUDGET: Final = 3
EXIT_ROUTER_LOST: Final = 4
EXIT_INTERRUPTED: Final = 130


@attrs.frozen(order=True)
class Problem:
    """One thing wrong with the input: `location` is "file:line" or "--set key=value", `path` a dotted key or ""."""

    location: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(field for field in (self.location, self.path, self.message) if field)


NOTHING_SIMULATED: Final = "nothing simulated yet, and nothing written"


@contextmanager
def before_simulating() -> Iterator[None]:
    """Make a KeyboardInterrupt in the block say that there are no results. What follows the block has some to keep."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(NOTHING_SIMULATED) from None


class PdflowError(Exception):
    """Base of the errors that a person should read without a traceback."""

    exit_code: int = EXIT_NOT_SO


class ScenarioError(PdflowError):
    """The input is wrong. Holds every problem that was found, in the order of the file."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class MissingBackendError(PdflowError):
    """Something optional is not installed; the message is one sentence with the command that installs it."""

    exit_code = EXIT_BAD_INPUT


class InvariantError(PdflowError):
    """A safety invariant did not hold."""

    exit_code = EXIT_NOT_SO


class BudgetError(PdflowError):
    """A limit on time or work was reached before an answer."""

    exit_code = EXIT_BUDGET


class RouterLostError(PdflowError):
    """The router of a live cluster ended again and again before it was ready; the cluster has been stopped."""

    exit_code = EXIT_ROUTER_LOST
