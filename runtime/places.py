"""Where the parts of a live cluster are: what a part says of itself when it is up, a line of JSON.

The router hears of engines in the same words, on its stdin: one line for each that is up, or lost.
"""

from __future__ import annotations

import msgspec

from runtime.kv_params import Coordinates


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
