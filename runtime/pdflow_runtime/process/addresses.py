"""The addresses of the processes of a live cluster, and the reports in which they are announced, each a line of JSON.

The router gets reports of engines in the same form from two sources: from the supervisor that has started them, on its
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
    """True if the host is reachable from this machine only. A name that merely begins like an address is a name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def reached_at(host: str) -> str:
    """Return the address at which, on this host, a server that listens on `host` is reached."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def url_of(at: Coordinates, tls: bool = False) -> str:
    host = f"[{at.host}]" if ":" in at.host else at.host
    return f"{'https' if tls else 'http'}://{host}:{at.port}"


def is_address(at: Coordinates) -> bool:
    """True if this is the form of an address that can be connected to."""
    return _HOST.fullmatch(at.host) is not None and 0 < at.port <= MAX_PORT


class EngineAddress(msgspec.Struct, frozen=True, tag="up"):
    """The report that an engine is up: it takes requests at `http`, and its ranks listen at `kv`."""

    engine: str
    http: Coordinates
    kv: Coordinates
    incarnation: int = 0
    born_ns: int = 0
    """When this incarnation began, by its host's wall clock: of two that report as this engine, the younger counts."""
    drained: bool = False
    """The router's answer to the latest report: a router that has restarted learns it from here."""


class EngineLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The report that an engine drains: it gets no new requests, and ends those that it has."""

    engine: str
    incarnation: int


class EngineGone(msgspec.Struct, frozen=True, tag="gone"):
    """The report that an engine's process has ended; without an incarnation, whichever it had."""

    engine: str
    incarnation: int | None = None
    for_good: bool = False
    """The engine was ordered to end, and is not started again without an order."""


class DrainOrder(msgspec.Struct, frozen=True, tag="drained"):
    """An operator's order that an engine gets no new requests (or gets them again): the router reports it to the
    supervisor, and the supervisor to a router that it has restarted. `removed`: the engine is to end when it is
    drained."""

    engine: str
    drained: bool
    removed: bool = False


class StartOrder(msgspec.Struct, frozen=True, tag="start"):
    """The router's order to the supervisor to start an engine."""

    engine: str


class AllReported(msgspec.Struct, frozen=True, tag="all"):
    """The line after which the router knows what the supervisor knew when it started the router."""


class ReportAnswer(msgspec.Struct, frozen=True):
    """The router's answer to a report."""

    drained: bool = False


class RouterAddress(msgspec.Struct, frozen=True, tag="router"):
    """The line that tells an engine where the router is, to which it reports."""

    at: Coordinates


EngineNews = EngineAddress | EngineLeaving | EngineGone
"""What an engine reports of itself."""
News = EngineNews | DrainOrder | AllReported
"""What the supervisor reports to its router."""
Order = StartOrder | DrainOrder
"""What the router reports to its supervisor."""
read_news = msgspec.json.Decoder(News).decode
read_order = msgspec.json.Decoder(Order).decode
read_report_answer = msgspec.json.Decoder(ReportAnswer).decode
read_router = msgspec.json.Decoder(RouterAddress).decode
