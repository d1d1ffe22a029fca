"""The region of one rank as a file in shared memory: made by its owner, mapped by peers for reading only.

The file lies in /dev/shm under `pdflow-<pid>-<random>.kv` and belongs to the agent until it closes. A process that is
killed leaves its files behind, so every agent sweeps when it starts: what is swept is what a dead process left, told by
its pid and by a lock that the kernel takes away with the process (a pid alone means nothing in another container).

The socket on which an agent listens lies beside it, and is swept with it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final, Literal

from pdflow_runtime.transports.base import TransportError

FOLDER: Final = Path("/dev/shm")
_NAME = re.compile(r"pdflow-([1-9][0-9]{0,9})-[0-9a-f]{16}\.(kv|sock)")


class OwnedRegion:
    """A region of this process in shared memory. TransportError, in one line, if shared memory cannot hold it."""

    def __init__(self, nbytes: int, folder: Path = FOLDER, name: str | None = None) -> None:
        if nbytes <= 0:
            raise TransportError(f"cannot share a region of {nbytes} bytes")
        self.path: Final = folder / (name or new_name())
        self.nbytes: Final = nbytes
        try:
            if nbytes > _left(folder):
                raise TransportError(_full(folder, nbytes))
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransportError(f"cannot create shared memory in {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Taken before it is touched: otherwise a full /dev/shm kills whoever touches it, by SIGBUS.
            os.posix_fallocate(self._fd, 0, nbytes)
            self.view: Final = memoryview(mmap.mmap(self._fd, nbytes))
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise TransportError(_full(folder, nbytes)) from None

    def close(self) -> None:
        """Remove the file: no peer can map the region any more; those that have mapped it keep it."""
        self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_name() -> str:
    return f"pdflow-{os.getpid()}-{secrets.token_hex(8)}.kv"


def map_region(path: str, nbytes: int, folder: Path = FOLDER) -> memoryview:
    """Map a peer's region for reading. TransportError for anything that is not one of our user's regions."""
    check_path(path, "kv", folder)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot open the peer's memory: {getattr(error, 'strerror', error)}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != nbytes or not nbytes:
            raise TransportError(f"the peer's memory does not have the {nbytes} bytes of its description")
        return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def check_path(path: str, kind: Literal["kv", "sock"], folder: Path = FOLDER) -> None:
    """Raise TransportError for a path that no agent would have named so: no other file is opened because a peer says
    so."""
    where, name = os.path.split(path)
    match = _NAME.fullmatch(name)
    if where != str(folder) or not match or match[2] != kind:
        raise TransportError(f"the peer names a file that is not an agent's file in {folder}")


def sweep(folder: Path = FOLDER) -> list[str]:
    """Remove what dead processes left behind, and return the files' names."""
    swept = []
    for entry in sorted(os.listdir(folder)) if folder.is_dir() else ():
        match = _NAME.fullmatch(entry)
        if match and not _alive(int(match[1])) and not _held(folder / f"{entry.partition('.')[0]}.kv"):
            try:
                os.unlink(folder / entry)
            except (FileNotFoundError, PermissionError):
                continue
            swept.append(entry)
    return swept


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _held(path: Path) -> bool:
    """True if a process that we cannot see has the file open as its owner."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _left(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def _full(folder: Path, nbytes: int) -> str:
    return (
        f"{folder} has room for {_left(folder) >> 20:,} MiB, and {-(-nbytes // (1 << 20)):,} MiB are needed: "
        "use fewer KV blocks, or enlarge it (docker run --shm-size, mount -o remount,size=)"
    )
