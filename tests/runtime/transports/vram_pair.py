"""Read a region from another process: python -m tests.runtime.transports.vram_pair KIND

The region holds ones, as child.py fills it; the exit status is 0 if they came. What both processes' libraries print is
for whoever runs this.
"""

from __future__ import annotations

import sys

import trio

from tests.runtime.transports.agents import REGION_BYTES, agents, child


async def main(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0") as p:
            await d.transport.connect("p.r0", p.description)
            assert await d.ended(d.read("p.r0", [(0, 0, REGION_BYTES)]))
            assert d.memory == b"\x01" * REGION_BYTES


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
