"""Digests of states by value, whatever numbers their values were interned under: the same in every process.

A digest changes with what is in a state, and with nothing else: not with the order in which a search met its values,
not with PYTHONHASHSEED, not with a kind of fault or a field of the shadow state that was added later and does not occur
in it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.shadow_state import OPERATION_TASKS
from pdflow_sim.check.state.space import State

_encode = msgspec.json.Encoder(order="deterministic").encode
DIGEST_BYTES = 8
"""64 bits are plenty: a counterexample compares hundreds of states, not millions."""


def digest(world: Transitions, state: State) -> str:
    """Return the digest of a state: 16 hexadecimal digits."""
    return hashlib.blake2b(_encode(_plain(world, state)), digest_size=DIGEST_BYTES).hexdigest()


def _plain(world: Transitions, state: State) -> dict[str, Any]:
    """Return a state by value. Collections that a state keeps in the order of interned numbers are sorted by value."""
    space = world.space
    nodes, links, frames = space.cluster.nodes, space.cluster.links, space.frames.values
    shadow = space.shadow_of(state)
    left = space.budgets.values[state[space.budget]]
    ends = zip(nodes, state, strict=False)
    # Of a core whose engine reports and ends at once the ghosts say all there is to say.
    includes_cores = space.scope.late or space.scope.decodes or space.cluster.method is not None
    cores = frozenset() if includes_cores else frozenset(space.cluster.roles.values())
    return {
        **space.further(state),
        "endpoints": [space.endpoints.values[end] for node, end in ends if node not in cores],
        "links": [
            [*link, *(frames[frame] for frame in space.chans.values[chan])]
            for link, chan in zip(links, state[space.first_link : space.bag], strict=True)
            if chan
        ],
        "late": _sorted([*links[link], frames[frame]] for link, frame in space.bags.values[state[space.bag]]),
        "tasks": _sorted(
            [kind, nodes[node], space.checker.operations.values[target] if kind in OPERATION_TASKS else nodes[target]]
            for kind, node, target in space.tasks_of(state)
        ),
        "operations": _sorted(
            [*space.checker.operations.values[op], world.components.operations.by_value(flags)]
            for op, flags in space.ops_of(state)
        ),
        "ghost": {name: values for name, values in shadow._asdict().items() if any(values)},
        "left": {fault.name: left[fault] for fault in FaultKind if left[fault]},
    }


def _sorted(items: Any) -> list[Any]:
    return sorted(items, key=_encode)
