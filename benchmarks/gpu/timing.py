"""Times of work on a GPU: medians of events on its stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


def gpu_us(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median time of `work` on the GPU, in microseconds."""
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(sorted(times)[len(times) // 2])


def in_graph_us(work: Callable[[], object], count: int = 1) -> float:
    """Return the time of one `work` of `count` that stand in one CUDA graph, in microseconds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    return gpu_us(graph.replay) / count


def copy_bytes_per_s(nbytes: int = 4 << 30) -> float:
    """Return the memory's bandwidth: that of a copy on the GPU, bytes read and written."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / (gpu_us(lambda: target.copy_(source), 10) / 1e6)
