"""The functions of NCCL that are used here, by NCCL's own names, and the libraries that provide them.

Groups are opened without blocking, since a call that waits for a rank which never comes could not be ended: calls
return at once, and `ncclCommGetAsyncError` tells when NCCL has done what they ask for. vLLM's NCCLLibrary has no such
calls, and takes "in progress" for an error. So where vLLM is installed, its NCCLLibrary finds and loads NCCL, as it
does for vLLM itself, and this binding calls the library that it has loaded. On a machine without a GPU, where NCCL
refuses to open a group, a stand-in is used (nccl/standin.py).
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from pdflow_runtime.transports.base import MissingBackend

INSTALL: Final = "pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13"
ID_BYTES: Final = 128
UINT8: Final = 1
SUCCESS: Final = 0
IN_PROGRESS: Final = 7
_PYNCCL: Final = "vllm.distributed.device_communicators.pynccl_wrapper"
_SYSTEM: Final = "libnccl.so.2"


class Library(Protocol):
    """The functions of NCCL that are used. Failures are RuntimeErrors. Sends and receives may return before their bytes
    have moved: the CUDA stream tells when, after NCCL has put them there."""

    def ncclGetVersion(self) -> str: ...

    def ncclGetUniqueId(self) -> Any: ...

    def unique_id_from_bytes(self, data: bytes) -> Any: ...

    def ncclCommInitRankConfig(self, world_size: int, unique_id: Any, rank: int) -> Any:
        """Begin to join a group without blocking, and return its communicator."""

    def ncclCommGetAsyncError(self, comm: Any) -> int:
        """Return SUCCESS if all that was asked of the communicator has been put on its stream, or IN_PROGRESS."""

    def ncclSend(self, sendbuff: Any, count: int, datatype: int, dest: int, comm: Any, stream: Any) -> None: ...

    def ncclRecv(self, recvbuff: Any, count: int, datatype: int, src: int, comm: Any, stream: Any) -> None: ...

    def ncclGroupStart(self) -> None: ...

    def ncclGroupEnd(self) -> None: ...

    def ncclCommAbort(self, comm: Any) -> None:
        """End what the communicator's kernels wait for, and free it. No other call may use it from then on."""


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as NCCL 2.14 had it. Later ones take its version as a sign that the fields behind are not set."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class Nccl:
    """A binding of the NCCL library at a path. RuntimeError for whatever it refuses, with its own words. MissingBackend
    if it cannot be loaded, or is older than 2.14."""

    def __init__(self, path: str) -> None:
        try:
            # Not an object that others have made for the same library: the types of arguments are set on it.
            self._library: Final = ctypes.CDLL(path)
        except OSError as error:
            raise MissingBackend(f"the transport 'nccl' cannot load NCCL ({error}): {INSTALL}") from None
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, kinds in {
            "ncclGetErrorString": (number,),
            "ncclGetLastError": (pointer,),
            "ncclGetVersion": (ctypes.POINTER(number),),
            "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
            "ncclCommInitRankConfig": (ctypes.POINTER(pointer), number, UniqueId, number, ctypes.POINTER(_Config)),
            "ncclCommGetAsyncError": (pointer, ctypes.POINTER(number)),
            "ncclSend": (pointer, size, number, number, pointer, pointer),
            "ncclRecv": (pointer, size, number, number, pointer, pointer),
            "ncclGroupStart": (),
            "ncclGroupEnd": (),
            "ncclCommAbort": (pointer,),
        }.items():
            try:
                getattr(self._library, name).argtypes = kinds
            except AttributeError:
                raise MissingBackend(
                    f"the transport 'nccl' needs NCCL 2.14 or later, and {path} has no {name}: {INSTALL}"
                ) from None
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetLastError.restype = ctypes.c_char_p

    def _call(self, name: str, *args: Any) -> None:
        self._check(getattr(self._library, name)(*args))

    def _check(self, result: int) -> None:
        if result in (SUCCESS, IN_PROGRESS):
            return
        error = self._library.ncclGetErrorString(result).decode()
        warning = " ".join((self._library.ncclGetLastError(None) or b"").decode(errors="replace").split())
        raise RuntimeError(f"NCCL error: {error}" + (f"; its last warning: {warning}" if warning else ""))

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

    def ncclCommInitRankConfig(self, world_size: int, unique_id: UniqueId, rank: int) -> ctypes.c_void_p:
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 2_14_00, 0)
        self._call("ncclCommInitRankConfig", ctypes.byref(comm), world_size, unique_id, rank, ctypes.byref(config))
        return comm

    def ncclCommGetAsyncError(self, comm: ctypes.c_void_p) -> int:
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        self._check(state.value)
        return state.value

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
    """Return the path at which NCCL is installed: that of vLLM's variable, pip's, or the system's. None if it is not
    installed."""
    configured = os.environ.get("VLLM_NCCL_SO_PATH")
    if configured:
        return configured
    packages = find_spec("nvidia")
    folders = (packages.submodule_search_locations or ()) if packages else ()
    for folder in folders:
        path = Path(folder, "nccl", "lib", _SYSTEM)
        if path.exists():
            return str(path)
    try:
        ctypes.CDLL(_SYSTEM)
    except OSError:
        return None
    return _SYSTEM


def real_library() -> Library:
    """Return a binding of the NCCL that vLLM uses, or of the one that is installed. MissingBackend without any."""
    if find_spec("vllm") is not None:
        return Nccl(import_module(_PYNCCL).NCCLLibrary().lib._name)
    path = library_path()
    if path is None:
        raise MissingBackend(f"the transport 'nccl' needs NCCL where there are GPUs: {INSTALL}")
    return Nccl(path)
