"""A process returns freed memory to the system from time to time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from pdflow_runtime.process import malloc


@pytest.mark.trio
async def test_freed_memory_is_returned_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    times: list[float] = []
    monkeypatch.setattr(malloc, "return_freed_memory", lambda: times.append(trio.current_time()))
    begun = trio.current_time()
    with trio.move_on_after(3.5 * malloc.TRIM_EVERY_S):
        await malloc.keep_returning()
    assert [time - begun for time in times] == pytest.approx([malloc.TRIM_EVERY_S * count for count in (1, 2, 3)])
