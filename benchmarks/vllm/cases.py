"""The catalogue of faults: what each is called, how its pair is started, and what must hold.

A fault is a function that is given a running pair, does something to it, and returns what it saw. Its docstring says
what is done. Modules of faults register theirs here when they are imported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import attrs

from benchmarks.vllm.scene import Finding, Scene, Setup

Fault: TypeAlias = Callable[[Scene], Awaitable[Finding]]

CASES: Final[dict[str, Case]] = {}
"""By key, in the order of the table."""


@attrs.frozen
class Case:
    key: str
    """The number in the table, with a suffix where a row has several: `4-during`."""
    title: str
    must: str
    """What pdflow must do."""
    setup: Setup
    mode: str
    """`push` or `pull`, for connectors that are given as a family."""
    origins: tuple[str, ...]
    """Whose connectors it is done to."""
    run: Fault


def case(
    key: str,
    title: str,
    must: str,
    setup: Setup | None = None,
    mode: str = "push",
    origins: tuple[str, ...] = ("stock", "pdflow"),
) -> Callable[[Fault], Fault]:
    """Register a fault under this key."""

    def register(run: Fault) -> Fault:
        assert key not in CASES, f"two faults are called {key}"
        CASES[key] = Case(key, title, must, setup or Setup(), mode, origins, run)
        return run

    return register
