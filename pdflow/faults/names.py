"""Patterns of engine names: a name, or part of one and a `*` for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pdflow.protocol.values import EngineId


def matching(pattern: str, names: Iterable[EngineId]) -> tuple[EngineId, ...]:
    """Return the `names` that match a pattern, in their order."""
    regex = re.compile(".*".join(re.escape(literal) for literal in pattern.split("*")))
    return tuple(name for name in names if regex.fullmatch(name))
