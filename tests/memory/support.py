"""Work counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pdflow.version import compiled


def lines(act: Callable[[], object]) -> int:
    """How many lines of `pdflow.memory` an act runs. Compiled code has none to count: the test is skipped."""
    if compiled():
        pytest.skip("compiled code has no lines to count; the source's are counted")
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("pdflow.memory"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    assert count, "the act ran no line of the room"
    return count
