"""Memory that GPUs reach, as tensors of torch: allocated on a GPU, another process's, or this process's own, pinned.

All are at one address for the host and for kernels, so a kernel can gather what lies in host memory, and scatter into
it, at the speed of PCIe. On an H200 that is 47 to 51 GB/s from pieces of 512 bytes on, where one copy call for each
piece takes 6 to 8 us (`python -m benchmarks.gpu copies`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import numpy as np

from pdflow_runtime.gpu import driver

_kept: Final[list[memoryview]] = []
"""Memory that is pinned: it must stay where it is as long as it is."""


def allocate(nbytes: int, gpu: int) -> Any:
    """Return zeroed memory of a GPU, a tensor of uint8 `[nbytes]`. GpuError if the GPU has not so much free."""
    torch: Any = import_module("torch")
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(gpu)
        raise driver.GpuError(
            f"cannot allocate {nbytes >> 20:,} MiB for KV on GPU {gpu}, which has {free >> 20:,} MiB free: set a lower "
            "kv_tokens in [[pool]], or give each engine its own GPU with devices"
        ) from None


def tensor_at(address: int, nbytes: int, device: str) -> Any:
    """Return a tensor of uint8 `[nbytes]` over memory that a device reaches at this address, whatever that belongs to.
    It keeps nothing alive."""
    torch: Any = import_module("torch")
    # By `__cuda_array_interface__`, torch looks up whose an address is, and copies the memory of another device.
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device(device), nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def pinned(memory: memoryview, gpu: int) -> Any:
    """Pin memory of this process, and keep it, until the process ends; return a tensor over it as the GPU reaches it.
    GpuError."""
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    driver.attach(gpu)
    try:
        driver.pin(address, len(memory))
    except driver.GpuError as error:
        raise driver.GpuError(
            f"cannot pin {len(memory) >> 20:,} MiB of host memory for KV ({error}): lower kv_tokens in [[pool]], or "
            'set transfer.kv_buffer_device = "cuda"'
        ) from None
    _kept.append(memory)
    return tensor_at(address, len(memory), f"cuda:{gpu}")
