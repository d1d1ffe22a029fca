"""The secret of a cluster on one host for which the scenario has none: the supervisor makes one at each start.

Its processes inherit it in their environment, which only their user can read. Operators read it from a file that only
this user can read, named by the router's address: in $XDG_RUNTIME_DIR/pdflow, or in the cache
($XDG_CACHE_HOME/pdflow/run) where there is no such directory. The file is a header for curl: `curl -H @FILE
http://127.0.0.1:8000/admin/state`. The supervisor keeps it locked: that of a cluster that was killed is not used.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from pdflow_runtime.process.addresses import LOOPBACK
from pdflow_runtime.security.secret import Secret

PREFIX: Final = b"authorization: Bearer "


def new_secret() -> str:
    """Return a new secret, for `LOCAL_VARIABLE` of each process of the cluster."""
    return secrets.token_hex(32)


def operators_file(host: str, port: int) -> Path:
    """Return the path of the operators' file of the router that is reached at this address."""
    name = f"router-{port}.header" if host in (LOOPBACK, "localhost") else f"router-{host}-{port}.header"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "pdflow" / name
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pdflow" / "run" / name


@contextmanager
def written_for_operators(host: str, port: int, text: str) -> Iterator[Path]:
    """Keep the operators' file while the context is open. OSError if it cannot be written."""
    path = operators_file(host, port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()  # of a cluster that was killed; its mode is not trusted
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    content = PREFIX + text.encode() + b"\n"
    with open(descriptor, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        file.write(content)
        file.flush()
        try:
            yield path
        finally:
            with suppress(OSError):
                if path.read_bytes() == content:
                    path.unlink()


def operators_secret(host: str, port: int) -> Secret | None:
    """Return the secret of the cluster whose router is reached at this address of this host, if it has made one and
    still runs."""
    try:
        with operators_file(host, port).open("rb") as file:
            if not _is_locked(file):
                return None
            text = file.read()
    except OSError:
        return None
    return Secret(text.removeprefix(PREFIX).strip()) if text.startswith(PREFIX) else None


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
