"""CPU time per request at the two ends of a simulation: python benchmarks/ends_speed.py

Drawing the requests of a workload before it, summing up and writing what became of them after it. The best of three.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from pdflow.results.figures.metrics import measure
from pdflow.results.files.write import write_requests
from pdflow.results.records import STAGES, Records
from pdflow.scenario.schema.distributions import FixedLength, UniformLength
from pdflow.scenario.schema.workload import PoissonArrival, Workload
from pdflow.workload.build import requests

MS = 1_000_000
WORKLOADS = {
    "Poisson, uniform lengths": Workload(
        arrival=PoissonArrival(rate_rps=8.0),
        input_tokens=FixedLength(tokens=512),
        output_tokens=UniformLength(low=1, high=4),
    ),
    "like azure-code": Workload(like="azure-code"),
    "like mooncake-conversation": Workload(like="mooncake-conversation"),
}


def completed(count: int) -> Records:
    """Records of `count` requests that all completed, with stages of 0 to 10 ms."""
    generator = np.random.default_rng(1)
    records = Records(count)
    ends = np.cumsum(generator.integers(0, 10 * MS, (count, len(STAGES))), axis=1).tolist()
    for request in range(count):
        arrival = request * 100 * MS
        records.arrival_ns[request] = arrival
        for stage, column in enumerate(records.ends):
            column[request] = arrival + ends[request][stage]
        records.first_token_ns[request] = arrival + ends[request][-1]
        records.last_token_ns[request] = records.first_token_ns[request] + 200 * 10 * MS
        records.input_tokens[request], records.output_tokens[request], records.attempts[request] = 1024, 201, 1
        records.prefill_engine[request], records.decode_engine[request] = "prefill-0", "decode-0"
        records.outcome[request] = "completed"
    return records


def draw(workload: Workload, count: int, folder: Path) -> None:
    """Draw `count` requests, and keep none."""
    deque(islice(requests(workload, 1, folder), count), maxlen=0)


def cpu_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of `work` for each of its `count` requests."""
    best = float("inf")
    for _ in range(3):
        gc.collect()
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best / count * 1e6


def costs(count: int, folder: Path) -> dict[str, float]:
    """CPU microseconds per request of each part, over `count` requests; writes to `folder`."""
    records = completed(count)
    found = {
        f"draw: {title}": cpu_us(partial(draw, workload, count, folder), count) for title, workload in WORKLOADS.items()
    }
    found["sum up"] = cpu_us(lambda: measure(records, [], 10**13), count)
    found["write requests.jsonl"] = cpu_us(lambda: write_requests(folder / "requests.jsonl", records), count)
    return found


def main() -> None:
    """Print one line per part."""
    with tempfile.TemporaryDirectory() as folder:
        for title, us in costs(50_000, Path(folder)).items():
            print(f"{title:36}{us:8.2f} µs/request")


if __name__ == "__main__":
    main()
