"""`pdflow.Scenario`: a scenario that Python code can load, change, look at and save.

It has what was written (a draft: the document, and the lines of its parts) beside what that comes to (`resolved`, the
`schema.Scenario` that a world runs). There are two classes because presets, defaults and other files are gone from the
resolved one, and what a person changes and saves must still have them: a GPU replaced there would keep the old one's
name, and a file written from it would pin every default of today. Rules are in neither: `load.resolve` has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs

from pdflow.scenario.reading.convert import shown
from pdflow.scenario.reading.draft import Draft
from pdflow.scenario.reading.load import parse, read, resolve
from pdflow.scenario.reading.paths import names_paths, with_paths
from pdflow.scenario.reading.toml_text import toml_text
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario, Slo
from pdflow.scenario.summary import faults_summary, workload_summary

_NO_EDITS: Final[Mapping[str, Any]] = MappingProxyType({})
_NAMELESS: Final = "scenario"
"""The name of a scenario that is in no file."""


@attrs.frozen(eq=False, repr=False)
class Scenario:
    """A sound scenario, immutable; `with_` makes another. Equal ones have the same values and refer to the same files.

    Attributes:
        resolved: what it comes to, presets and defaults filled in.
        edits: what `with_` changed since it was loaded, by dotted key.
    """

    _draft: Draft
    resolved: ResolvedScenario
    edits: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] = _NO_EDITS) -> Scenario:
        """Load a TOML file, some of its values replaced. Raises ScenarioError with every problem and its line."""
        return cls._of(read(path), overrides)

    @classmethod
    def of_command(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = (), seed: int | None = None
    ) -> Scenario:
        """Load a TOML file with the texts of `--set` and the value of `--seed`. Raises ScenarioError."""
        draft = read(path)
        draft.override(overrides, seed)
        return cls(draft, resolve(draft), {})

    @classmethod
    def from_toml(cls, text: str, *, folder: str | os.PathLike[str] = "") -> Scenario:
        """Make a scenario of the text of a TOML file. Relative paths start at `folder`. Raises ScenarioError."""
        return cls._of(parse(os.path.join(folder, _NAMELESS), text))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, folder: str | os.PathLike[str] = "") -> Scenario:
        """Make a scenario of tables as a TOML file has them. Relative paths start at `folder`. Raises ScenarioError."""
        return cls._of(Draft(os.path.join(folder, _NAMELESS), _plain(document, "the scenario")))

    @classmethod
    def _of(cls, draft: Draft, edits: Mapping[str, Any] = _NO_EDITS, before: Mapping[str, Any] = _NO_EDITS) -> Scenario:
        plain = {key: None if value is None else _plain(value, key) for key, value in edits.items()}
        edited = draft.edited(plain)
        return cls(edited, resolve(edited), {**before, **plain})

    def with_(self, edits: Mapping[str, Any] = _NO_EDITS, /, **more: Any) -> Scenario:
        """Return a scenario with some values replaced, by dotted key as `--set` takes them; None takes a key away.

        As in `scenario.with_({"transfer.method": "nixl-pull"})`, or of a whole table, `scenario.with_(slo={})`. All
        edits are made before any is checked. Raises ScenarioError.
        """
        return self._of(self._draft, {**edits, **more}, self.edits)

    def document(self) -> dict[str, Any]:
        """Return a copy of the scenario's tables, as `from_dict` takes them. Paths are relative to `folder`."""
        return with_paths(self._draft.document, lambda path: path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file that loads as an equal scenario: comments are gone, and paths start at the new folder."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.text_for(file.parent), encoding="utf-8")

    def text_for(self, folder: str | os.PathLike[str]) -> str:
        """Return the text of the TOML file that `save` writes into that folder."""
        document = with_paths(self._draft.document, lambda old: self._seen_from(Path(folder), old))
        document = {"scenario": {"name": self.name, **document.pop("scenario", {})}, **document}
        return toml_text(document)

    @property
    def names_files(self) -> bool:
        """Whether it names other files, such as a trace, by their paths."""
        return names_paths(self._draft.document)

    def _seen_from(self, folder: Path, path: str) -> str:
        return path if os.path.isabs(path) else os.path.relpath(self.folder / path, folder)

    @property
    def name(self) -> str:
        """The name from [scenario], or else from the file."""
        return self.resolved.name

    @property
    def seed(self) -> int:
        """The seed of the run's random numbers."""
        return self.resolved.seed

    @property
    def folder(self) -> Path:
        """The folder that relative paths start at."""
        return self.resolved.base_dir

    def __eq__(self, other: object) -> bool:
        return self._comparable() == other._comparable() if isinstance(other, Scenario) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, self.seed))

    def _comparable(self) -> dict[str, Any]:
        document = with_paths(self._draft.document, lambda path: os.path.abspath(self.folder / path))
        document["scenario"] = {**document.get("scenario", {}), "name": self.name, "seed": self.seed}
        return document

    def __repr__(self) -> str:
        rows = "".join(f"\n  {name:<9} {what}" for name, what in self._rows())
        return f"<Scenario {self.name!r} seed {self.seed}{rows}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left">{escape(name)}</th>'
            f'<td style="text-align:left">{escape(what)}</td></tr>'
            for name, what in self._rows()
        )
        text = f"<details><summary>as TOML</summary><pre>{escape(toml_text(self._draft.document))}</pre></details>"
        return f'<b>{escape(self.name)}</b>, seed {self.seed}<table style="color:inherit">{rows}</table>{text}'

    def _rows(self) -> list[tuple[str, str]]:
        it, slo = self.resolved, _slo_line(self.resolved.slo)
        edits = ", ".join(f"{key} = {shown(value)}" for key, value in self.edits.items())
        return [
            ("workload", workload_summary(it)),
            ("model", it.model.name),
            *(("pool", _pool_line(pool)) for pool in it.pools),
            ("transfer", f"{it.transfer.method}, {it.transfer.dialect}, over {it.network.preset}"),
            ("router", str(it.router)),
            *([("SLO", slo)] if slo else []),
            *([("faults", faults_summary(it))] if it.faults else []),
            *([("edited", edits)] if edits else []),
        ]


def _pool_line(pool: Pool) -> str:
    name = pool.name if pool.name == pool.role else f"{pool.name} ({pool.role})"
    spread = f", DP {pool.attention_replicas}" if pool.attention_replicas > 1 else ""
    spread += f", EP {pool.ep}" if pool.ep > 1 else ""
    return f"{name}: {pool.replicas} x {pool.gpu.name}, TP {pool.tp}, PP {pool.pp}{spread}"


def _slo_line(slo: Slo) -> str:
    itl = f"p{slo.itl_percentile:g} ITL" if slo.itl_percentile < 100 else "max ITL"
    bounds = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, itl: slo.itl_ms, "E2E": slo.e2e_ms}
    limits = [f"{name} {bound:g} ms" for name, bound in bounds.items() if bound is not None]
    return ", ".join([*limits, *(f"class {name}" for name in slo.classes)])


def _plain(value: Any, where: str) -> Any:
    """Convert a value of Python, numpy's scalars and arrays included, to what TOML would have given."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item, where) for item in value]
    if isinstance(value, (bool, int, float, str)):
        # Subclasses too: numpy.float64 is a float whose repr is none of TOML's.
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    raise TypeError(f"{where} is {value!r}, which a scenario cannot hold")
