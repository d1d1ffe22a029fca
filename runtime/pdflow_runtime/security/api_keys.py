"""The API keys of clients: which requests need one, and whose it is.

The file has one key a line, `NAME:KEY`; blank lines, and lines that begin with #, are ignored. A name may have several
keys, so that one can be replaced while the other is still in use. Keys are known here by a MAC only, made with a key of
this process: how long a look-up takes says nothing of a key, and no message can contain one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.values import Instant
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpRequest
from pdflow_runtime.security.reloaded import Reloaded
from pdflow_runtime.security.secret import LEAST_BYTES, private_text
from pdflow_runtime.security.signed import AUTHORIZATION

KEY: Final = "api_keys_file"
MOST_FILE_BYTES: Final = 4 << 20
"""40,000 keys of 100 bytes."""
MOST_KEY_BYTES: Final = 512
OPEN: Final = frozenset(("/health", "/ping", "/metrics", "/version"))
OPEN_BELOW: Final = ("/health/", "/metrics/", "/admin/")
"""Paths that need no key: for load balancers, for Prometheus, and for operators, whom the gate authenticates."""
CHALLENGE: Final = (b"www-authenticate", b"Bearer")
"""Sent with 401 (RFC 9110 11.6.1)."""
_line: Final = re.compile(rb"([0-9A-Za-z][0-9A-Za-z._@-]{0,63})\s*:\s*([!-~]+)")


class ApiKeys:
    """Checks the keys of requests. Args: `names`, by the keys' MACs under `mac_key`."""

    def __init__(self, names: Mapping[bytes, str], mac_key: bytes) -> None:
        self._names: Final = names
        self._mac_key: Final = mac_key

    @classmethod
    def of(cls, text: bytes) -> ApiKeys:
        """Return the keys of a file's content. ValueError, with the number of the line, for a content that is none; it
        does not quote it."""
        mac_key = secrets.token_bytes(32)
        names: dict[bytes, str] = {}
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip()
            if not line or line.startswith(b"#"):
                continue
            found = _line.fullmatch(line)
            if found is None:
                raise ValueError(f"line {number}: expected NAME:KEY, with a key of printable characters without spaces")
            name, key = found.groups()
            if not LEAST_BYTES <= len(key) <= MOST_KEY_BYTES:
                raise ValueError(
                    f"line {number}: the key has {len(key)} bytes, expected {LEAST_BYTES} to {MOST_KEY_BYTES}: "
                    "`openssl rand -hex 32` prints a suitable one"
                )
            if names.setdefault(_mac(mac_key, key), name.decode()) != name.decode():
                raise ValueError(f"line {number}: another name has the same key")
        if not names:
            raise ValueError("there is no key in it, expected lines NAME:KEY")
        return cls(names, mac_key)

    def name_of(self, request: HttpRequest) -> str:
        """Return the name of the request's key. OpenAIError if there is none, or it is unknown."""
        header = request.header(AUTHORIZATION)
        if header is None:
            raise OpenAIError(401, "an API key is required: send `Authorization: Bearer KEY`", code="invalid_api_key")
        scheme, _, key = header.partition(b" ")
        name = self._names.get(_mac(self._mac_key, key.strip())) if scheme.lower() == b"bearer" else None
        if name is None:
            raise OpenAIError(401, "the API key is not valid here", code="invalid_api_key")
        return name


def needs_key(path: str) -> bool:
    """True if only clients with an API key may request this path."""
    return path not in OPEN and not path.startswith(OPEN_BELOW)


def api_keys_of(scenario: ResolvedScenario, clock: Callable[[], Instant] = now_ns) -> Reloaded[ApiKeys] | None:
    """Return the keys in the scenario's file, which is read again when it changes; None if it names no file.
    ScenarioError for one that others may read, or that is malformed."""
    named = scenario.serve.api_keys_file
    if named is None:
        return None
    path = scenario.base_dir / named

    def read() -> ApiKeys:
        text = private_text(scenario, KEY, named, MOST_FILE_BYTES)
        try:
            if len(text) > MOST_FILE_BYTES:
                raise ValueError(f"more than {MOST_FILE_BYTES:,} bytes")
            return ApiKeys.of(text)
        except ValueError as error:
            raise ScenarioError([Problem(scenario.path, f"serve.{KEY}", f"{path}: {error}")]) from None

    return Reloaded("API keys", [path], read, clock)


def _mac(mac_key: bytes, key: bytes) -> bytes:
    return blake2b(key, key=mac_key, digest_size=32, person=b"pdflow api key").digest()
