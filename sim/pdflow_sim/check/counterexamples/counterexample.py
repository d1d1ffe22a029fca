"""Counterexample files: the moves by name, their scope, and the invariant that they violate. JSON, one step a line.

Moves are named, not numbered: a file outlives a search's numbering, and a person can read it. Every step carries a
digest of the state after it, so that a replay which drifts is noticed where it drifts. What is in a file is checked
here as far as a file alone can be; whether its moves are possible is replay.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.scenario.reading.convert import did_you_mean, one_of, shown
from pdflow.version import version
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.races.owners import VARIANTS
from pdflow_sim.check.scopes.fields import FIELDS, ScopeFieldError, scope_of
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.fairness import Repeats
from pdflow_sim.check.search.needless import NEEDLESS

VERSION = 1
REPEATS = (*(repeats.value for repeats in Repeats), NEEDLESS)


class CounterexampleError(PdflowError):
    """A counterexample file that cannot be used: which file, where in it, and why, as one line for people."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, file: str, where: str, what: str) -> None:
        line = ": ".join(field for field in (file, where, what) if field)
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the objects in a file."""


class Verdict(Struct, frozen=True):
    invariant: str
    """S1 to S11, or L for liveness."""
    what: str


class ReplayStep(Struct, frozen=True):
    move: str
    """The name that `names.name` gives it."""
    after: str | None = None
    """Digest of the state after it; None where there is none, and where a person who wrote the file left it out."""


class Information(Struct, frozen=True):
    """The origin of a counterexample. Nothing depends on it."""

    note: str = ""
    """One line on what was wrong, or what the file shows."""
    seed: int | None = None
    scheduler: str = ""
    pdflow: str = msgspec.field(default_factory=version)


class CounterexampleFile(Struct, frozen=True):
    scope: Scope
    steps: tuple[ReplayStep, ...]
    start: str | None = None
    """Digest of the state before the first step."""
    verdict: Verdict | None = None
    mutant: str | None = None
    """The named patch of sim/pdflow_sim/check/mutants that must be in place."""
    repeats: str = ""
    """The assumption about repeating timers (`Repeats`) under which a fair run does not resolve; empty where no run
    is judged but that of liveness.py."""
    own_world: str = ""
    """The world of sim/pdflow_sim/check/races/owners.py in which it happens, if not the explored one."""
    information: Information = msgspec.field(default_factory=Information)

    @property
    def moves(self) -> list[str]:
        return [step.move for step in self.steps]

    def world(self) -> Relation:
        """Return a new relation to replay it in."""
        return VARIANTS.get(self.own_world, relation)(self.scope)


class _Document(Struct, frozen=True):
    """A CounterexampleFile as it stands in JSON."""

    pdflow_counterexample: int
    scope: dict[str, Any]
    steps: tuple[ReplayStep, ...]
    start: str | None = None
    verdict: Verdict | None = None
    mutant: str | None = None
    repeats: str = ""
    own_world: str = ""
    information: Information = msgspec.field(default_factory=Information)


def encode(counterexample: CounterexampleFile) -> str:
    """Return the text of a counterexample file."""
    scope = {name: getattr(counterexample.scope, name) for name in FIELDS}
    head = {
        "pdflow_counterexample": VERSION,
        "information": msgspec.to_builtins(counterexample.information),
        "mutant": counterexample.mutant,
        **({"repeats": counterexample.repeats} if counterexample.repeats else {}),
        **({"own_world": counterexample.own_world} if counterexample.own_world else {}),
        "verdict": msgspec.to_builtins(counterexample.verdict),
        "scope": scope | {"dialect": counterexample.scope.dialect.name},
        "start": counterexample.start,
    }
    steps = ",\n".join("    " + json.dumps(msgspec.to_builtins(step)) for step in counterexample.steps)
    return f'{json.dumps(head, indent=2)[:-2]},\n  "steps": [\n{steps}\n  ]\n}}\n'


def decode(text: str | bytes, file: str = "counterexample") -> CounterexampleFile:
    """Parse the text of a counterexample file. Raises CounterexampleError, which names `file`, at the first mistake."""
    try:
        tree = json.loads(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        raise CounterexampleError(file, "", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise CounterexampleError(file, "", "is nested too deep") from None
    except json.JSONDecodeError as error:
        raise CounterexampleError(
            file, f"line {error.lineno}, column {error.colno}", f"is not JSON: {error.msg}"
        ) from None
    except ValueError as error:
        raise CounterexampleError(file, "", f"is not JSON: {error}") from None
    if not isinstance(tree, dict) or "pdflow_counterexample" not in tree:
        raise CounterexampleError(file, "", 'is not a counterexample file of pdflow: it has no "pdflow_counterexample"')
    if type(tree["pdflow_counterexample"]) is not int or tree["pdflow_counterexample"] != VERSION:
        found = shown(tree["pdflow_counterexample"])
        what = f"is version {found}; this pdflow reads version {VERSION}"
        raise CounterexampleError(file, "pdflow_counterexample", what)
    try:
        document = msgspec.convert(tree, _Document)
    except msgspec.ValidationError as error:
        raise CounterexampleError(file, *_located(str(error))) from None
    if document.repeats and document.repeats not in REPEATS:
        raise CounterexampleError(file, "repeats", str(one_of(document.repeats, REPEATS)))
    if document.own_world and document.own_world not in VARIANTS:
        raise CounterexampleError(file, "own_world", str(one_of(document.own_world, VARIANTS)))
    return CounterexampleFile(
        scope=_scope(document.scope, file),
        steps=document.steps,
        start=document.start,
        verdict=document.verdict,
        mutant=document.mutant,
        repeats=document.repeats,
        own_world=document.own_world,
        information=document.information,
    )


def read(path: str | Path) -> CounterexampleFile:
    """Read a counterexample file. Raises CounterexampleError."""
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise CounterexampleError(
            str(path), "", f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    return decode(raw, str(path))


def write(path: str | Path, counterexample: CounterexampleFile) -> None:
    """Write a counterexample file. Raises OSError."""
    Path(path).write_text(encode(counterexample), encoding="utf-8")


def _located(message: str) -> tuple[str, str]:
    """Split an error message of msgspec into a place and what is wrong there."""
    what, _, path = message.partition(" - at `$")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        known = {name for kind in (_Document, ReplayStep, Verdict, Information) for name in kind.__struct_fields__}
        what += did_you_mean(unknown[1], known)
    return path.rstrip("`").lstrip("."), what


def _scope(document: Mapping[str, Any], file: str) -> Scope:
    """Build the scope of a file. Fields that an older file does not have keep their defaults, which change nothing."""
    try:
        return scope_of(document)
    except ScopeFieldError as error:
        where = f"scope.{error.field}" if error.field else "scope"
        raise CounterexampleError(file, where, error.what) from None
