"""What of the benchmarks on a GPU works without one: the wheels that are collected for it, and the refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.gpu.collect_wheels import distribute, pieces_of, without
from pdflow_runtime.gpu.driver import gpus

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_without_some_of_its_files_is_still_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as made:
        made.writestr("a/__init__.py", "x = 1\n")
        made.writestr("extra/big.so", b"\0" * 10_000)
        made.writestr("a-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1.0\n")
        made.writestr("a-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("a-1.0.dist-info/RECORD", "a/__init__.py,,\nextra/big.so,,\na-1.0.dist-info/RECORD,,\n")
    without(wheel, "extra/")
    with ZipFile(wheel) as found:
        assert "extra/big.so" not in found.namelist()
        record = found.read("a-1.0.dist-info/RECORD").decode()
    assert "extra" not in record
    assert "a/__init__.py,sha256=" in record
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert (site / "a" / "__init__.py").read_text() == "x = 1\n"


def test_folders_hold_no_more_than_the_limit_and_every_byte(tmp_path: Path) -> None:
    files = []
    for number, nbytes in enumerate((900, 450, 2500, 10, 600)):
        files.append(tmp_path / f"{number}.whl")
        files[-1].write_bytes(bytes([number]) * nbytes)
    pieces = [piece for file in files for piece in pieces_of(file, 1000)]
    folders = distribute(pieces, tmp_path / "wheels", 1000)
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1000
    found = [file for folder in folders for file in folder.glob("2.whl.*")]
    found.sort(key=lambda file: int(file.suffix[1:]))
    assert b"".join(file.read_bytes() for file in found) == b"\2" * 2500
    assert sum(len(list(folder.iterdir())) for folder in folders) == 4 + 3


@pytest.mark.skipif(gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_the_benchmarks_say_so() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "decode"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (2, "no GPU found: benchmarks.gpu measures on one\n")
