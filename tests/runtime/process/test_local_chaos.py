"""A real cluster over a transport whose DONE is local and whose fences close: engines die, stand still and wake up,
clients hang up, and no answer is wrong. Where such a transport was declared as remote, 26 answers of 53 were wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from benchmarks.live_chaos import ENGINES, QUICKSTART, Chaos
from tests.runtime.support.local import STANDS_IN
from tests.runtime.support.served import served

OVERRIDES = (
    "serve.transport=tcp",
    "pool.prefill.engine=synthetic",
    "pool.decode.engine=synthetic",
    "router.on_failure=retry",
    "router.max_attempts=3",
    # As fast as what it is about: a peer that stands still is fenced, and wakes up behind that.
    "transfer.sync_s=0.2",
    "transfer.suspect_s=0.5",
    "transfer.dead_s=1",
    "transfer.kv_lease_duration_s=6",
)
FIRST = "from tests.runtime.support.local import stand_in_for_tcp\nstand_in_for_tcp()\n"


class Harm(Chaos):
    """Each kind in its turn, to whom chance names."""

    async def harm(self) -> None:
        while True:
            for deed in (self.kill, self.stop):
                await trio.sleep(self.random.uniform(0.2, 0.6))
                await self.harm_somebody(deed)

    async def harm_somebody(self, deed: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await deed()
            except (LookupError, OSError):
                await trio.sleep(0.05)  # its process has ended, and the next one is not there yet


@pytest.mark.slow
def test_no_answer_is_wrong_and_nothing_stays_behind(tmp_path: Path) -> None:
    with served(tmp_path, QUICKSTART, *OVERRIDES, first=FIRST) as cluster:
        chaos = Harm(cluster, requests=120, seed=1, prompts=8)
        assert trio.run(chaos.run), cluster.log.read_text()[-5000:]
        for deed in ("killed", "stopped and woken"):
            assert any(done.startswith(deed) for done in chaos.deeds)
        assert chaos.outcomes["200"] > 20
        assert chaos.outcomes["hung up on"]
        assert cluster.log.read_text().count(STANDS_IN) >= len(ENGINES)
