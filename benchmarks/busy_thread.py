"""KV over tcp while a thread of each process computes in Python, as an engine's does: python -m benchmarks.busy_thread

Two processes, each with a thread that counts. Of each variant: MB/s of 32 MiB in pieces of 64 KiB, the median of some
transfers, and how fast the writer's thread counts meanwhile, as a share of when nothing is moved. `interval` is how
long a thread may keep the interpreter when another one waits for it: Python's 5 ms, or what processes with TLS have.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.transport_bare import Other
from benchmarks.transport_speed import Writer
from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.tls_socket import SWITCH_S
from tests.runtime.support.certificates import cluster_tls

NBYTES = 32 << 20
PIECE = 64 << 10
TRANSFERS = 5
DEFAULT_S = 0.005
ALONE_S = 1.0


class Counting:
    def __init__(self) -> None:
        self.count = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.count += 1


@contextmanager
def counting() -> Iterator[Counting]:
    made = Counting()
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made
    finally:
        made.ended = True
        thread.join()


async def owner(kind: str, interval_s: float) -> None:
    """The other process: owns memory."""
    sys.setswitchinterval(interval_s)
    agent = Writer(kind, "d.r0", NBYTES)
    with counting():
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.transport.run)
            print(agent.transport.describe().hex(), flush=True)
            await trio.to_thread.run_sync(sys.stdin.readline)
            await agent.transport.aclose()


async def measured(kind: str, interval_s: float) -> str:
    other = Other("owner", kind, str(interval_s), script=__file__)
    sys.setswitchinterval(interval_s)
    writer = Writer(kind, "p.r0", NBYTES)
    pieces = [Descriptor(at, at, PIECE) for at in range(0, NBYTES, PIECE)]
    with counting() as thread:
        time.sleep(ALONE_S)
        alone = thread.count / ALONE_S
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.transport.run)
            await writer.transport.connect("d.r0", bytes.fromhex(other.first))
            rates, begun, counted = [], time.perf_counter(), thread.count
            for _ in range(TRANSFERS):
                before = time.perf_counter()
                await writer.end_of(writer.post(pieces))
                rates.append(NBYTES / 1e6 / (time.perf_counter() - before))
            share = (thread.count - counted) / (time.perf_counter() - begun) / alone
            await writer.transport.aclose()
    other.end()
    return f"{kind:11} interval {1e3 * interval_s:5.1f} ms {statistics.median(rates):7.1f} MB/s, counts at {share:4.0%}"


def main() -> None:
    match sys.argv[1:]:
        case ["owner", kind, interval_s]:
            trio.run(owner, kind, float(interval_s))
        case _:
            cluster_tls()
            for _ in range(2):
                for kind in ("tcp", "tcp by TLS"):
                    for interval_s in (DEFAULT_S, SWITCH_S):
                        print(trio.run(measured, kind, interval_s), flush=True)


if __name__ == "__main__":
    main()
