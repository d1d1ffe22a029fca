"""What secures connections between instances: PDFLOW_SECRET, which they share beyond loopback, and certificates, as for
pdflow's own clusters."""

from __future__ import annotations

import os
from pathlib import Path

from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.secret import LEAST_BYTES, MOST_BYTES, VARIABLE, Secret
from pdflow_runtime.security.tls import KEYS, Tls, tls_by
from pdflow_runtime.vllm.options import Options, UnsupportedError


def shared_secret(host: str) -> Secret | None:
    """Return the secret that streams between ranks prove. UnsupportedError if there is none and others than this host
    can reach the address, or if it is too short or too long."""
    text = os.environ.get(VARIABLE)
    if text is None:
        if is_loopback(host):
            return None
        raise UnsupportedError(
            f"host {host} is reachable from other hosts: set {VARIABLE} to one secret for all instances"
        )
    stripped = os.fsencode(text).strip()
    if not LEAST_BYTES <= len(stripped) <= MOST_BYTES:
        raise UnsupportedError(
            f"{VARIABLE} must have {LEAST_BYTES} to {MOST_BYTES:,} bytes; `openssl rand -hex 32` prints a suitable one"
        )
    return Secret(stripped)


def shared_tls(options: Options) -> Tls | None:
    """Return mutual TLS by the files of the options; None if they name none. UnsupportedError if only some are
    named, or one cannot be used."""

    def failure(key: str, problem: str) -> UnsupportedError:
        return UnsupportedError(f"kv_connector_extra_config.{key}: {problem}")

    given = {key: getattr(options, key) for key in KEYS}
    for key, value in given.items():
        if value == "":
            raise failure(key, "is empty; it must be a file")
    return tls_by({key: None if value is None else Path(value) for key, value in given.items()}, failure)
