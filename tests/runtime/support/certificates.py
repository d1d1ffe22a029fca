"""Certificates of one authority for all agents of the tests, those in other processes too."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from datetime import datetime
from functools import cache
from pathlib import Path

import trustme

from pdflow.errors import PdflowError
from pdflow_runtime.security.tls import KEYS, Tls, tls_by

VARIABLE = "PDFLOW_TEST_CERTIFICATES"
"""It tells child processes the folder."""


def certify(folder: Path, authority: trustme.CA, name: str = "any.name", not_after: datetime | None = None) -> None:
    """Write the files of a component, each by the name of its key. Args: `name`, which the certificate has."""
    issued = authority.issue_cert(name, not_after=not_after)
    authority.cert_pem.write_to_path(folder / "tls_ca")
    issued.cert_chain_pems[0].write_to_path(folder / "tls_cert")
    issued.private_key_pem.write_to_path(folder / "tls_key")


def tls_in(folder: Path) -> Tls:
    def failure(key: str, problem: str) -> PdflowError:
        return PdflowError(f"{key} {problem}")

    made = tls_by({key: folder / key for key in KEYS}, failure, lambda: 0)
    assert made
    return made


@cache
def cluster_tls() -> Tls:
    """What any agent of the tests has."""
    if VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="pdflow-certificates-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        certify(Path(folder), trustme.CA())
        os.environ[VARIABLE] = folder
    return tls_in(Path(os.environ[VARIABLE]))
