"""The functions of CUDA's driver that are used here, by ctypes: to import a torch for CUDA takes seconds.

A thread has a current context, or none. Some libraries do less where there is none, without an error: UCX does not
offer cuda_ipc then (vllm#36475). So `attach` comes before each call of such a library, in the thread that makes it.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, Final

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_ALREADY_REGISTERED: Final = 712
_threads: Final = threading.local()
_retained: dict[int, ctypes.c_void_p] = {}
_lock: Final = threading.Lock()


class GpuError(RuntimeError):
    """A call of CUDA's driver failed; the text names the call and the error."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    """Return CUDA's driver, initialised; None if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuInit(0):
        return None
    address, size = ctypes.c_uint64, ctypes.c_size_t
    driver.cuMemGetAddressRange_v2.argtypes = (ctypes.POINTER(address), ctypes.POINTER(size), address)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcHandle), address)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(address), _IpcHandle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (address,)
    driver.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, size, ctypes.c_uint)
    driver.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
    driver.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    return driver


@cache
def gpus() -> int:
    """Return the number of GPUs that this process may use (CUDA_VISIBLE_DEVICES limits them)."""
    driver, count = _driver(), ctypes.c_int()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def attach(gpu: int) -> None:
    """Make the primary context of a GPU, the one that torch uses, current in this thread. Cheap if it is already."""
    if getattr(_threads, "gpu", None) == gpu:
        return
    with _lock:
        context = _retained.get(gpu)
        if context is None:
            context = ctypes.c_void_p()
            _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
            _retained[gpu] = context
    _call("cuCtxSetCurrent", context)
    _threads.gpu = gpu


def allocation_of(address: int) -> tuple[int, int]:
    """Return the address at which the allocation begins that an address is in, and its size. GpuError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def export(address: int) -> tuple[bytes, int]:
    """Return the handle by which another process opens the allocation that an address is in, and the offset of the
    address in it. GpuError."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle), address - allocation_of(address)[0]


def open_exported(handle: bytes) -> tuple[int, int]:
    """Map another process's allocation; return its address here, and its size. It stays readable until
    `close_exported`, even if its owner ends. GpuError, also if its owner has ended already."""
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value, allocation_of(address.value)[1]


def close_exported(address: int) -> None:
    """Give up another process's allocation. The device waits for nothing: no copy may be under way. GpuError."""
    _call("cuIpcCloseMemHandle", address)


def pin(address: int, nbytes: int) -> None:
    """Lock memory of this process in place, so that GPUs reach it at the same address. GpuError."""
    _call("cuMemHostRegister_v2", address, nbytes, 0, ignored=(_ALREADY_REGISTERED,))


def unpin(address: int) -> None:
    _call("cuMemHostUnregister", address)


def _call(name: str, *args: Any, ignored: tuple[int, ...] = ()) -> None:
    driver = _driver()
    if driver is None:
        raise GpuError(f"{name}: no CUDA driver was found")
    result = getattr(driver, name)(*args)
    if result and result not in ignored:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise GpuError(f"{name}: {(text.value or b'').decode() or f'error {result}'}")
