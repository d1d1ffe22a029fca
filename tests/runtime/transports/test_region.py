"""Shared memory that is owned, mapped, refused, swept."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, map_region, sweep
from tests.runtime.transports.agents import child


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        yield Path(name)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_a_mapped_region_shows_what_its_owner_writes_and_cannot_be_written(folder: Path) -> None:
    region = OwnedRegion(10_000, folder)
    mapped = map_region(str(region.path), 10_000, folder)
    region.view[9_999] = 7
    assert mapped[9_999] == 7
    with pytest.raises(TypeError):
        mapped[0] = 1
    region.close()
    assert os.listdir(folder) == []
    region.view[0] = 8
    assert mapped[0] == 8


def test_memory_that_is_not_there_is_one_sentence(folder: Path) -> None:
    with pytest.raises(TransportError, match=r"has room for [0-9,]+ MiB, and 1,073,741,824 MiB are needed: use fewer"):
        OwnedRegion(1 << 50, folder)
    with pytest.raises(TransportError, match="cannot create shared memory in /nowhere"):
        OwnedRegion(4096, Path("/nowhere"))
    assert os.listdir(folder) == []


def test_no_file_is_mapped_but_a_region(folder: Path) -> None:
    region = OwnedRegion(4096, folder)
    link = folder / "pdflow-1-0123456789abcdef.kv"
    link.symlink_to(region.path)
    fifo = folder / "pdflow-2-0123456789abcdef.kv"
    os.mkfifo(fifo)
    wrong_names = ("/etc/passwd", str(folder / "other"), f"{folder}/../{folder.name}/{region.path.name}", "", "\0")
    for path, nbytes in [(str(region.path), 4095), (str(region.path), -1), *((str(p), 4096) for p in (link, fifo))]:
        with pytest.raises(TransportError):
            map_region(path, nbytes, folder)
    for path in wrong_names:
        with pytest.raises(TransportError, match="names a file that is not an agent's"):
            map_region(path, 4096, folder)
    region.close()


def test_sweeping_takes_what_the_dead_have_left_and_nothing_else(folder: Path, dead_pid: int) -> None:
    ours = OwnedRegion(4096, folder)
    left = [f"pdflow-{dead_pid}-0123456789abcdef.{kind}" for kind in ("kv", "sock")]
    kept = [f"pdflow-{dead_pid}.kv", f"other-{dead_pid}-0123456789abcdef.kv", "pdflow-1-0123456789abcdef.sock"]
    for name in left + kept:
        (folder / name).touch()
    assert sweep(folder) == left
    assert sorted(os.listdir(folder)) == sorted([*kept, ours.path.name])
    ours.close()
    assert sweep(Path("/nowhere")) == []


def test_a_region_whose_owner_has_a_pid_of_another_container_is_not_swept(folder: Path, dead_pid: int) -> None:
    path = folder / f"pdflow-{dead_pid}-0123456789abcdef.kv"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(folder) == []
    assert sweep(folder) == [path.name]


def test_a_killed_agent_s_files_are_swept_by_the_next() -> None:
    with child("shm", "p.r0") as p:
        pid = p.pid
        assert len(list(FOLDER.glob(f"pdflow-{pid}-*"))) == 2
        p.send_signal(signal.SIGKILL)
        p.wait()
    assert len(list(FOLDER.glob(f"pdflow-{pid}-*"))) == 2
    sweep()
    assert not list(FOLDER.glob(f"pdflow-{pid}-*"))
