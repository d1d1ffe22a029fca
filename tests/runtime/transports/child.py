"""A peer that is a process of its own, to be killed, paused and resumed: python -m tests.runtime.transports.child

It prints its description. With the description of a peer called d.r0 after its name, it writes to that for ever, its
whole region full of ones into the first generation, until a write is refused; then it prints "refused".
"""

from __future__ import annotations

import sys

import trio

from tests.runtime.transports.agents import REGION_BYTES, Agent


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(*orders: str) -> None:
    kind, name, *target = orders
    agent = Agent(kind, name)
    agent.memory[:] = b"\x01" * REGION_BYTES
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.transport.run)
        say(agent.transport.describe().hex())
        if target:
            await agent.transport.connect("d.r0", bytes.fromhex(target[0]))
            while await agent.landed(agent.write("d.r0", [(0, 0, REGION_BYTES)], notice=b"whole")):
                agent.told.clear()
            say("refused")
        await trio.to_thread.run_sync(sys.stdin.read)
        await agent.transport.aclose()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
