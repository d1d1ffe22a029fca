"""The address of Mooncake's metadata server: etcd, redis or an HTTP server, or none, and peers shake hands.

Every address that Mooncake takes is accepted. pdflow itself contacts no metadata server, so an address has no effect on
a scenario; `scenario/transfer_config.py` reports that.
"""

from __future__ import annotations

import re
from typing import Final

from pdflow.methods.params.address import AddressError, split_address
from pdflow.methods.params.errors import ParamsError, quoted
from pdflow.methods.params.fields import Kind
from pdflow.methods.params.kinds import bounded_text

MAX_SERVER_BYTES: Final = 1_024
P2P_HANDSHAKE: Final = "P2PHANDSHAKE"
ASSUMED: Final = "etcd"
"""What Mooncake takes an address without a scheme for, if no metadata_backend says otherwise."""
KINDS: Final = ("etcd", "redis", "http", "https")

_FIELD: Final = "metadata_server"
_SERVERS: Final = (
    f'"etcd://HOST:PORT", or several separated by commas, "redis://HOST:PORT", "http://HOST:PORT/metadata", or '
    f'"{P2P_HANDSHAKE}" for none'
)
_BETWEEN: Final = re.compile("[,;]")

SERVER: Final = Kind(expected=_SERVERS, problem=lambda value: bounded_text(value, MAX_SERVER_BYTES))


def metadata_url_of(server: str, backend: str | None) -> str | None:
    """Return the URL of the metadata server, None where peers shake hands; ParamsError for what is neither.

    `backend` is an optional key of V0's files. If neither names a kind, Mooncake assumes etcd.
    """
    scheme, mark, rest = server.rpartition("://")
    kinds = {name.lower() for name in (backend, scheme) if name}
    if server == P2P_HANDSHAKE and not kinds:
        return None
    if len(kinds) > 1 or not kinds <= set(KINDS):
        what = "" if backend is None else f" with the metadata_backend {quoted(backend)}"
        raise ParamsError(_FIELD, f"is {quoted(server)}{what}", _SERVERS)
    kind = next(iter(kinds), ASSUMED)
    if kind == "etcd":
        _check_etcd(server, rest)
    elif not rest.partition("/")[0] or not all(c.isprintable() and not c.isspace() for c in rest):
        raise ParamsError(_FIELD, f"is {quoted(server)}", _SERVERS)
    return server if mark else f"{kind}://{server}"


def _check_etcd(server: str, members: str) -> None:
    """Check the members of an etcd cluster, HOST:PORT each."""
    for member in _BETWEEN.split(members):
        try:
            split_address(member)
        except AddressError as error:
            raise ParamsError(_FIELD, f"is {quoted(server)}, for etcd: {error}", _SERVERS) from None
