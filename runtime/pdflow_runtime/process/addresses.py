"""Where the parts of a live cluster are: what a part says of itself, a line of JSON.

The router hears of engines in the same words from whoever knows: from the supervisor that has started them, on its
stdin, or from the engines themselves, in requests (`reports.py`).
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

import msgspec

from pdflow_runtime.nodes.kv_params import Coordinates

LOOPBACK: Final = "127.0.0.1"
MAX_PORT: Final = 65_535
_HOST: Final = re.compile(r"[0-9A-Za-z.:%_-]{1,255}")


def is_loopback(host: str) -> bool:
    """Whether nobody beyond this machine is there. A name that only begins like an address is a name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def reached_at(host: str) -> str:
    """Where one reaches, on this host, what listens there."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def url_of(at: Coordinates) -> str:
    host = f"[{at.host}]" if ":" in at.host else at.host
    return f"http://{host}:{at.port}"


def is_address(at: Coordinates) -> bool:
    """Whether somebody could be reached there, for all that can be told by looking."""
    return _HOST.fullmatch(at.host) is not None and 0 < at.port <= MAX_PORT


class EngineAddress(msgspec.Struct, frozen=True, tag="up"):
    """An engine takes requests at `http`, and its ranks hear at `kv`."""

    engine: str
    http: Coordinates
    kv: Coordinates
    incarnation: int = 0
    born_ns: int = 0
    """When this life began, by its host's wall clock: of two that say that they are this engine, it is the younger."""
    drained: bool = False
    """What a router has answered its latest report: one that begins anew learns it from here."""


class EngineLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """It has been told to end: it gets nothing new, and ends what it has."""

    engine: str
    incarnation: int


class EngineGone(msgspec.Struct, frozen=True, tag="gone"):
    """Its process has ended; whichever life it was in if that is not said."""

    engine: str
    incarnation: int | None = None
    for_good: bool = False
    """It was told to, and nobody starts it again unasked."""


class ReportAnswer(msgspec.Struct, frozen=True):
    """What a report is answered."""

    drained: bool = False


class RouterAddress(msgspec.Struct, frozen=True, tag="router"):
    """What engines hear: where they are to report."""

    at: Coordinates


News = EngineAddress | EngineLeaving | EngineGone
read_news = msgspec.json.Decoder(News).decode
read_report_answer = msgspec.json.Decoder(ReportAnswer).decode
read_router = msgspec.json.Decoder(RouterAddress).decode
