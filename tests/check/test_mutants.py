"""Every mutant is found, by the invariant that it must break; the machine as it is passes the same scopes."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from msgspec.structs import replace as changed

from pdflow.version import compiled
from pdflow_sim.check.counterexamples.counterexample import decode, encode
from pdflow_sim.check.counterexamples.replay import strict
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.mutants import mutant as patching
from pdflow_sim.check.mutants.catalogue import MUTANTS
from pdflow_sim.check.mutants.hunt import Kill, alarm, as_expected, counterexample, hunt, searched
from pdflow_sim.check.mutants.mutant import CannotMutate, Mutant, Swap, machine_modules
from pdflow_sim.check.mutants.stray import stray
from pdflow_sim.check.scopes.catalogue import SCOPES as NAMED
from pdflow_sim.check.scopes.scope import Scope
from tests.check.answers import hunted, no_clock

pytestmark = pytest.mark.skipif(compiled(), reason="a compiled machine cannot be patched")

KILLED = [m for m in MUTANTS.values() if m.breaks]
SURVIVORS = [m for m in MUTANTS.values() if not m.breaks]
IN_CI = [named.scope for named in NAMED if not named.nightly]
SCOPES = {repr(m.scope): m for m in reversed(MUTANTS.values()) if m.scope not in IN_CI}
"""Each scope once, and none that the named scopes' own tests go through."""
LONG = {"one-flush-is-enough", "fence-counts-as-flush", "readers-counted", "first-reader-frees", "floor-too-high"}
LONG |= {"completions-counted", "last-handle-decides", "floor-forgotten", "p-restart-unnoticed", "lost-wake-up"}
LONG |= {"new-incarnation-settles-orphans", "compat-drops-early-completions", "release-while-registered-forgotten"}
LONG |= {
    "pieces-kept-when-withdrawn",
    "last-write-hides-a-stop",
    "stop-cuts-posted-pieces",
    "freed-under-a-copy",
    "staging-kept-when-aborted",
}
LONG |= {
    "floor-removes-its-own-tombstone",
    "pieces-of-any-attempt-pass",
    "first-piece-is-not-reported",
    "error-after-first-piece",
    "refusal-settles-its-pair",
    "restart-fails-later-prompts",
}
"""Two handles, ranks, requests, attempts, incarnations or ends, or a copy at the end: their shortest counterexamples
have more than twelve steps."""


@pytest.mark.parametrize("name", [m.name for m in KILLED])
def test_every_mutant_is_killed(name: str) -> None:
    kill = hunted(name)
    assert as_expected(MUTANTS[name], kill), kill
    assert kill.steps <= (60 if MUTANTS[name].scope.horizon else 24 if name in LONG else 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [m.name for m in SURVIVORS])
def test_what_survives_still_does(name: str) -> None:
    """If this fails, an invariant catches the mutant now: name it in the catalogue."""
    assert MUTANTS[name].survives
    assert hunted(name) == Kill(mutant=name, search=searched(MUTANTS[name]))


LARGE = {"completions-counted", "first-answer-frees", "fence-counts-as-flush", "silence-frees", "floor-forgotten"}
LARGE |= {"floor-too-high", "compat-zombie-registrations", "refusal-settles-its-pair"}
LARGE |= {
    "room-made-by-syncs-only",
    "last-write-hides-a-stop",
    "suspect-peer-admitted",
    "open-registration-asked-for-again",
    "quarantine-ends-by-the-clock",
}
"""Seconds without the mutant. So are, all together, those of survivors: of them nobody asks whether a hunt was fair."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.nightly] * (m.name in LARGE or not m.breaks))
        for m in SCOPES.values()
    ],
)
def test_the_machine_as_it_is_passes_the_same_scope(mutant: Mutant) -> None:
    assert alarm(mutant) == ""


@pytest.mark.parametrize("number", range(1, 19))
def test_the_list_that_this_began_with_is_whole(number: int) -> None:
    """M1 to M18 (spec 7.4)."""
    assert any(f"M{number};" in m.source for m in KILLED)


def test_every_mutant_documents_what_it_drops() -> None:
    for mutant in MUTANTS.values():
        assert mutant.drops.endswith(".")
        assert mutant.source
        assert bool(mutant.breaks) != bool(mutant.survives)
        assert mutant.patches or mutant.guards


def functions() -> dict[tuple[str, str], Any]:
    """Every function that the machine knows, and every table with one, by where it stands."""
    found: dict[tuple[str, str], Any] = {}
    for module in machine_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                # Whole: a copy hashes no key, and a rule's key takes long to hash.
                found[module.__name__, name] = value.copy() if any(map(callable, value.values())) else None
            elif callable(value):
                found[module.__name__, name] = value
            for key, member in vars(value).items() if isinstance(value, type) else ():
                if callable(member):
                    found[module.__name__, f"{name}.{key}"] = member
    return found


def test_patches_are_taken_back() -> None:
    before = functions()
    for mutant in MUTANTS.values():
        with mutant.applied():
            assert (functions() != before) == bool(mutant.patches), mutant.name
        assert functions() == before, mutant.name
    mutant = next(iter(MUTANTS.values()))
    with pytest.raises(ZeroDivisionError), mutant.applied():
        raise ZeroDivisionError
    assert functions() == before


def test_a_rule_that_has_moved_is_reported() -> None:
    def nowhere() -> None: ...

    before = functions()
    moved = Mutant(name="moved", drops="", source="", patches=(*KILLED[0].patches, Swap(nowhere, nowhere)))
    with pytest.raises(CannotMutate, match="nowhere is nowhere"), moved.applied():
        pass
    assert functions() == before


def test_a_compiled_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "compiled", lambda: True)
    with pytest.raises(CannotMutate, match="as plain Python"):
        hunt(KILLED[0], no_clock)


def test_a_hunt_without_time_reports_that_it_was_stopped() -> None:
    ticks = iter(range(1000))
    kill = hunt(MUTANTS["floor-too-high"], lambda: float(next(ticks)), budget_s=0.5)
    assert kill.stopped
    assert not as_expected(MUTANTS["floor-too-high"], kill)


def test_guards_change_relations_that_are_made_inside() -> None:
    mutant = MUTANTS["deferred-write-after-expiry"]
    scope = Scope(drop=1)
    with mutant.applied():
        assert relation(scope).space.scope == attrs.evolve(scope, dialect=changed(scope.dialect, lease_rechecked=False))
    assert relation(scope).space.scope == scope


@pytest.mark.parametrize("name", ["deferred-write-after-expiry", "no-tombstone", "fail-ignored", "seq-repeated"])
def test_the_counterexample_of_a_kill_replays(name: str) -> None:
    mutant = MUTANTS[name]
    kill = hunted(name)
    recorded = decode(encode(counterexample(mutant, kill)))
    assert recorded.mutant == name
    assert recorded.verdict is not None
    assert recorded.verdict.invariant == mutant.breaks
    with mutant.applied():
        assert strict(mutant.world(), recorded).verdict == recorded.verdict


@pytest.mark.parametrize("name", ["deadline-frees", "lease-word-ignored", "first-rank-frees", "seq-repeated"])
def test_random_walks_catch_it_too(name: str) -> None:
    kill = stray(MUTANTS[name], no_clock, range(3_000))
    assert kill.invariant.startswith(("S", "L"))
    assert kill.search == "walk"
    assert 0 < kill.states <= 3_000


@pytest.mark.nightly
def test_random_walks_catch_nine_in_ten() -> None:
    """Within 10,000 runs."""
    kills = [stray(mutant, no_clock) for mutant in KILLED if not (mutant.scope.horizon or mutant.scope.method)]
    missed = [kill.mutant for kill in kills if not kill.invariant]
    assert len(missed) * 10 <= len(kills), missed
