"""Patience with others does not count the time in which we did not run ourselves."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from pdflow_runtime.clock import within


@pytest.mark.trio
async def test_whoever_does_not_answer_in_time_is_given_up_at_once(autojump_clock: MockClock) -> None:
    tried = []

    async def silent() -> None:
        tried.append(trio.current_time())
        await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError):
        await within(5.0, silent)
    assert len(tried) == 1


@pytest.mark.trio
async def test_who_was_held_up_itself_tries_once_more(mock_clock: MockClock) -> None:
    tried = []

    async def answered_late() -> str:
        tried.append(trio.current_time())
        if len(tried) == 1:
            mock_clock.jump(20.0)
        await trio.lowlevel.checkpoint()
        return "here"

    assert await within(5.0, answered_late) == "here"
    assert len(tried) == 2


@pytest.mark.trio
async def test_who_is_held_up_again_and_again_gives_up(mock_clock: MockClock) -> None:
    tried = []

    async def held_up() -> None:
        tried.append(trio.current_time())
        mock_clock.jump(20.0)
        await trio.lowlevel.checkpoint()

    with pytest.raises(trio.TooSlowError):
        await within(5.0, held_up)
    assert len(tried) == 2
