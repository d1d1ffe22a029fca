"""A finished run as its files have it."""

from __future__ import annotations

from pathlib import Path

import attrs

from pdflow.results.records import Records


@attrs.frozen(kw_only=True, eq=False)
class RecordedRun:
    """One run that was read from its folder. `links`: the names of all links that carried bytes."""

    folder: Path
    name: str
    seed: int
    world: str = "simulated"
    version: str = ""
    scenario_sha256: str = ""
    command_line: str = ""
    interrupted: bool = False
    warmup_ns: int = 0
    links: tuple[str, ...] = ()
    records: Records
