"""WRITEs between two processes on one GPU, from its memory to its memory, by size and number of pieces.

A WRITE is timed at the writer, from posting it to the owner's answer. The cost of a piece is the slope of the time over
the number of pieces of one size.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import trio

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.gpu.memory import allocate
from pdflow_runtime.transports.adopting import Segment, adopt
from pdflow_runtime.transports.base import Ended, TransportEvent
from pdflow_runtime.transports.named import transport_named

NBYTES = 512 << 20
MOST = 8192
"""Pieces in a WRITE."""


class Side:
    """An agent over a region on the GPU."""

    def __init__(self, transport: str, name: str) -> None:
        self.ended: dict[int, bool] = {}
        self.bell = trio.Event()
        self.region = allocate(NBYTES, 0)
        self.transport: Any = transport_named(transport)(name, self.on_event)
        adopt(self.transport, [Segment(self.region.data_ptr(), NBYTES, 0)], 4096)

    def on_event(self, event: TransportEvent) -> None:
        if isinstance(event, Ended):
            self.ended[event.op] = event.ok
            self.bell.set()

    async def write(self, op: int, pieces: list[Descriptor]) -> float:
        """Return the seconds that a WRITE takes."""
        begun = perf_counter()
        self.transport.write(op, "d.r0", pieces, 1, b"done")
        while op not in self.ended:
            self.bell = trio.Event()
            await self.bell.wait()
        assert self.ended[op]
        return perf_counter() - begun


def owner(pipe: Connection, transport: str) -> None:
    """The other process: owns the memory that is written to."""

    async def run() -> None:
        side = Side(transport, "d.r0")
        async with trio.open_nursery() as nursery:
            await nursery.start(side.transport.run)
            pipe.send(side.transport.describe())
            await trio.to_thread.run_sync(pipe.recv)
            await side.transport.aclose()

    trio.run(run)


def scattered(size: int, count: int) -> list[Descriptor]:
    """Pieces in an order that joins no two of them."""
    at = [number * 7919 % count for number in range(count)]
    return [Descriptor(number * size, to * size, size) for number, to in enumerate(at)]


async def measure(transport: str, description: bytes) -> None:
    side = Side(transport, "p.r0")
    async with trio.open_nursery() as nursery:
        await nursery.start(side.transport.run)
        await side.transport.connect("d.r0", description)
        op = 0
        for size in (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20):
            found = []
            for count in sorted({max(1, min(MOST, NBYTES // size) // 8), min(MOST, NBYTES // size)}):
                times = []
                for _ in range(7):
                    op += 1
                    times.append(await side.write(op, scattered(size, count)))
                found.append((count, sorted(times)[len(times) // 2]))
            (few, short), (many, long) = found[0], found[-1]
            slope = (long - short) / (many - few) * 1e6
            print(
                f"| {transport} | {size:,} B | {many:,} | {long * 1e3:.2f} ms | {many * size / long / 1e9:.1f} GB/s "
                f"| {slope:.2f} us |",
                flush=True,
            )
        await side.transport.aclose()


def main() -> int:
    print("| transport | piece | pieces | time | rate | each further piece |")
    print("| --- | --- | --- | --- | --- | --- |")
    for transport in ("cuda-ipc", "nixl"):
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=owner, args=(theirs, transport))
        process.start()
        try:
            trio.run(measure, transport, ours.recv())
            ours.send(None)
            process.join(10)
        finally:
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
