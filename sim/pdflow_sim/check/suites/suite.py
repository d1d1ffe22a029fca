"""The code shared by the suites of `pdflow check`: options, results, and files of counterexamples."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from pdflow.errors import EXIT_BUDGET, EXIT_DONE, EXIT_NOT_SO, PdflowError
from pdflow_sim.check.counterexamples import counterexample as counterexample_files
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile


@attrs.frozen(kw_only=True)
class CheckOptions:
    """The options of the command line."""

    dialect: str | None = None
    budget_s: float | None = None
    jobs: int = 1
    seed: int = 1
    runs: int | None = None
    """Random walks of each dialect; None: as many as the time allows."""
    out: Path = Path("check")
    large: bool = False
    """Whether to search the nightly scopes too."""
    max_states: int | None = None
    """Leave out scopes with more states; None: leave out none."""
    only: str | None = None
    """Check only rows whose name contains this."""
    settings: tuple[str, ...] = ()
    """FIELD=VALUE of the scope that `pdflow check scope` explores."""
    json: bool = False

    @property
    def until_s(self) -> float:
        """When the budget ends, on the clock of time.monotonic."""
        return float("inf") if self.budget_s is None else time.monotonic() + self.budget_s

    def selects(self, name: str) -> bool:
        return self.only is None or self.only.lower() in name.lower()


@attrs.frozen
class SuiteResult:
    """The exit code of one suite, and its rows for --json. `more`: further lists of rows, by their name in --json."""

    code: int
    rows: list[dict[str, Any]]
    more: Mapping[str, list[dict[str, Any]]] = attrs.Factory(dict)


def answer(rows: list[dict[str, Any]], *, not_so: bool, stopped: bool) -> SuiteResult:
    """Return the result of a suite. An unexpected row (EXIT_NOT_SO) outranks a spent budget (EXIT_BUDGET)."""
    return SuiteResult(EXIT_NOT_SO if not_so else EXIT_BUDGET if stopped else EXIT_DONE, rows)


class CannotKeepError(PdflowError):
    """A counterexample was found, and its file cannot be written."""


def keep(folder: Path, name: str, counterexample: CounterexampleFile) -> Path:
    """Write a counterexample, and return its path. Raises CannotKeepError."""
    path = folder / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        counterexample_files.write(path, counterexample)
    except OSError as error:
        raise CannotKeepError(f"{path}: cannot be written: {error.strerror}") from error
    return path
