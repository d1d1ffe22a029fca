"""The secret that all components of a cluster share, where they are on several hosts: where it is read from, and the
MACs that are made with it.

It is never sent, but for an operator's own `Authorization: Bearer`. What is sent are MACs (BLAKE2b with a key, RFC
7693) over texts that cannot be taken for each other: each begins with its purpose, and each of its fields with its
length.
"""

from __future__ import annotations

import hmac
import os
from hashlib import blake2b
from typing import Final

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.process.addresses import is_loopback

VARIABLE: Final = "PDFLOW_SECRET"
LOCAL_VARIABLE: Final = "PDFLOW_LOCAL_SECRET"
"""The secret that a supervisor has made for the processes of this host (`local_secret.py`)."""
LEAST_BYTES: Final = 16
"""The shortest secret: `openssl rand -hex 32` makes one."""
MOST_BYTES: Final = 4096
MAC_BYTES: Final = 32
_OTHERS: Final = 0o077
_OTHERS_OF_ROOTS: Final = 0o037
"""The same for root's files: their group may read them. Kubernetes mounts secrets so (fsGroup), and PostgreSQL accepts
it for its key."""


class Secret:
    """Args: `local`, whether a supervisor made it for the processes of its host."""

    def __init__(self, text: bytes, *, local: bool = False) -> None:
        self.local: Final = local
        self._text: Final = text
        self._key: Final = blake2b(text, digest_size=MAC_BYTES, person=b"pdflow secret").digest()

    def mac(self, what_for: bytes, *fields: bytes | memoryview) -> bytes:
        """Return the MAC [MAC_BYTES] of these fields in this order, for this purpose."""
        hashed = blake2b(key=self._key, digest_size=MAC_BYTES)
        for field in (what_for, *fields):
            hashed.update(len(field).to_bytes(8, "big"))
            hashed.update(field)
        return hashed.digest()

    def is_mac(self, claimed: bytes | memoryview, what_for: bytes, *fields: bytes | memoryview) -> bool:
        """True if this is the MAC of these fields, compared in a time that does not depend on how nearly it is
        right."""
        return hmac.compare_digest(claimed, self.mac(what_for, *fields))

    def is_text(self, claimed: bytes) -> bool:
        return hmac.compare_digest(claimed, self._text)


def secret_beyond_loopback(scenario: ResolvedScenario, key: str) -> Secret | None:
    """Return the cluster's secret, or the one that the supervisor of this process has made. ScenarioError if there is
    none in the scenario or the environment, and the address that this key of [serve] names is not this host's
    alone."""
    secret, host = secret_of(scenario), getattr(scenario.serve, key)
    if secret is None and not is_loopback(host):
        problem = (
            f"is {host}: beyond loopback a cluster secret is required: set serve.secret_file or {VARIABLE}, "
            "the same on every host"
        )
        raise ScenarioError([Problem(scenario.path, f"serve.{key}", problem)])
    return secret or local_secret()


def local_secret() -> Secret | None:
    """Return the secret that the supervisor of this process has made; None if there is none."""
    text = os.environ.get(LOCAL_VARIABLE)
    return None if text is None else Secret(os.fsencode(text), local=True)


def secret_of(scenario: ResolvedScenario) -> Secret | None:
    """Return the secret from the scenario's file or the environment. ScenarioError for one that is too short or long,
    or whose file others may read."""
    named = scenario.serve.secret_file
    if named is None:
        text = os.environ.get(VARIABLE)
        return None if text is None else _checked(scenario, VARIABLE, os.fsencode(text))
    return _checked(scenario, str(scenario.base_dir / named), private_text(scenario, "secret_file", named))


def private_text(scenario: ResolvedScenario, key: str, named: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the contents of the file that this key of [serve] names, no more than a byte over `most_bytes`.
    ScenarioError if others may read it."""
    path = scenario.base_dir / named
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(most_bytes + 1)
    except OSError as error:
        raise _wrong(scenario, f"{path} cannot be read: {error.strerror}", key) from None
    if found.st_mode & (_OTHERS_OF_ROOTS if found.st_uid == 0 != os.geteuid() else _OTHERS):
        raise _wrong(scenario, f"{path} is readable by other users: chmod 600 {path}", key)
    return text


def _checked(scenario: ResolvedScenario, where: str, text: bytes) -> Secret:
    stripped = text.strip()
    if not LEAST_BYTES <= len(stripped) <= MOST_BYTES:
        size = f"{len(stripped)} bytes, expected {LEAST_BYTES} to {MOST_BYTES:,}"
        raise _wrong(scenario, f"{where} has {size}: `openssl rand -hex 32` prints a suitable one")
    return Secret(stripped)


def _wrong(scenario: ResolvedScenario, message: str, key: str = "secret_file") -> ScenarioError:
    return ScenarioError([Problem(scenario.path, f"serve.{key}", message)])
