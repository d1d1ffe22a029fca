"""Copies of scattered pieces: on the GPU, and between it and pinned host memory, by kernels and by a call for each."""

from __future__ import annotations

import mmap

import torch

from benchmarks.gpu.timing import copy_bytes_per_s, gpu_us
from pdflow_runtime.gpu.memory import pinned

NBYTES = 1 << 30
SHARE = 8
"""One of so many pieces is copied."""


def main() -> int:
    host = pinned(memoryview(mmap.mmap(-1, NBYTES)), 0)
    device = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device="cuda")
    print(f"copy on the GPU, bytes read and written: {copy_bytes_per_s() / 1e12:.2f} TB/s")
    for name, target, source in (("to host memory", host, device), ("from host memory", device, host)):
        print(f"copy of 1 GiB {name}: {NBYTES / gpu_us(lambda t=target, s=source: t.copy_(s), 5) / 1e3:.1f} GB/s")
    print("| piece | gathered on the GPU | kernels to host memory | kernels from it | a call for each piece |")
    print("| --- | --- | --- | --- | --- |")
    for piece in (512, 4096, 16 << 10, 64 << 10, 256 << 10):
        count = NBYTES // piece // SHARE
        rows = torch.randperm(NBYTES // piece, device="cuda")[:count]
        here, there = (memory.view(torch.int64).view(-1, piece // 8) for memory in (device, host))
        out = torch.empty(count, piece // 8, dtype=torch.int64, device="cuda")
        gathered = gpu_us(lambda o=out, h=here, r=rows: torch.index_select(h, 0, r, out=o), 5)
        stored = gpu_us(lambda t=there, h=here, r=rows: t.index_copy_(0, r, h.index_select(0, r)), 5)
        loaded = gpu_us(lambda t=there, h=here, r=rows: h.index_copy_(0, r, t.index_select(0, r)), 5)
        few = rows[:500].tolist()
        each = gpu_us(lambda t=there, h=here, f=few: [t[at].copy_(h[at], non_blocking=True) for at in f], 3) / len(few)
        rates = [f"{count * piece / us / 1e3:,.0f} GB/s" for us in (gathered, stored, loaded)]
        print(f"| {piece:,} B | {' | '.join(rates)} | {each:.1f} us |", flush=True)
    return 0
