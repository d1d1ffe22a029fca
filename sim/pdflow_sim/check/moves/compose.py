"""Composition of a scope's relation from components.

Engines that have no method and no clocks, without a router, are the plain case. A router's endpoint (`attempts`),
clocks (`horizon`) and a transfer method (`method`) each add components, or replace plain ones.
"""

from __future__ import annotations

from functools import partial

import attrs

from pdflow_sim.check.moves.acts import MoveSource, Reads
from pdflow_sim.check.moves.alarms import Alarms
from pdflow_sim.check.moves.clocks import Clocks, DueTimers
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.moves.deaths import Deaths
from pdflow_sim.check.moves.engines import Engines
from pdflow_sim.check.moves.frames import Frames
from pdflow_sim.check.moves.method_engines import MethodEngines
from pdflow_sim.check.moves.onesided import OneSided, Operations
from pdflow_sim.check.moves.pieces import PieceOperations
from pdflow_sim.check.moves.relation import Relation
from pdflow_sim.check.moves.tasks import Tasks
from pdflow_sim.check.routed.cluster import RoutedCluster
from pdflow_sim.check.routed.invariant_checker import RoutedInvariantChecker
from pdflow_sim.check.routed.routed import RouterDriver
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.cluster import ScopeCluster
from pdflow_sim.check.state.endpoint_checks import dies_of_silence, notes_window
from pdflow_sim.check.state.invariant_checker import InvariantChecker
from pdflow_sim.check.state.space import StateSpace
from pdflow_sim.check.state.turns import TurnRunner


def relation(scope: Scope) -> Relation:
    """Return the relation of a scope's world. Raises ValueError for a scope that no cluster fits."""
    if scope.method:
        return Relation(by_method(scope))
    components = routed(scope) if scope.attempts else plain(scope)
    return Relation(timed(components) if scope.horizon else components)


def plain(scope: Scope) -> Components:
    """Compose a world of engines without clocks, where a router may do anything at any moment."""
    cluster = ScopeCluster(scope)
    space = StateSpace(cluster, InvariantChecker(cluster))
    turns = TurnRunner(space)
    return composed(space, turns, Engines(space, turns), OneSided(space, turns))


def composed(space: StateSpace, turns: TurnRunner, engines: Engines, operations: Operations) -> Components:
    """Compose the components that every world has, around the engines and operations, which a method replaces."""
    frames = Frames(space, turns)
    tasks = Tasks(space, turns, operations)
    timers = Alarms(space, turns)
    deaths = Deaths(space, turns, engines, operations)
    if space.scope.window:
        turns.checks.append(partial(notes_window, space.checker))
    components = (engines, frames, tasks, operations, timers, deaths)
    return Components(
        space=space,
        turns=turns,
        engines=engines,
        frames=frames,
        tasks=tasks,
        operations=operations,
        timers=timers,
        deaths=deaths,
        acts={verb: act for component in components for verb, act in component.acts().items()},
        sources=(
            MoveSource(Reads.SHADOW, engines.moves),
            MoveSource(Reads.LATE, frames.late_moves),
            MoveSource(Reads.TASKS, tasks.moves),
            MoveSource(Reads.OPERATIONS, operations.moves),
            MoveSource(Reads.SHADOW, frames.losses),
            MoveSource(Reads.SHADOW, deaths.moves),
        ),
        lost_by={
            "lose": frames.lost_by,
            "corrupt": frames.lost_by_corruption,
            **dict.fromkeys(("restart", "outlive", "kill", "kill rank"), deaths.lost_by),
        },
    )


def routed(scope: Scope) -> Components:
    """Compose a world with the router's endpoint. It decides what may happen at any moment in worlds without it."""
    cluster = RoutedCluster(scope)
    checker = RoutedInvariantChecker(cluster)
    space = StateSpace(cluster, checker)
    turns = TurnRunner(space)
    base = composed(space, turns, Engines(space, turns), OneSided(space, turns))
    driver = RouterDriver(cluster, checker, base)
    turns.http = driver
    space.clients = driver
    return attrs.evolve(
        base,
        acts=base.acts | driver.acts(),
        sources=(
            MoveSource(Reads.SHADOW, driver.moves),
            *base.sources[:-1],
            MoveSource(Reads.SHADOW, driver.death_moves),
        ),
    )


def timed(base: Components) -> Components:
    """Add clocks to a world: timers fire when they are due."""
    if not base.space.scope.abort:
        base.turns.checks.append(dies_of_silence)
    timers = DueTimers(base.space, base.turns)
    clocks = Clocks(base.space, timers)
    acts = base.acts | timers.acts() | clocks.acts()
    return attrs.evolve(base, timers=timers, clocks=clocks, acts=acts, further=(clocks.moves,))


def by_method(scope: Scope) -> Components:
    """Compose the world of a transfer method, with engines and operations of its own."""
    cluster = ScopeCluster(scope)
    assert cluster.plan is not None
    space = StateSpace(cluster, InvariantChecker(cluster))
    turns = TurnRunner(space)
    plain_engines = Engines(space, turns)
    engines = MethodEngines(space, turns, plain_engines, cluster.plan)
    operations = PieceOperations(space, turns, engines, cluster.plan)
    turns.posting = operations
    turns.checks.append(engines.takes_its_time)
    base = composed(space, turns, plain_engines, operations)
    return attrs.evolve(
        base,
        acts=operations.tidied(base.acts | engines.acts()),
        sources=(
            MoveSource(Reads.SHADOW, engines.moves),
            *base.sources[1:],
            MoveSource(Reads.OPERATIONS, operations.lane_moves),
            MoveSource(Reads.SHADOW, engines.withdrawals),
        ),
        further=(engines.chosen,),
    )
