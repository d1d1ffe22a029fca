"""The secret that instances share beyond loopback: PDFLOW_SECRET, as for pdflow's own clusters."""

from __future__ import annotations

import os

from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.secret import LEAST_BYTES, MOST_BYTES, VARIABLE, Secret
from pdflow_runtime.vllm.options import UnsupportedError


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
