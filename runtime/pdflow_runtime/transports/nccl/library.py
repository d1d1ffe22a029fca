"""The functions of NCCL that are used here, by the names of vLLM's pynccl, and the libraries that provide them.

Where vLLM is installed its NCCLLibrary is used; else this binding of the same few functions; and on a machine without a
GPU, where NCCL refuses to open a group, a stand-in (nccl/standin.py).
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from pdflow_runtime.transports.base import MissingBackend

INSTALL: Final = "pip install nvidia-nccl-cu12"
ID_BYTES: Final = 128
UINT8: Final = 1
_PYNCCL: Final = "vllm.distributed.device_communicators.pynccl_wrapper"


class Library(Protocol):
    """The functions of NCCL that are used. Failures are RuntimeErrors. Sends and receives may return before their bytes
    have moved: the CUDA stream tells when."""

    def ncclGetVersion(self) -> str: ...

    def ncclGetUniqueId(self) -> Any: ...

    def unique_id_from_bytes(self, data: bytes) -> Any: ...

    def ncclCommInitRank(self, world_size: int, unique_id: Any, rank: int) -> Any:
        """Join a group, and return its communicator when all ranks have called this."""

    def ncclSend(self, sendbuff: Any, count: int, datatype: int, dest: int, comm: Any, stream: Any) -> None: ...

    def ncclRecv(self, recvbuff: Any, count: int, datatype: int, src: int, comm: Any, stream: Any) -> None: ...

    def ncclGroupStart(self) -> None: ...

    def ncclGroupEnd(self) -> None: ...

    def ncclCommAbort(self, comm: Any) -> None: ...


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Nccl:
    """A binding of the NCCL library itself. RuntimeError for whatever it refuses, with its own words."""

    def __init__(self, path: str) -> None:
        self._library: Final = ctypes.CDLL(path)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, kinds in {
            "ncclGetVersion": (ctypes.POINTER(number),),
            "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
            "ncclCommInitRank": (ctypes.POINTER(pointer), number, UniqueId, number),
            "ncclSend": (pointer, size, number, number, pointer, pointer),
            "ncclRecv": (pointer, size, number, number, pointer, pointer),
            "ncclGroupStart": (),
            "ncclGroupEnd": (),
            "ncclCommAbort": (pointer,),
        }.items():
            getattr(self._library, name).argtypes = kinds

    def _call(self, name: str, *args: Any) -> None:
        result = getattr(self._library, name)(*args)
        if result:
            raise RuntimeError(f"NCCL error: {self._library.ncclGetErrorString(result).decode()}")

    def ncclGetVersion(self) -> str:
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return f"{version.value // 10_000}.{version.value // 100 % 100}.{version.value % 100}"

    def ncclGetUniqueId(self) -> UniqueId:
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return made

    def unique_id_from_bytes(self, data: bytes) -> UniqueId:
        return UniqueId.from_buffer_copy(data)

    def ncclCommInitRank(self, world_size: int, unique_id: UniqueId, rank: int) -> ctypes.c_void_p:
        comm = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(comm), world_size, unique_id, rank)
        return comm

    def ncclSend(self, sendbuff: Any, count: int, datatype: int, dest: int, comm: Any, stream: Any) -> None:
        self._call("ncclSend", sendbuff, count, datatype, dest, comm, stream)

    def ncclRecv(self, recvbuff: Any, count: int, datatype: int, src: int, comm: Any, stream: Any) -> None:
        self._call("ncclRecv", recvbuff, count, datatype, src, comm, stream)

    def ncclGroupStart(self) -> None:
        self._call("ncclGroupStart")

    def ncclGroupEnd(self) -> None:
        self._call("ncclGroupEnd")

    def ncclCommAbort(self, comm: Any) -> None:
        self._call("ncclCommAbort", comm)


def library_path() -> str | None:
    """Return the path at which NCCL is installed: that of vLLM's variable, or pip's. None if it is not installed."""
    configured = os.environ.get("VLLM_NCCL_SO_PATH")
    packages = find_spec("nvidia")
    folders = (packages.submodule_search_locations or ()) if packages else ()
    found = [path for folder in folders if (path := Path(folder, "nccl", "lib", "libnccl.so.2")).exists()]
    return configured or (str(found[0]) if found else None)


def real_library() -> Library:
    """Return vLLM's binding of NCCL, or this one. MissingBackend if NCCL is not installed."""
    if find_spec("vllm") is not None:
        found: Library = import_module(_PYNCCL).NCCLLibrary()
        return found
    path = library_path()
    if path is None:
        raise MissingBackend(f"the transport 'nccl' needs NCCL where there are GPUs: {INSTALL}")
    return Nccl(path)
