"""A process returns freed memory to the system from time to time."""

from __future__ import annotations

import gc
import mmap
import weakref

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


@pytest.mark.trio
async def test_circles_that_hold_large_bodies_are_collected(autojump_clock: MockClock) -> None:
    """They are too few for the collector to run by itself."""

    class Holder:
        def __init__(self) -> None:
            self.body = mmap.mmap(-1, 2 << 20)  # not of the heap, which may have room
            self.body.write(bytes(range(256)) * (8 << 10))
            self.me = self

    gc.collect()
    malloc.return_freed_memory()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(malloc.keep_returning)
        await trio.sleep(malloc.TRIM_EVERY_S / 2)
        gc.disable()
        try:
            before = malloc.resident_bytes()
            held = [weakref.ref(Holder()) for _ in range(20)]
            assert malloc.resident_bytes() > before + malloc.GROWN_BYTES
            assert all(ref() for ref in held)
            await trio.sleep(malloc.TRIM_EVERY_S)
            assert not any(ref() for ref in held)
        finally:
            gc.enable()
        nursery.cancel_scope.cancel()
