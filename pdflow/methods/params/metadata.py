"""The address of Mooncake's metadata server: an HTTP server, or none, and peers shake hands. etcd and redis are
refused."""

from __future__ import annotations

from typing import Final

from pdflow.methods.params.errors import ParamsError, quoted
from pdflow.methods.params.fields import Kind
from pdflow.methods.params.kinds import bounded_text

MAX_SERVER_BYTES: Final = 1_024
P2P_HANDSHAKE: Final = "P2PHANDSHAKE"

_FIELD: Final = "metadata_server"
_SERVERS: Final = f'"http://HOST:PORT/metadata", or "{P2P_HANDSHAKE}" for none'

SERVER: Final = Kind(expected=_SERVERS, problem=lambda value: bounded_text(value, MAX_SERVER_BYTES))


def metadata_url_of(server: str, backend: str | None) -> str | None:
    """Return the URL of the metadata server, None where peers shake hands; ParamsError for everything else.

    `backend` is an optional key of V0's files. If neither names a kind, Mooncake assumes etcd.
    """
    scheme, mark, rest = server.rpartition("://")
    kinds = {name.lower() for name in (backend, scheme) if name}
    for kind in ("etcd", "redis"):
        if kind in kinds:
            raise ParamsError(_FIELD, f"is for {kind} ({quoted(server)}), which pdflow does not support", _SERVERS)
    if server == P2P_HANDSHAKE and not kinds:
        return None
    if not rest.partition("/")[0] or not all(c.isprintable() and not c.isspace() for c in rest):
        raise ParamsError(_FIELD, f"is {quoted(server)}", _SERVERS)
    if not kinds:
        wrong = f"is {quoted(server)}, for etcd by Mooncake's rule, which pdflow does not support"
        raise ParamsError(_FIELD, wrong, _SERVERS)
    if not kinds <= {"http", "https"}:
        what = "" if backend is None else f" with the metadata_backend {quoted(backend)}"
        raise ParamsError(_FIELD, f"is {quoted(server)}{what}", _SERVERS)
    return server if mark else f"http://{server}"
