"""Rows of a sweep on disk, so that one that was interrupted, or asks for more, runs only what is new.

The key of a row is the hash of all that its figures follow from: the scenario, the content of the files that it names,
the seed, and pdflow's version. After a change of pdflow itself the folder must be emptied.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdflow.results.files.bench_json import content_sha256
from pdflow.results.files.write import replacing
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.paths import with_paths
from pdflow.version import version


def key_of(scenario: Scenario, seed: int, measured: str = "") -> str:
    """Return the key of the row of this scenario and seed; `measured` names figures that are not those of a sweep."""
    document = with_paths(scenario.document(), lambda path: _content(scenario.folder / path))
    # Its name changes no figure.
    document["scenario"] = {**document.get("scenario", {}), "name": "", "seed": seed}
    trace = scenario.resolved.workload.trace
    if trace is not None and trace.format == "servegen":
        document["beside"] = _content((scenario.folder / trace.path).parent)  # where its lengths may lie
    more = {"measured": measured} if measured else {}
    return content_sha256({"pdflow": version(), "scenario": document, **more})


def find(folder: Path, key: str) -> dict[str, Any] | None:
    """Return the figures of a row; None if they are not there."""
    try:
        figures: dict[str, Any] = msgspec.json.decode(_file(folder, key).read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return figures


def keep(folder: Path, key: str, figures: Mapping[str, Any]) -> None:
    """Write the figures of a row, whole or not at all. Raises OutputError."""
    with replacing(_file(folder, key)) as file:
        file.write(msgspec.json.encode(figures))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _content(path: Path) -> str:
    """Return the hash of the content of a file, or of the files in a folder."""
    files = sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.exists()]
    return _hash(tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats))


@functools.lru_cache(maxsize=64)
def _hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for file, size, _ in files:
        found.update(f"{file.name} {size}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
