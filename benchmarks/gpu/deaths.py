"""Engines that are killed and stopped while KV is on its way: python -m benchmarks.gpu deaths [--seconds N]

Two prefill and two decode engines on one GPU, for each way that KV can go. Wrong and unanswered requests, leaked blocks
and exceptions must be 0, as in benchmarks/live_chaos.py. The GPU's memory in use must be what it was before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import trio

from benchmarks.gpu.identity import MODEL
from benchmarks.gpu.served_cases import WAYS, ServedCase
from benchmarks.live_chaos import Chaos
from tests.runtime.support.served import Served, served


class Deaths(Chaos):
    """Kills and stops only, far enough apart for a killed engine to come back, for some time. Args: `seconds`."""

    def __init__(self, cluster: Served, seconds: float) -> None:
        super().__init__(cluster, 0, 1)
        self.seconds = seconds

    def requests_to_send(self) -> Iterator[int]:
        end = trio.current_time() + self.seconds
        while trio.current_time() < end:
            yield 1

    async def harm(self) -> None:
        deeds = (self.kill, self.stop, self.stop)
        while True:
            await trio.sleep(self.random.uniform(1, 5))
            try:
                await self.random.choice(deeds)()
            except (LookupError, OSError):
                continue


def used_mib() -> int:
    """Return the memory of the GPU that is in use, in MiB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def run(case: ServedCase, seconds: float) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scenario.toml")
        file.write_text(case.scenario(str(MODEL)))
        with served(Path(folder), file) as cluster:
            chaos = Deaths(cluster, seconds)
            good = trio.run(chaos.run)
            sys.stdout.write(f"{case}: {'good' if good else cluster.log.read_text()[-3000:]}\n")
            sys.stdout.flush()
    return good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu deaths")
    parser.add_argument("--seconds", type=float, default=60.0, help="time with deaths (default: 60)")
    parser.add_argument("--method", default="nixl-push")
    asked = parser.parse_args(arguments)
    before = used_mib()
    found = [ServedCase(asked.method, transport, buffer, replicas=2) for transport, buffer in WAYS]
    with ThreadPoolExecutor(len(found)) as pool:
        good = all(list(pool.map(lambda case: run(case, asked.seconds), found)))
    after = used_mib()
    sys.stdout.write(f"GPU memory in use: {before} MiB before, {after} MiB after all had ended\n")
    return 0 if good and after <= before else 1
