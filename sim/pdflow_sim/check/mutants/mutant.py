"""A mutant: the machine (pdflow/protocol, pdflow/methods, pdflow/serving, pdflow/routing) with one rule dropped, for as
long as a `with` block lasts.

The machine has no switches for bugs. A patch replaces a function wherever the machine refers to it (as a module's name,
in a class, in a table of rules or of handlers), or takes a row out of a table; `guards` turn off guards that differ
between the dialects anyway. A compiled machine calls its methods directly and would ignore patches, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import attrs
import msgspec

import pdflow.methods
import pdflow.protocol
import pdflow.routing
import pdflow.serving
from pdflow.errors import PdflowError
from pdflow.version import compiled
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.fairness import Repeats
from pdflow_sim.check.state.cluster import ScopeCluster

MISSING: Any = object()


class CannotMutate(PdflowError):  # noqa: N818 (what happened, as pdflow's other errors)
    """The machine cannot be patched here."""


@attrs.frozen
class Swap:
    """A patch that replaces a function wherever the machine refers to it."""

    old: Callable[..., Any]
    new: Callable[..., Any]


@attrs.frozen
class TableRow:
    """A patch that replaces the rule in a row of a table, or removes it: an event without a rule does nothing."""

    table: dict[Any, Any]
    key: Any
    new: Any = MISSING


Patch: TypeAlias = Swap | TableRow


@attrs.frozen(kw_only=True)
class Mutant:
    name: str
    drops: str
    """The rule that is dropped, as a sentence, and what goes wrong without it."""
    source: str
    """Source of the rule: sections, rules (C1, M1, ...), invariants and races of docs/spec.md; or an issue."""
    patches: tuple[Patch, ...] = ()
    guards: tuple[str, ...] = ()
    """Guards of the scope's dialect that are turned off."""
    repeats: Repeats | None = None
    """Whether and how the hunt checks fair runs too."""
    needless: bool = False
    """Whether the hunt judges L9 too: no request fails without need."""
    scope: Scope = attrs.field(factory=Scope)
    """The smallest scope in which the search must catch the mutant."""
    breaks: str = ""
    """The invariant that must catch the mutant; empty if none can in the explored scopes."""
    survives: str = ""
    """Why no invariant can catch the mutant."""

    def scope_with(self, scope: Scope) -> Scope:
        """Return a scope with the guards that this mutant turns off removed from its dialect."""
        if not self.guards:
            return scope
        dialect = msgspec.structs.replace(scope.dialect, **dict.fromkeys(self.guards, False))
        return attrs.evolve(scope, dialect=dialect)

    def world(self) -> Relation:
        """Return a new world of the mutant's scope. Must be made and used inside `applied`."""
        return relation(self.scope)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Patch the machine inside the block, and restore it afterwards. Worlds made inside are patched too. Raises
        CannotMutate."""
        if compiled():
            raise CannotMutate(
                "mutants need pdflow as plain Python, but it is compiled: reinstall it without PDFLOW_COMPILE"
            )
        undo: list[Callable[[], None]] = []
        try:
            for patch in self.patches:
                for change in list(_changes(patch)):
                    undo.append(change.undo)
                    change.do()
            if self.guards:
                change = _in_namespace(ScopeCluster, "__init__", ScopeCluster.__init__, self._cluster_without_guards())
                undo.append(change.undo)
                change.do()
            yield
        finally:
            for back in reversed(undo):
                back()

    def _cluster_without_guards(self) -> Callable[[ScopeCluster, Scope], None]:
        made = ScopeCluster.__init__

        def without_guards(cluster: ScopeCluster, scope: Scope) -> None:
            made(cluster, self.scope_with(scope))

        return without_guards


@attrs.frozen
class _Change:
    do: Callable[[], None]
    undo: Callable[[], None]


def _changes(patch: Patch) -> Iterator[_Change]:
    if isinstance(patch, TableRow):
        yield _in_table(patch.table, patch.key, patch.new)
        return
    found = [*_holders(patch.old)]
    if not found:
        raise CannotMutate(f"{patch.old.__qualname__} is nowhere in the machine: the rule has moved")
    for holder, name in found:
        if isinstance(holder, dict):
            yield _in_table(holder, name, patch.new)
        else:
            yield _in_namespace(holder, name, patch.old, patch.new)


def _holders(old: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """Yield every (module or class, name) and (table, key) under which the machine refers to this function."""
    for module in machine_modules():
        for name, value in vars(module).items():
            if value is old:
                yield module, name
            elif isinstance(value, dict):
                yield from ((value, key) for key, row in value.items() if row is old)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                yield from ((value, key) for key, member in vars(value).items() if member is old)


def machine_modules() -> Iterator[ModuleType]:
    """Yield every module of the machine that has been imported, each once."""
    for package in (pdflow.protocol, pdflow.methods, pdflow.serving, pdflow.routing):
        yield from _modules_in(package)


def _modules_in(package: ModuleType) -> Iterator[ModuleType]:
    for name, module in vars(package).items():
        if isinstance(module, ModuleType) and module.__name__ == f"{package.__name__}.{name}":
            yield module
            yield from _modules_in(module)


def _in_table(table: dict[Any, Any], key: Any, new: Any) -> _Change:
    before = dict(table)

    def put() -> None:
        if new is MISSING:
            table.pop(key, None)
        else:
            table[key] = new

    def restore() -> None:
        """Restore the table and the order of its rows, which the documents show."""
        table.clear()
        table.update(before)

    return _Change(put, restore)


def _in_namespace(holder: Any, name: str, old: Any, new: Any) -> _Change:
    return _Change(lambda: setattr(holder, name, new), lambda: setattr(holder, name, old))
