"""A peer that is a process of its own, to be killed, paused and resumed.

It says its description. With the description of a peer called d.r0 after its name, it writes to that for ever, its
whole region full of ones into the first generation, until a write is refused; then it says "refused".
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

import trio

from tests.runtime.transports.agents import REGION_BYTES, Agent


async def main(pipe: Connection, *arguments: str) -> None:
    """Until the other end of the pipe is closed."""
    kind, name, *target = arguments
    agent = Agent(kind, name)
    agent.memory[:] = b"\x01" * REGION_BYTES
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.transport.run)
        pipe.send(agent.transport.describe().hex())
        if target:
            await agent.transport.connect("d.r0", bytes.fromhex(target[0]))
            while await agent.landed(agent.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"whole")):
                agent.events.clear()
            pipe.send("refused")
        with suppress(EOFError):
            await trio.to_thread.run_sync(pipe.recv)
        await agent.transport.aclose()
