"""Nothing of a cluster outlives what has started it, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from tests.runtime.calibrate.test_probe import SYNTHETIC
from tests.runtime.support.served import ROOT, served
from tests.runtime.support.tied import tied

QUICKSTART = ROOT / "examples/serve-quickstart.toml"
COMPONENTS = ("pdflow_runtime.router.front", "prefill-0", "decode-0")
TIMEOUT_S = 60
BENCHMARK = f"""
import time
from pathlib import Path
from tests.runtime.support.served import served
from tests.runtime.process.test_orphans import COMPONENTS, QUICKSTART, SYNTHETIC
with served(Path("{{folder}}"), QUICKSTART, *SYNTHETIC) as cluster:
    print(cluster.process.pid, *map(cluster.pid_of, COMPONENTS), flush=True)
    time.sleep({TIMEOUT_S})
"""


def is_there(pid: int) -> bool:
    """What nobody has waited for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_of(pids: Iterable[int]) -> list[str]:
    """Processes, and files in shared memory, that are there still when all has had its time to end."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        left = [str(pid) for pid in pids if is_there(pid)]
        left += [file.name for pid in pids for file in Path("/dev/shm").glob(f"pdflow-{pid}-*")]
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_killed_leaves_no_cluster(killed_by: signal.Signals, tmp_path: Path) -> None:
    script = BENCHMARK.format(folder=tmp_path)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(pid) for pid in benchmark.stdout.readline().split()]
        assert len(pids) == len(COMPONENTS) + 1
        assert all(map(is_there, pids))
        benchmark.send_signal(killed_by)
    assert left_of(pids) == []


@pytest.mark.slow
def test_processes_notice_that_their_parent_is_gone(tmp_path: Path) -> None:
    with served(tmp_path, QUICKSTART, *SYNTHETIC) as cluster:
        pids = [cluster.pid_of(component) for component in COMPONENTS]
        os.kill(cluster.process.pid, signal.SIGKILL)
        cluster.process.wait()
        assert left_of(pids) == []
    assert cluster.log.read_text().count("parent process exited or closed stdin; shutting down") == len(COMPONENTS)


FAILING = """
import pathlib, sys, time
if "decode-0" in sys.orig_argv:
    while not pathlib.Path({seen!r}).exists():
        time.sleep(0.01)
    sys.exit(3)
"""


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    """decode-0 fails when another engine has its memory in /dev/shm already."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(FAILING.format(seen=str(seen)))
    overrides = [arg for override in SYNTHETIC for arg in ("--set", override)]
    process = subprocess.Popen(
        tied(sys.executable, "-m", "pdflow", "serve", str(QUICKSTART), "--port", "0", *overrides),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT), *sys.path))},
    )
    try:
        shared: list[str] = []
        while not shared and process.poll() is None:
            time.sleep(0.01)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            shared = [file.name for pid in children for file in Path("/dev/shm").glob(f"pdflow-{pid}-*")]
        assert shared
        seen.touch()
        _, log = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert "decode-0 did not start" in log
    # At once: any other cluster that starts on this host sweeps, too.
    assert not [pid for pid in children for _ in Path("/dev/shm").glob(f"pdflow-{pid}-*")]
    assert not any(is_there(int(pid)) for pid in children)
