"""Which Ray cluster runs tasks: the one that RAY_ADDRESS names, the one that this machine belongs to, or a local one.

That order is Ray's own. Unlike Ray, it does not wait for minutes for a cluster that has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import ray

from pdflow.errors import Problem, ScenarioError

START_LOCAL: Final = "local"
"""Ray's word for: start one, even if another is running."""
ANSWER_S: Final = 5.0
"""How long the head of a cluster may take to accept a connection."""
QUIET: Final = {"logging_level": logging.ERROR, "log_to_driver": False}


def connect(workers: int, oom_retries: int) -> None:
    """Connect to a running cluster, or start a local one. `ray.shutdown` undoes either.

    `workers` and `oom_retries`, how often a task is run again for which memory ran out, are those of a local one.
    Raises ScenarioError if no cluster is at RAY_ADDRESS.
    """
    with _sigterm_kept(), warnings.catch_warnings(action="ignore"):
        if _is_running():
            ray.init(address="auto", **QUIET)
            return
        # The same modules as here, whatever was added to sys.path.
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        ray.init(
            address=START_LOCAL,
            num_cpus=workers,
            include_dashboard=False,
            runtime_env={"env_vars": environment},
            _system_config={"task_oom_retries": oom_retries},
            **QUIET,
        )


def _is_running() -> bool:
    """Whether a cluster is to be connected to. Raises ScenarioError if RAY_ADDRESS names one that does not answer."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named == START_LOCAL:
        return False
    if not named or named == "auto":
        return _answers(_current_cluster())
    if "://" not in named and not _answers(named):
        message = "no Ray cluster answers there; correct it, or unset it to run on this machine"
        raise ScenarioError([Problem(f"RAY_ADDRESS={named}", "", message)])
    return True


def _current_cluster() -> str:
    """Return the address that the last `ray start` on this machine has written down; empty if there is none."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _answers(address: str) -> bool:
    """Whether a connection to the address, host:port, is accepted."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return False
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S):
            return True
    except (OSError, OverflowError):
        return False


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM in the block: Ray replaces it by one that ends the process without its results."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
