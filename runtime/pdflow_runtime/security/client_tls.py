"""TLS of the router's clients: the router's certificate, which is read again when its files change.

Each connection is made with the certificate of its time. Clients present none: they are known by their API keys.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.values import Instant
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.clock import now_ns
from pdflow_runtime.security.reloaded import Reloaded

KEYS: Final = ("client_tls_cert", "client_tls_key")


def uses_tls(scenario: ResolvedScenario) -> bool:
    """True if clients of the scenario's router use https."""
    return scenario.serve.client_tls_cert is not None


def client_tls_of(scenario: ResolvedScenario, clock: Callable[[], Instant] = now_ns) -> Reloaded[ssl.SSLContext] | None:
    """Return the context of the router's listener, by the files of [serve]; None if it names none. ScenarioError if
    only one is named, or they cannot be used."""
    named = [getattr(scenario.serve, key) for key in KEYS]
    if named == [None, None]:
        return None
    for key, value in zip(KEYS, named, strict=True):
        if value is None:
            problem = "is missing: https needs client_tls_cert and client_tls_key"
            raise ScenarioError([Problem(scenario.path, f"serve.{key}", problem)])
    files = [scenario.base_dir / value for value in named]

    def read() -> ssl.SSLContext:
        try:
            return server_context(*files)
        except OSError as error:
            shown = ", ".join(map(str, files))
            raise ScenarioError([Problem(scenario.path, "serve.client_tls_cert", f"{shown}: {error}")]) from None

    return Reloaded("certificate for clients", files, read, clock)


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a server with that certificate. OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    # With an empty password: one that is needed would else be asked for at the terminal.
    context.load_cert_chain(cert, key, password="")
    return context


def reporting_context(scenario: ResolvedScenario) -> ssl.SSLContext | None:
    """Return the context with which engines report to the port for clients, if the router uses TLS there; None for a
    router without. They do so where there is no cluster port (serve.cluster_port).

    The router's certificate is not verified: its authority may be unknown here. Reports contain no secrets, and prove
    by themselves where they come from (`signed.py`); over plain HTTP it is the same.
    """
    if not uses_tls(scenario):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
