"""What posting a descriptor costs with NIXL: python benchmarks/posting.py [descriptors]

Two processes on this machine, each with a NIXL agent as vLLM makes it: lists of the whole pool are prepared once, and
each transfer names its blocks by index (`make_prepped_xfer`, then `transfer`). Memory is the host's; UCX goes through
shared memory (its own choice) or TCP on the loopback interface, by the variables that it reads.

Each line is the least of some transfers. `make` and `post` are CPU time of the thread that posts, per descriptor of
the request: other work on the machine does not count. `wall` is the time from the start to the end of the transfer.
64 bytes take no time on the wire, so those lines are the cost of a descriptor alone; with larger ones UCX copies while
it posts over shared memory. `scattered` takes every second block, `adjacent` blocks that follow each other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np

POOL_BYTES = 256 << 20
MOST_BLOCKS = 1 << 16
SIZES = (64, 8 << 10, 64 << 10)
REPEATS = 9
TRANSPORTS = {"shared memory": "", "tcp": "tcp"}


class Memory:
    """A pool of this process's memory, in blocks of one size."""

    def __init__(self) -> None:
        self.view = mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view[:] = bytes(POOL_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


class Cost(NamedTuple):
    """Seconds of one transfer; `make` and `post` of the thread's CPU."""

    make: float
    post: float
    wall: float
    merged: int


def agent(name: str, threads: int = 0) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(num_threads=threads, capture_telemetry=True))


def own_memory() -> None:
    """The other process: memory that is read and written."""
    memory, mine = Memory(), agent("owner")
    mine.register_memory([(memory.address, POOL_BYTES, 0, "")], "DRAM")
    print("memory", mine.get_agent_metadata().hex(), memory.address, flush=True)
    sys.stdin.read()


def rows(address: int, size: int) -> Any:
    blocks = min(POOL_BYTES // size, MOST_BLOCKS)
    return np.array([(address + block * size, size, 0) for block in range(blocks)], np.uint64)


def transfer(mine: Any, operation: str, sides: tuple[Any, Any], indices: Any) -> Cost:
    begun, cpu = time.perf_counter(), time.thread_time()
    handle = mine.make_prepped_xfer(operation, sides[0], indices, sides[1], indices)
    made = time.thread_time()
    mine.transfer(handle)
    posted = time.thread_time()
    while (state := mine.check_xfer_state(handle)) != "DONE":
        assert state == "PROC", state
    ended = time.perf_counter()
    merged = mine.get_xfer_telemetry(handle).descCount
    mine.release_xfer_handle(handle)
    return Cost(made - cpu, posted - made, ended - begun, merged)


def measure(transport: str, counts: list[int]) -> None:
    """The process that posts, and that starts the other one."""
    other = subprocess.Popen(
        [sys.executable, __file__, "own-memory"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    metadata, there = next(line for line in other.stdout if line.startswith("memory ")).split()[1:]
    memory, mine = Memory(), agent("poster")
    mine.register_memory([(memory.address, POOL_BYTES, 0, "")], "DRAM")
    remote = mine.add_remote_agent(bytes.fromhex(metadata))
    for size in SIZES:
        local = mine.prep_xfer_dlist("NIXL_INIT_AGENT", mine.get_xfer_descs(rows(memory.address, size), "DRAM"))
        theirs = mine.prep_xfer_dlist(remote, mine.get_xfer_descs(rows(int(there), size), "DRAM"))
        for operation in ("READ", "WRITE"):
            for count in counts:
                if 2 * count * size > POOL_BYTES:
                    continue
                for order, step in (("scattered", 2), ("adjacent", 1)):
                    indices = np.arange(0, count * step, step, dtype=np.int32)
                    found = [transfer(mine, operation, (local, theirs), indices) for _ in range(REPEATS)]
                    make, post, wall = (min(values) for values in list(zip(*found, strict=True))[:3])
                    print(
                        f"{transport:14}{operation:6}{size:7,} B{count:8,} {order:10}{found[0].merged:7,}"
                        f"{make / count * 1e6:9.3f} us{post / count * 1e6:9.3f} us{wall * 1e3:10.2f} ms",
                        flush=True,
                    )
        mine.release_dlist_handle(local)
        mine.release_dlist_handle(theirs)
    other.stdin.close()
    other.wait()


def main(arguments: list[str]) -> None:
    match arguments:
        case ["own-memory"]:
            own_memory()
        case ["of", transport, *counts]:
            measure(transport, [int(count) for count in counts])
        case counts:
            head = f"{'transport':14}{'':6}{'each':>9}{'count':>8} {'':10}{'merged':>7}"
            print(f"{head}{'make':>12}{'post':>12}{'wall':>13}", flush=True)
            for transport, layers in TRANSPORTS.items():
                variables = os.environ | {"UCX_NET_DEVICES": "lo"} | ({"UCX_TLS": layers} if layers else {})
                command = [sys.executable, __file__, "of", transport, *(counts or ["128", "1024", "8192"])]
                subprocess.run(command, env=variables, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1:])
