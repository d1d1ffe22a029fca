"""Replays of counterexamples: strict, up to the first difference, or lenient, skipping impossible moves.

Strict is for files: the same moves lead through the same states to the same verdict, or the first step at which they do
not is named. Lenient is for shrinking, and for a file that is older than the protocol. A world with a mutant in place
is the caller's to build. Every step is checked, and after the last one whether all requests can still end (L).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import attrs

from pdflow_sim.check.counterexamples import names
from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information, ReplayStep, Verdict
from pdflow_sim.check.moves.acts import Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.search.fairness import Fairness, Repeats
from pdflow_sim.check.search.liveness import live
from pdflow_sim.check.search.needless import NEEDLESS, NeedlessFailures
from pdflow_sim.check.state.digest import digest
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.space import State

FAIR_STATES = 1_000_000
"""Limit of the states of the fair runs from one state."""
SHOWN = 40
"""Possible moves that a mismatch lists: more than any small scope has."""


@attrs.frozen
class Stride:
    """One step of a replay: a name, tried in a state."""

    number: int
    """From 1, among the names that were given."""
    name: str
    before: State
    move: Move | None
    """None: not possible now."""
    after: State | None = None
    """None if it was not possible, or broke something."""
    broken: Broken | None = None


@attrs.frozen
class Mismatch:
    """The point at which a replay differs from its counterexample."""

    step: int
    """From 1; 0 is the state before the first."""
    expected: str
    found: str
    possible: tuple[str, ...] = ()
    """Moves that were possible instead, if this one was not."""
    digests: tuple[str, str] | None = None
    """Digests in the file and in the replay of the state in which they differ."""

    def __str__(self) -> str:
        lines = [f"step {self.step}: expected {self.expected}; {self.found}"]
        if self.possible:
            close = difflib.get_close_matches(self.expected, self.possible, n=1)
            lines[0] += f" (did you mean {close[0]}?)" if close else ""
            lines.append("  possible moves:")
            lines += [f"    {name}" for name in self.possible[:SHOWN]]
            lines += [f"    and {len(self.possible) - SHOWN} more"] if len(self.possible) > SHOWN else []
        if self.digests:
            recorded, now = self.digests
            lines.append(f"  digest of the state: {recorded} recorded, {now} now")
        return "\n".join(lines)


@attrs.frozen
class Replayed:
    """The result of a replay."""

    state: State
    """The last state that a step led to."""
    applied: tuple[str, ...]
    skipped: tuple[int, ...] = ()
    """Numbers of the steps that were not possible (lenient)."""
    verdict: Verdict | None = None
    mismatch: Mismatch | None = None
    """Strict only: the replay ended there, and its verdict is None."""

    def confirms(self, counterexample: CounterexampleFile) -> bool:
        """True if the replay came to the recorded verdict: the same invariant; its text may have changed since."""
        return self.mismatch is None and _invariant(self.verdict) == _invariant(counterexample.verdict)


def walk(world: Transitions, moves: Iterable[str], state: State | None = None) -> Iterator[Stride]:
    """Try every name in turn. A move that is not possible changes nothing; one that breaks an invariant is the last."""
    state = world.turns.start() if state is None else state
    for number, name in enumerate(moves, 1):
        move = names.find(world, state, name)
        if move is None:
            yield Stride(number, name, state, None)
            continue
        try:
            after = world.apply(state, move)
        except Broken as broken:
            yield Stride(number, name, state, move, None, broken)
            return
        yield Stride(number, name, state, move, after)
        state = after


def strict(world: Transitions, counterexample: CounterexampleFile) -> Replayed:
    """Replay a counterexample up to the first difference, if there is one."""
    state = world.turns.start()
    applied: list[str] = []

    def ended(mismatch: Mismatch | None, verdict: Verdict | None = None) -> Replayed:
        return Replayed(state, tuple(applied), (), verdict, mismatch)

    if mismatch := _differs(world, state, 0, "the state before the first step", counterexample.start):
        return ended(mismatch)
    for stride, step in zip(walk(world, counterexample.moves, state), counterexample.steps, strict=False):
        if stride.move is None:
            possible = _possible(world, state)
            now = "it is not possible now" if possible else "no move is possible"
            return ended(Mismatch(stride.number, step.move, now, possible, _both(world, counterexample, stride)))
        applied.append(step.move)
        if stride.broken is not None:
            verdict = Verdict(invariant=stride.broken.name, what=stride.broken.what)
            if stride.number < len(counterexample.steps):
                found = f"more steps are recorded, but this violates {stride.broken}"
                return ended(Mismatch(stride.number, step.move, found))
            return ended(None, verdict)
        assert stride.after is not None
        state = stride.after
        if mismatch := _differs(world, state, stride.number, step.move, step.after):
            return ended(mismatch)
    return ended(None, _final_verdict(world, state, counterexample.repeats))


def lenient(world: Transitions, moves: Iterable[str], lively: bool = True) -> Replayed:
    """Replay moves, skipping those that are not possible. `lively`: check at the end whether all can still end."""
    state = world.turns.start()
    applied: list[str] = []
    skipped: list[int] = []
    for stride in walk(world, moves, state):
        if stride.move is None:
            skipped.append(stride.number)
            continue
        applied.append(stride.name)
        if stride.broken is not None:
            verdict = Verdict(invariant=stride.broken.name, what=stride.broken.what)
            return Replayed(state, tuple(applied), tuple(skipped), verdict)
        assert stride.after is not None
        state = stride.after
    return Replayed(state, tuple(applied), tuple(skipped), _final_verdict(world, state) if lively else None)


def named(world: Transitions, moves: Iterable[Move]) -> list[str]:
    """Return the names of moves of this world. The last one may break an invariant."""
    state = world.turns.start()
    found = []
    for move in moves:
        found.append(names.name(world, state, move))
        try:
            state = world.apply(state, move)
        except Broken:
            break
    return found


def record(
    world: Transitions,
    moves: Iterable[str],
    *,
    mutant: str | None = None,
    repeats: str = "",
    information: Information | None = None,
) -> CounterexampleFile:
    """Replay moves leniently and return what happened as a counterexample, which replays strictly."""
    state = world.turns.start()
    start = digest(world, state)
    steps = []
    verdict = None
    for stride in walk(world, moves, state):
        if stride.after is not None:
            state = stride.after
            steps.append(ReplayStep(move=stride.name, after=digest(world, state)))
        elif stride.broken is not None:
            steps.append(ReplayStep(move=stride.name))
            verdict = Verdict(invariant=stride.broken.name, what=stride.broken.what)
    return CounterexampleFile(
        scope=world.space.scope,
        steps=tuple(steps),
        start=start,
        verdict=verdict or _final_verdict(world, state, repeats),
        mutant=mutant,
        repeats=repeats,
        information=information or Information(),
    )


def _final_verdict(world: Transitions, state: State, repeats: str = "") -> Verdict | None:
    try:
        live(world, [state])
        if repeats == NEEDLESS:
            NeedlessFailures(world, FAIR_STATES).check(state)
        elif repeats:
            Fairness(world, Repeats(repeats), FAIR_STATES).check([state])
    except Broken as broken:
        return Verdict(invariant=broken.name, what=broken.what)
    return None


def _differs(world: Transitions, state: State, number: int, step: str, recorded: str | None) -> Mismatch | None:
    if recorded is None or (now := digest(world, state)) == recorded:
        return None
    return Mismatch(number, step, "it leads to another state than recorded", digests=(recorded, now))


def _both(world: Transitions, counterexample: CounterexampleFile, stride: Stride) -> tuple[str, str] | None:
    """Return the recorded digest and that of the replay of the state before a step; None if none is recorded."""
    recorded = counterexample.steps[stride.number - 2].after if stride.number > 1 else counterexample.start
    return None if recorded is None else (recorded, digest(world, stride.before))


def _possible(world: Transitions, state: State) -> tuple[str, ...]:
    """Return the names of the possible moves, each once."""
    return tuple(dict.fromkeys(names.name(world, state, move) for move in world.moves(state)))


def _invariant(verdict: Verdict | None) -> str | None:
    return None if verdict is None else verdict.invariant
