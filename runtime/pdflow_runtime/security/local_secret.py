"""The secret of a cluster on one host for which the scenario has none: the supervisor makes one at each start.

Its processes inherit it in their environment, which only their user can read. Operators read it from a file that only
this user can read, named by the router's port: in $XDG_RUNTIME_DIR/pdflow, or in the cache ($XDG_CACHE_HOME/pdflow/run)
where there is no such directory. The file is a header for curl: `curl -H @FILE http://127.0.0.1:8000/admin/state`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pdflow_runtime.security.secret import Secret

PREFIX: Final = b"authorization: Bearer "


def new_secret() -> str:
    """Return a new secret, for `LOCAL_VARIABLE` of each process of the cluster."""
    return secrets.token_hex(32)


def operators_file(port: int) -> Path:
    """Return the path of the operators' file of the router at this port."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "pdflow" / f"router-{port}.header"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pdflow" / "run" / f"router-{port}.header"


@contextmanager
def written_for_operators(port: int, text: str) -> Iterator[Path]:
    """Keep the operators' file while the context is open. OSError if it cannot be written."""
    path = operators_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()  # of a cluster that was killed; its mode is not trusted
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    content = PREFIX + text.encode() + b"\n"
    with open(descriptor, "wb") as file:
        file.write(content)
    try:
        yield path
    finally:
        with suppress(OSError):
            if path.read_bytes() == content:
                path.unlink()


def operators_secret(port: int) -> Secret | None:
    """Return the secret of the cluster whose router is at this port of this host, if it has made one."""
    try:
        text = operators_file(port).read_bytes()
    except OSError:
        return None
    return Secret(text.removeprefix(PREFIX).strip()) if text.startswith(PREFIX) else None
