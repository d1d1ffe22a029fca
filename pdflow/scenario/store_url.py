"""The URL of the server that keeps a store's KV, a key of [serve].

It has no password: scenarios are printed, written beside results and sent to others.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

PORT: Final = 6379
MOST_PORT: Final = 65_535
WITH_TLS: Final = ("valkeys", "rediss")
EXPECTED: Final = (
    "expected valkey://[USER@]HOST:PORT[/DATABASE], or the same with redis://; with TLS valkeys:// or rediss://"
)
_URL: Final = re.compile(
    r"(?P<scheme>valkeys?|rediss?)://(?:(?P<user>[^:@/?#\s]+)@)?(?P<host>[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/(?P<database>[0-9]{1,5})?)?"
)


@attrs.frozen
class StoreUrl:
    scheme: str
    host: str
    port: int
    user: str | None
    database: int

    @property
    def tls(self) -> bool:
        return self.scheme in WITH_TLS

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"


def read_store_url(text: str) -> StoreUrl:
    """Parse a store's URL. Raises ValueError, whose message repeats nothing that may be a password."""
    before, at, _ = text.rpartition("@")
    if at and ":" in before.partition("://")[2]:
        raise ValueError("contains a password; put it into serve.store_password_file or PDFLOW_STORE_PASSWORD")
    match = _URL.fullmatch(text)
    if match is None or int(match["port"] or PORT) > MOST_PORT:
        raise ValueError(f"is {text!r}, {EXPECTED}")
    port, database = int(match["port"] or PORT), int(match["database"] or 0)
    return StoreUrl(match["scheme"], match["host"].strip("[]"), port, match["user"], database)
