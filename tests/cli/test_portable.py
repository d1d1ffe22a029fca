"""The commands that simulate import nothing that only POSIX has, so that they run on Windows as well.

The modules and functions that Windows lacks are removed in a process of its own, before pdflow is imported there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]

WINDOWS: Final = """
import os, signal, socket, sys

MODULES = {"crypt", "fcntl", "grp", "nis", "posix_ipc", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
NAMES = {
    os: ["fork", "forkpty", "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "sched_getaffinity", "setsid"],
    signal: ["SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "pthread_sigmask"],
    socket: ["AF_UNIX", "socketpair"],
}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
for name in MODULES:
    sys.modules.pop(name, None)
for module, names in NAMES.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

from pdflow.cli import cli

cli(sys.argv[1:], prog_name="pdflow")
"""


def run_without_posix(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WINDOWS, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.parametrize(
    "command",
    [
        "simulate examples/conversation.toml --set workload.requests=20",
        "simulate examples/conversation.toml --set workload.requests=20 --check-invariants --quiet",
        "compare examples/conversation.toml examples/reference.toml --set workload.requests=20",
        "validate examples/conversation.toml",
        "presets h100-sxm",
        "methods",
        "schema",
        "--version",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_a_command_runs_without_posix(command: str) -> None:
    ran = run_without_posix(*command.split())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout or "--quiet" in command


def test_the_files_of_a_run_are_written_without_posix(tmp_path: Path) -> None:
    files = ["--events", "--save-detailed", "--timeline", "--html"]
    shrunk = ["--set", "workload.requests=20"]
    ran = run_without_posix("simulate", "examples/conversation.toml", *shrunk, "--out", str(tmp_path), *files)
    assert ran.returncode == 0, ran.stderr
    assert len(list(tmp_path.iterdir())) == 6


def test_a_search_in_one_process_runs_without_posix(tmp_path: Path) -> None:
    ran = run_without_posix("check", "scopes", "--only", "compat pull", "--jobs", "1", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr


def test_a_missing_module_is_missed() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WINDOWS.partition("from pdflow.cli")[0] + "import resource"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "No module named 'resource'" in ran.stderr
