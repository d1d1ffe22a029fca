"""A scenario as it was written, before it is resolved: a document, the locations of its keys, and its overrides.

Decides how a location is named in an error. What is wrong is decided elsewhere (`load.resolve`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from pdflow.errors import Problem
from pdflow.scenario.reading.convert import Complaint, MisfitError, shown
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.reading.overrides import Override, apply_override, parse_key, parse_override

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@attrs.define
class Draft:
    """A document, and the location of each part of it: a line of the file, the command line, or Python.

    `lines` is None where there is no file, as of a dict: then only the name `file` is said.
    """

    file: str
    document: dict[str, Any]
    lines: Mapping[KeyPath, int] | None = None
    overridden: dict[KeyPath, str] = attrs.field(factory=dict)
    refused: list[Problem] = attrs.field(factory=list)

    def override(self, texts: Iterable[str], seed: int | None) -> None:
        """Apply `--set`s in order, then `--seed`; those that lead nowhere are remembered as problems."""
        for text in texts:
            try:
                self._apply(parse_override(text))
            except MisfitError as error:
                self.refused.append(Problem(f"--set {text}", "", str(error)))
        if seed is not None and isinstance(self.document.setdefault("scenario", {}), dict):
            self._apply(Override(f"--seed {seed}", ("scenario", "seed"), seed))

    def edited(self, edits: Mapping[str, Any]) -> Draft:
        """Return a draft with these values by dotted key, None for none; those that lead nowhere are remembered."""
        draft = attrs.evolve(
            self,
            document=copy.deepcopy(self.document),
            overridden=self.overridden.copy(),
            refused=self.refused.copy(),
        )
        for key, value in edits.items():
            location = f"edit {key}={shown(value)}"
            try:
                draft._apply(Override(location, parse_key(key), value))
            except MisfitError as error:
                draft.refused.append(Problem(location, "", str(error)))
        return draft

    def _apply(self, override: Override) -> None:
        self.overridden[apply_override(self.document, override)] = override.location

    def problems(self, complaints: Iterable[Complaint]) -> list[Problem]:
        """Return complaints with their locations, in the order of the file, the command line's last."""
        placed = [(self._line(c.path), i, c) for i, c in enumerate(complaints)]
        placed.sort(key=lambda item: (item[0] is None, item[0] or 0, item[1]))
        located = [Problem(self._location(c.path), self._shown(c.path), c.message) for _, _, c in placed]
        return list(dict.fromkeys(located)) + self.refused

    def _location(self, path: KeyPath) -> str:
        line = self._line(path)
        return f"{self.file}:{line}" if line is not None else self._override_of(path) or self.file

    def _line(self, path: KeyPath) -> int | None:
        """Return the line of the key, or of the nearest table around it; None if it is from no file."""
        if self.lines is None or self._override_of(path) is not None:
            return None
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _override_of(self, path: KeyPath) -> str | None:
        """Return the option that set this key, a table around it, or all keys within it."""
        around = [path[:end] for end in range(len(path), 0, -1)]
        for table in around:
            if table in self.overridden:
                return self.overridden[table]
        for table in around:
            if self.lines is not None and table in self.lines:
                return None
            for key, location in self.overridden.items():
                if key[: len(table)] == table:
                    return location
        return None

    def _shown(self, path: KeyPath) -> str:
        """Return the path in the form of --set: pools by their names."""
        shown = ""
        for depth, element in enumerate(path):
            if depth == 1 and path[0] == "pool":
                name = self._pool_name(element)
                shown += f".{name}" if name else f"[{element}]"
            elif isinstance(element, int):
                shown += f"[{element}]"
            else:
                key = element if _BARE_KEY.fullmatch(element) else f'"{element}"'
                shown += f".{key}" if shown else key
        return shown

    def _pool_name(self, index: str | int) -> str | None:
        """Return the name of a pool, if it has one that no other pool has."""
        pools = self.document["pool"]
        names = [pool.get("name") if isinstance(pool, dict) else None for pool in pools]
        name = names[index] if isinstance(index, int) else None
        return name if isinstance(name, str) and _BARE_KEY.fullmatch(name) and names.count(name) == 1 else None
