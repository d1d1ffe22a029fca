"""Where the parts of a live cluster are: what a part says of itself when it is up, a line of JSON.

The router hears of engines in the same words, on its stdin: one line for each that is up, or lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

from runtime.kv_params import Coordinates

LOOPBACK: Final = "127.0.0.1"
"""Where engines are: frames and KV ask nobody who they are, so they stay on this host."""


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


class EnginePlace(msgspec.Struct, frozen=True, tag="up"):
    """An engine takes requests at `http`, and its ranks hear at `kv`."""

    engine: str
    http: Coordinates
    kv: Coordinates


class EngineGone(msgspec.Struct, frozen=True, tag="gone"):
    """Its process has ended."""

    engine: str


News = EnginePlace | EngineGone
read_news = msgspec.json.Decoder(News).decode
