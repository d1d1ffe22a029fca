"""Which connectors are broken, as the API server's process knows it: `stats.py` reports, `middleware.py` asks.

A connector breaks in EngineCore (`guard.py`), and its metrics say so with the output of the same step.
"""

from __future__ import annotations

from typing import Final

BROKEN: Final[dict[int, str]] = {}
"""By the index of an engine of this server (a data-parallel rank), why its connector moves no KV any more."""


def report(engine: int, why: str) -> None:
    """Note that an engine's connector is broken, or, with an empty text, that it works."""
    if why:
        BROKEN[engine] = why
    else:
        BROKEN.pop(engine, None)
