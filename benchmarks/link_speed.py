"""CPU time per transfer of the link model alone: python benchmarks/link_speed.py

Transfers are 512 to 1536 tokens of 128 KiB between random pairs of P and D engines, each behind a NIC of its own, as
Poisson arrivals; one call of start, wake_at and advance each, at least. The driver's own loop is counted, about 0.4 µs.
"""

from __future__ import annotations

import time

from pdflow.network import FlowNetwork
from pdflow.workload import Rng

S = 10**9
CASES = [
    # title, P, D, NIC bytes/s, transfers/s, transfers
    ("idle: 4P4D, 50 GB/s NICs, 8/s", 4, 4, 50 * S, 8.0, 100_000),
    ("light: 16P16D, 10 GB/s NICs, 64/s", 16, 16, 10 * S, 64.0, 50_000),
    ("half loaded: 2P2D, 5 GB/s NICs, 40/s", 2, 2, 5 * S, 40.0, 50_000),
    ("saturated: 2P2D, 2.5 GB/s NICs, 40/s", 2, 2, 5 * S // 2, 40.0, 20_000),
    ("loaded: 16P16D, 2.5 GB/s NICs, 210/s", 16, 16, 5 * S // 2, 210.0, 10_000),
    ("saturated: 16P16D, 2.5 GB/s NICs, 300/s", 16, 16, 5 * S // 2, 300.0, 4_000),
]


def transfer_all(network: FlowNetwork, arrivals: list[tuple[int, int, int]]) -> int:
    """Carry (ns, path, bytes) arrivals to their ends, and return the most that were under way at once."""
    started, ended, most = 0, 0, 0
    while ended < len(arrivals):
        wake = network.wake_at()
        if started < len(arrivals) and (wake is None or arrivals[started][0] <= wake):
            at, path, nbytes = arrivals[started]
            network.start(path, nbytes, at)
            started += 1
        else:
            assert wake is not None
            ended += len(network.advance(wake))
        most = max(most, started - ended)
    return most


def main() -> None:
    """Print one line per case."""
    for title, producers, consumers, bandwidth, rate_rps, count in CASES:
        took = []
        for _ in range(3):
            network, gaps, choice = FlowNetwork(), Rng(1).stream("arrivals"), Rng(1).stream("choice")
            tx = [network.add_resource(f"tx{i}", bandwidth) for i in range(producers)]
            rx = [network.add_resource(f"rx{i}", bandwidth) for i in range(consumers)]
            paths = [network.path([a, b]) for a in tx for b in rx]
            at, arrivals = 0, []
            for _ in range(count):
                at += int(gaps.exponential(S / rate_rps))
                arrivals.append((at, paths[choice.below(len(paths))], choice.integer(512, 1536) * 131_072))
            begin = time.process_time()
            most = transfer_all(network, arrivals)
            took.append(time.process_time() - begin)
        us = min(took) / count * 1e6
        print(f"{title:44}{us:8.1f} µs/transfer {1e6 / us:10,.0f} transfers/s   {most:5} at once")


if __name__ == "__main__":
    main()
