"""TLS between ranks, both sides with a certificate of the cluster's own authority.

A process with a certificate of that authority is a peer, at whatever address: give one to nothing else.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import trio

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario

KEYS: Final = ("tls_cert", "tls_key", "tls_ca")


class Tls:
    def __init__(self, cert: Path, key: Path, authority: Path) -> None:
        self._opens, self._accepts = (
            _context(kind, cert, key, authority) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )

    def opened(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        return trio.SSLStream(stream, self._opens, https_compatible=True)

    def accepted(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        return trio.SSLStream(stream, self._accepts, server_side=True, https_compatible=True)


def tls_of(scenario: ResolvedScenario) -> Tls | None:
    """Return TLS by the files of [serve]; None if it names none. ScenarioError if only some are named, or a file cannot
    be read."""
    serve_config = scenario.serve
    named = {key: value for key in KEYS if (value := getattr(serve_config, key)) is not None}
    if not named:
        return None
    if missing := [key for key in KEYS if key not in named]:
        raise ScenarioError(
            [
                Problem(scenario.path, f"serve.{key}", "is missing: TLS needs tls_cert, tls_key and tls_ca")
                for key in missing
            ]
        )
    try:
        return Tls(*(scenario.base_dir / named[key] for key in KEYS))
    except OSError as error:
        files = ", ".join(named.values())
        raise ScenarioError([Problem(scenario.path, "serve.tls_cert", f"{files}: {error}")]) from None


def _context(kind: int, cert: Path, key: Path, authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers are known by their authority: their addresses may change from life to life.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)
    context.load_verify_locations(authority)
    return context
