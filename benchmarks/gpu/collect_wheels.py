"""Collect the wheels that `pytest -m gpu` and `python -m benchmarks.gpu` need on a machine with a GPU and no network.

    python -m benchmarks.gpu.collect_wheels wheels

That machine has Python 3.12 for x86-64, torch for CUDA 13 and transformers. This command needs pip and a package index.
It fills the folders wheels/1, wheels/2, ... with at most --limit-mib each, so that they can be carried one by one. Over
there, copy all wheels into one folder and run the command that is printed at the end.

NIXL's wheel is written anew without nixl_ep, which is larger than the rest of it and which pdflow does not use. A wheel
that is still larger than the limit is cut into pieces, NAME.whl.1, NAME.whl.2, ...: `cat NAME.whl.* > NAME.whl`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile

NEEDED: Final = (
    "attrs",
    "cattrs",
    "click",
    "httptools",
    "hypothesis",
    "idna",
    "jinja2",
    "msgspec",
    "nixl==1.5.1",
    "nixl-cu13==1.5.1",
    "outcome",
    "prometheus-client",
    "pytest-trio",
    "rich",
    "simpy",
    "sniffio",
    "sortedcontainers",
    "trio",
)
"""What pdflow imports, except torch, numpy, safetensors, tokenizers and pytest, and what these packages need."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
LEFT_OUT: Final = "nixl_ep_cu13/"


def download(folder: Path) -> None:
    """Download every wheel of NEEDED for Python 3.12."""
    wanted = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    wanted += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *wanted, "-d", str(folder), *NEEDED]
    subprocess.run(command, check=True)


def without(wheel: Path, prefix: str) -> None:
    """Write a wheel anew without the files whose names begin so."""
    made = wheel.with_suffix(".new")
    with ZipFile(wheel) as old, ZipFile(made, "w", ZIP_DEFLATED, compresslevel=9) as new:
        names = [name for name in old.namelist() if not name.startswith(prefix) and not name.endswith("/")]
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        lines = []
        for name in names:
            if name == record:
                continue
            content = old.read(name)
            new.writestr(old.getinfo(name), content, ZIP_DEFLATED, 9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
        new.writestr(record, "".join(lines) + f"{record},,\n")
    made.replace(wheel)


def pieces_of(wheel: Path, limit: int) -> list[Path]:
    """Cut a file that is larger than the limit into pieces; return the file itself, or its pieces."""
    content = wheel.read_bytes()
    if len(content) <= limit:
        return [wheel]
    pieces = []
    for number, begin in enumerate(range(0, len(content), limit), 1):
        piece = wheel.with_name(f"{wheel.name}.{number}")
        piece.write_bytes(content[begin : begin + limit])
        pieces.append(piece)
    wheel.unlink()
    return pieces


def distribute(files: list[Path], target: Path, limit: int) -> list[Path]:
    """Move the files into as few folders of at most `limit` bytes as first-fit needs, and return the folders."""
    folders: list[tuple[Path, int]] = []
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        nbytes = file.stat().st_size
        for number, (folder, used) in enumerate(folders):
            if used + nbytes <= limit:
                folders[number] = (folder, used + nbytes)
                break
        else:
            folder = target / str(len(folders) + 1)
            folder.mkdir(parents=True)
            folders.append((folder, nbytes))
        file.rename(folder / file.name)
    return [folder for folder, _ in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder to fill; it must not exist")
    parser.add_argument("--limit-mib", type=int, default=60, help="the most that a folder holds (default: 60)")
    asked = parser.parse_args()
    if asked.folder.exists():
        parser.error(f"{asked.folder} exists already; remove it or name another folder")
    asked.folder.mkdir(parents=True)
    limit = asked.limit_mib << 20
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        download(Path(scratch))
        for wheel in Path(scratch).glob("nixl_cu13-*.whl"):
            without(wheel, LEFT_OUT)
        pieces = [piece for wheel in Path(scratch).glob("*.whl") for piece in pieces_of(wheel, limit)]
        folders = distribute(pieces, asked.folder, limit)
    for folder in folders:
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {len(list(folder.iterdir()))} files, {nbytes / 2**20:.1f} MiB")
    print("on the other machine: python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl")
    print("and then: export PYTHONPATH=SITE:.:sim:runtime")


if __name__ == "__main__":
    main()
