"""Which Host headers a server accepts: protection against DNS rebinding.

A web page can make a browser send requests to this host: its own name resolves to our address from one moment to the
next, and then the browser takes our answers for the page's own. Such a request has the page's name in its Host header.
An IP address in it is no name, so it is accepted, as `localhost` is, and the names that the scenario lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpRequest

HOST: Final = b"host"
KEPT: Final = 64
"""The most values that are kept as accepted: with ports, few exist."""


class HostCheck:
    """Args: `names`, accepted besides IP addresses and localhost."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: Final = frozenset(name.lower() for name in ("localhost", *names))
        self._accepted: Final[set[bytes]] = set()

    def check(self, request: HttpRequest) -> None:
        """Raise OpenAIError for a request that names another host. One without the header does not come from a
        browser."""
        value = request.header(HOST)
        if value is None or value in self._accepted:
            return
        if not self._is_ours(value):
            shown = value[:100].decode("ascii", "replace")
            raise OpenAIError(
                403,
                f"the Host header {shown!r} is not a name of this server: use its IP address or localhost, or list the "
                "name in serve.host_names (this prevents DNS rebinding)",
                code="forbidden",
            )
        if len(self._accepted) < KEPT:
            self._accepted.add(value)

    def _is_ours(self, value: bytes) -> bool:
        text = value.decode("latin-1").strip().lower()
        host = text[1:].partition("]")[0] if text.startswith("[") and "]" in text else text.partition(":")[0]
        if host.rstrip(".") in self._names:
            return True
        try:
            ip_address(host)
        except ValueError:
            return False
        return True
