"""What every part's process is given, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdflow_runtime.process.processes import exit_text

LIMITED = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
from pdflow_runtime.process.processes import run_to_exit_code
async def run():
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
assert most > 64
raise SystemExit(run_to_exit_code(run))
"""


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def test_who_has_ended_well_does_not_crash_in_what_libraries_do_at_exit() -> None:
    crashing = (
        "import atexit, os, sys; from pdflow_runtime.process.processes import end_process; atexit.register(os.abort);"
    )
    ended = subprocess.run([sys.executable, "-c", f"{crashing} print('said'); end_process(3)"], capture_output=True)
    assert (ended.returncode, ended.stdout) == (3, b"said\n")


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exited with code 0"),
        (2, "exited with code 2"),
        (-9, "exited: killed by signal 9 (SIGKILL)"),
        (-35, "exited: killed by signal 35"),
    ],
)
def test_the_log_names_the_signal_that_ended_a_process(returncode: int, text: str) -> None:
    assert exit_text(returncode) == text
