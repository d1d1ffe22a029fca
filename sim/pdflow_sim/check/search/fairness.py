"""Fair runs: after the last fault, every strongly fair run resolves.

`liveness.py` follows one schedule from each state. Here every schedule without further faults is followed, into the
states beyond the scope's budgets too, and the cycles of the graph that results are judged: a run that never resolves
stays for ever in one of them, or stops.

A run is fair if it makes every step that is possible again and again: it delivers each link's frames, answers each of a
transport's tasks, moves each operation on, and lets engines and clients take their steps. A timer that stays armed and
may fire, fires. Three kinds of moves may stay away for ever: a start of an engine that is down; without clocks, the end
of a lease or a registration that D renews (liveness.py); and in strict, DEADLINE and STALL, which are not followed at
all, since no liveness may depend on them. An engine of which only a rank has died is started again in the end: until
then its scheduler keeps the prompts that the rank has.

Without clocks, a timer that repeats something (SYNC, CANCEL; in vllm-compat heartbeats and DEADLINE) has no budget any
more. It fires when nothing is under way that takes less time than its period, as `Repeats` says. With unlimited clocks
a timer fires when it is due.

A run has resolved when its state is settled (`StateSpace.settled`): every request has its outcome, blocks are back,
operations have ended. In a scope without timers it has to come to rest, and promptness.py judges how.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TypeAlias

from pdflow.protocol.events import TimerFired
from pdflow.protocol.timers import TimerKind
from pdflow_sim.check.moves.acts import ON_TASK, Move
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import ENDLESS, Scope
from pdflow_sim.check.search.components import components
from pdflow_sim.check.search.liveness import REPAIRS, may_fire, missing
from pdflow_sim.check.state.counting import Counting
from pdflow_sim.check.state.shadow_state import WHOLE, Broken
from pdflow_sim.check.state.space import State

Label: TypeAlias = Hashable
"""What fairness is about: a link, a task, an operation, a timer, or a step of an engine."""
ON_OPERATION = frozenset({"read", "land", "notice", "ended"})
OPTIONAL = frozenset({"start"})
"""Verbs of moves that a fair run need not make, unless only ranks of the engine have died."""


OPEN_STATES = 3_000
"""Limit of the states whose components are open at once. In a finite graph they are few; where numbers grow for ever
(SYNCs to two peers, one of which is down), no component ever closes."""


class Repeats(Enum):
    """When a timer that repeats something may fire."""

    LINKS_QUIET = "fair"
    """When no message is under way. Operations, handshakes, fences, flushes, prefills and admissions may
    take any number of periods."""
    AT_REST = "fair at rest"
    """When nothing but timers is possible."""


def supports(scope: Scope) -> bool:
    """True if the fair runs of a scope end in finitely many states: its clocks do not stop."""
    return scope.horizon in (0, ENDLESS)


class _TooManyError(Exception):
    """The limit of states was reached."""


class Fairness:
    """The check of one world. States are kept by their hash of 64 bits, and whole while their component is open."""

    def __init__(self, world: Transitions, repeats: Repeats, limit: int) -> None:
        scope = world.space.scope
        self.world = world
        self.space = world.space
        self.repeats = repeats
        self.limit = limit
        """Number of states beyond which the check is given up."""
        self.given_up = False
        self.strict = scope.dialect.control_frames
        self.repeated = REPAIRS if self.strict else REPAIRS | {TimerKind.DEADLINE}
        self.untimed = scope.clocks and not scope.horizon
        numbered = self.strict and scope.clocks and not scope.method
        self.counting = Counting(world.space) if numbered else None
        self.closed: set[int] = set()
        self.whole: dict[int, State] = {}
        """States whose component is open, by their names."""
        self.stops: set[int] = set()
        """Of these, the ones in which a fair run may stop."""
        self.loops: set[int] = set()
        """Of these, the ones with a move that changes nothing."""

    def check(self, states: Iterable[State]) -> None:
        """Check every fair run that begins in one of these states, with faults over. Raises Broken("L", ...), whose
        `state` is the first with a run that does not resolve."""
        for state in states:
            if self.given_up:
                return
            root = self.space.spent(state)
            name = self.name(root)
            if name in self.closed:
                continue
            self.whole[name] = root
            try:
                for component in components(name, self._after, self.closed):
                    self._check_component(component)
            except _TooManyError:
                self.given_up = True
                self.whole.clear()
                return
            except Broken as broken:
                broken.state, broken.repeats = state, self.repeats.value
                raise

    def name(self, state: Sequence[int]) -> int:
        """Return the hash by which a state is known."""
        return hash(tuple(state if self.counting is None else self.counting.canonical(state)))

    # The graph.

    def moves(self, state: State) -> list[Move]:
        """Return every move that is possible with faults over, those of repeating timers included."""
        moves = self.world.moves(state)
        if self.untimed and self._may_repeat(state, moves):
            armed = self.space.armed
            for node, end in enumerate(state[: self.space.first_link]):
                moves += [("timer", node, i) for i, timer in enumerate(armed[end]) if timer.kind in self.repeated]
        return moves

    def _may_repeat(self, state: State, moves: list[Move]) -> bool:
        if self.repeats is Repeats.AT_REST:
            return all(move[0] == "timer" or move[0] in OPTIONAL for move in moves)
        space = self.space
        if any(state[space.first_link : space.bag]) or space.bags.values[state[space.bag]]:
            return False
        return not any(move[0] == "notice" for move in moves)

    def apply(self, state: State, move: Move) -> State:
        """Return the state that a move leads to. A repeating timer uses no budget."""
        if move[0] == "timer" and self.untimed:
            timer = self.space.armed[state[move[1]]][move[2]]
            return self.world.turns.feed(state, self.space.cluster.nodes[move[1]], TimerFired(timer))
        return self.world.apply(state, move)

    def _after(self, name: int) -> list[int]:
        if len(self.whole) > OPEN_STATES or len(self.closed) > self.limit:
            raise _TooManyError
        state = self.whole[name]
        found = []
        moves = self.moves(state)
        if not any(self._is_demanded(state, move) for move in moves):
            self.stops.add(name)
        for move in moves:
            after = self.apply(state, move)
            other = self.name(after)
            if other == name:
                self.loops.add(name)
            elif other not in self.closed:
                self.whole.setdefault(other, after)
            found.append(other)
        return found

    def _is_demanded(self, state: State, move: Move) -> bool:
        """True if a fair run has to make this move, when it stays possible."""
        if move[0] == "timer" and self.untimed:
            timer = self.space.armed[state[move[1]]][move[2]]
            return timer.kind in self.repeated or may_fire(self.world, state, timer)
        if move[0] in OPTIONAL:
            return self.space.shadow_of(state).down[move[1]] != WHOLE
        return True

    # Verdicts.

    def _check_component(self, component: list[int]) -> None:
        """Raise Broken if a fair run stops in this component, or stays in it, without having resolved."""
        states = {name: self.whole.pop(name) for name in component}
        for name in self.stops.intersection(component):
            self.stops.remove(name)
            if self.space.scope.clocks and not self.space.settled(states[name]):
                raise Broken("L", f"without further faults it never ends: {missing(self.world, states[name])}")
        if len(component) > 1 or component[0] in self.loops:
            self.loops.difference_update(component)
            for cycle in self._fair_cycles(states):
                unsettled = next((one for one in cycle.values() if not self._is_over(one)), None)
                if unsettled is not None:
                    verbs = ", ".join(sorted({str(move[0]) for one in cycle.values() for move in self.moves(one)}))
                    raise Broken(
                        "L", f"a fair run repeats {len(cycle)} states ({verbs}): {missing(self.world, unsettled)}"
                    )

    def _is_over(self, state: State) -> bool:
        return self.space.scope.clocks and self.space.settled(state)

    def _fair_cycles(self, states: dict[int, State]) -> Iterator[dict[int, State]]:
        """Yield the largest sets of these states in which a fair run may stay for ever (as for a Streett condition:
        where a move would be demanded that leads out, a fair run cannot come by again and again)."""
        edges: dict[int, list[int]] = {}
        demanded: dict[int, set[Label]] = {}
        taken: dict[int, list[tuple[Label, int]]] = {}
        armed: dict[int, frozenset[Label]] = {}
        for name, state in states.items():
            moves = self.moves(state)
            taken[name] = [(self._label(state, move), self.name(self.apply(state, move))) for move in moves]
            demanded[name] = {self._label(state, move) for move in moves if self._is_demanded(state, move)}
            edges[name] = [other for _, other in taken[name] if other in states]
            armed[name] = self._armed(state)
        pending = [list(states)]
        while pending:
            subset = pending.pop()
            inside = set(subset)
            made = {label for name in subset for label, other in taken[name] if other in inside}
            everywhere = frozenset.intersection(*(armed[name] for name in subset))
            unmade = {
                label
                for name in subset
                for label in demanded[name] - made
                if not _is_timer(label) or label in everywhere
            }
            if not unmade:
                yield {name: states[name] for name in subset}
                continue
            kept = {name for name in subset if not demanded[name] & unmade}
            pending += _cycles(kept, edges)

    def _armed(self, state: State) -> frozenset[Label]:
        ends = enumerate(state[: self.space.first_link])
        return frozenset(("timer", node, timer) for node, end in ends for timer in self.space.armed[end])

    def _label(self, state: State, move: Move) -> Label:
        verb, space = move[0], self.space
        if verb == "timer":
            return "timer", move[1], space.armed[state[move[1]]][move[2]]
        if verb in ON_TASK:
            return "task", space.tasks_of(state)[move[1]]
        if verb == "late":
            return "late", space.bags.values[state[space.bag]][move[1]]
        if verb in ON_OPERATION:
            return (verb, space.ops_of(state)[move[1]][0], *move[2:])
        return move


def _is_timer(label: Label) -> bool:
    return isinstance(label, tuple) and label[0] == "timer"


def _cycles(nodes: set[int], edges: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield the components of a part of a graph in which a run may go on."""
    closed: set[int] = set()
    for node in nodes:
        for subset in components(node, lambda one: [other for other in edges[one] if other in nodes], closed):
            if len(subset) > 1 or subset[0] in edges[subset[0]]:
                yield subset
