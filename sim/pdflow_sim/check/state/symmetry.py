"""Symmetry reduction: two states that differ only by a renaming of interchangeable requests have the same future.

A renaming gives every request the name, the prompt, the blocks and the digest of another one, everywhere at once, and
the engines that serve it the names and the incarnations of those that serve the other one. Each interned value is
renamed once, and then a whole state by a look-up for each of its slots. Of such states a search keeps the one that it
met first, as it is: no state is made up, and every counterexample replays as it was found.

Nothing else changes: sequence numbers and instants stay, and so does the order of what waits. That states, moves and
verdicts are then the same is what tests/check/test_symmetry.py holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations
from operator import getitem, itemgetter
from typing import Any, TypeAlias

import msgspec

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.ids import LeaseWord, base_id
from pdflow.protocol.messages import Sync, SyncReply
from pdflow.protocol.values import Allocation, EngineId
from pdflow_sim.check.engines.roles import address_of
from pdflow_sim.check.state.cluster import DIGEST, FIRST_INCARNATION, ORPHAN, ScopeCluster
from pdflow_sim.check.state.shadow_state import INITIAL_WORD, OPERATION_TASKS, ShadowState
from pdflow_sim.check.state.space import StateSpace

SYNCED = "synced"
NUMBERED = (Sync, SyncReply)
"""The messages that carry a SYNC's number as `seq`; SYNCED is the name of the field in which D keeps it."""
INCARNATIONS_PER_ENGINE = 50
"""Distance between the incarnations of one engine and those of the next (cluster.py)."""
Renaming: TypeAlias = Callable[[Sequence[int]], Iterable[int]]
"""Returns the slots of a state, or of its draft, under other names."""


class Symmetry:
    """The renamings of one space. `others` has all but the identity: none, if no requests are interchangeable."""

    def __init__(self, space: StateSpace) -> None:
        cluster = space.cluster
        # A router's endpoint numbers its attempts, and a method's memories serve in turn; nothing here knows how.
        plain = type(cluster) is ScopeCluster and not cluster.scope.method
        request_orders = permutations(range(len(cluster.requests))) if plain else iter([()])
        next(request_orders)
        found = filter(None, (Names.after(cluster, order) for order in request_orders))
        self.others: tuple[Renaming, ...] = tuple(
            Slots(space, names).renaming() for names in found if names is not None
        )

    def __str__(self) -> str:
        return f"requests alike: one of up to {len(self.others) + 1} states"


class Names:
    """The new names of everything when request i gets the name of request requests[i]."""

    def __init__(self, requests: Sequence[int], products: Sequence[int]) -> None:
        self.requests = requests
        self.products = products
        self.renames: dict[str, str] = {}
        incarnations: dict[int, int] = {}
        fields: dict[str, Any] = {"generation": {}, "blocks": {}, "digest": {}, "index": {}}
        of_incarnations = dict.fromkeys(("incarnation", "incarnations", "retired", "settings"), incarnations)
        self.numbers: dict[str, Any] = {**fields, "groups": fields["blocks"], **of_incarnations}
        """By the name of the field that holds numbers: a table, or another object with `get`, of what they become."""

    @classmethod
    def after(cls, cluster: ScopeCluster, order: Sequence[int]) -> Names | None:
        """Return the names under an order of requests; None if something would get two names: then something tells
        these requests apart."""
        products: dict[int, int] = {}
        pairs = list(enumerate(order))
        if not all(_call(products, cluster.product_of[i], cluster.product_of[j]) for i, j in pairs):
            return None
        names = cls(order, [products[old] for old in range(len(cluster.xids))])
        fit = [names._request(cluster, i, j) for i, j in pairs]
        fit += [names._product(cluster, old, new) for old, new in products.items()]
        return names if all(fit) else None

    def _request(self, cluster: ScopeCluster, i: int, j: int) -> bool:
        old, new = cluster.requests[i], cluster.requests[j]
        nameless = [f"?{cluster.d_of[k].engine}/{cluster.requests[k]}" for k in (i, j)]
        engines = zip(cluster.ends_of(i), cluster.ends_of(j), strict=True)
        return (
            all(self._engine(cluster, one, other) for one, other in engines)
            and _call(self.renames, old, new)
            and _call(self.renames, base_id(old), base_id(new))
            and _call(self.renames, *nameless)  # What P calls a prompt while it knows only who asks for it.
            and self._allocation(cluster.targets[i], cluster.targets[j])
        )

    def _engine(self, cluster: ScopeCluster, old: EngineId, new: EngineId) -> bool:
        ranks = list(zip(cluster.ranks[old], cluster.ranks[new], strict=True))
        ranks += [(ORPHAN + one, ORPHAN + other) for one, other in ranks]
        ranks += [(address_of(old), address_of(new))]
        incarnations = [
            (FIRST_INCARNATION[old] + restarts, FIRST_INCARNATION[new] + restarts)
            for restarts in range(INCARNATIONS_PER_ENGINE)
        ]
        return (
            (old == new or not cluster.scope.pulls)  # What P's lease words say depends on its incarnation.
            and _call(self.renames, old, new)
            and all(_call(self.renames, one, other) for one, other in ranks)
            and all(_call(self.numbers["incarnation"], one, other) for one, other in incarnations)
        )

    def _product(self, cluster: ScopeCluster, old: int, new: int) -> bool:
        ranks = range(len(cluster.p_ranks))
        return (
            _call(self.renames, cluster.xids[old], cluster.xids[new])
            and _call(self.renames, cluster.prefill_ids[old], cluster.prefill_ids[new])
            and self._allocation(cluster.sources[old], cluster.sources[new])
            and _call(self.numbers["digest"], DIGEST + old, DIGEST + new)
            and all(_call(self.numbers["index"], old * len(ranks) + r, new * len(ranks) + r) for r in ranks)
        )

    def _allocation(self, old: Allocation, new: Allocation) -> bool:
        blocks = zip(old.blocks, new.blocks, strict=True)
        return _call(self.numbers["generation"], old.generation, new.generation) and all(
            _call(self.numbers["blocks"], one, other) for one, other in blocks
        )

    def value(self, value: Any, field: str = "") -> Any:
        """Return a value of any type that endpoints, frames and effects consist of, under these names; the value itself
        if nothing in it has a new name."""
        kind = type(value)
        if kind is str:
            return self.renames.get(value, value)
        if kind is int:
            return self.numbers[field].get(value, value) if field in self.numbers else value
        if kind is tuple:
            return tuple(self.value(item, field) for item in value)
        if isinstance(value, msgspec.Struct):
            return self._struct(value)
        if isinstance(value, dict):
            return kind((self.value(key), self.value(item, field)) for key, item in value.items())
        if isinstance(value, (set, frozenset, deque)):
            return kind(self.value(item, field) for item in value)
        return self.body(value) if hasattr(kind, "fork") else value

    def _struct(self, value: Any) -> Any:
        kind = type(value)
        if kind is LeaseWord and value.value != INITIAL_WORD:
            return (
                value  # P numbers its own as prompts finish. In what D knows, each has its own (invariant_checker.py).
            )
        fields = [SYNCED if kind in NUMBERED and field == "seq" else field for field in kind.__struct_fields__]
        before = [getattr(value, field) for field in kind.__struct_fields__]
        after = [self.value(item, field) for item, field in zip(before, fields, strict=True)]
        if before == after:
            return value
        return kind(*after)

    def body(self, body: Any) -> Any:
        """Return a renamed copy of an endpoint, or of one of its tables."""
        other = body.fork()
        self._rename(other)
        return other

    def _rename(self, forked: Any) -> None:
        """Rename a fork in place, with the tables that it forked: the parts of an endpoint go on sharing one store."""
        for kind in type(forked).__mro__:
            for slot in getattr(kind, "__slots__", ()):
                held = getattr(forked, slot)
                if hasattr(type(held), "fork"):
                    self._rename(held)
                elif not isinstance(held, Deadlines):
                    setattr(forked, slot, self.value(held, slot))


def _call(table: dict[Any, Any], old: Any, new: Any) -> bool:
    """Give a thing its new name; False if it has another one already."""
    return bool(table.setdefault(old, new) == new)


class Renumbering(dict[int, int]):
    """A table of the new number of each interned value of one kind, computed at its first look-up."""

    def __init__(self, renamed: Callable[[int], int]) -> None:
        super().__init__()
        self.renamed = renamed

    def __missing__(self, number: int) -> int:
        found = self[number] = self.renamed(number)
        return found


class Slots:
    """A renaming of the states of a world, with a table for each slot."""

    def __init__(self, space: StateSpace, names: Names) -> None:
        self.space = space
        self.names = names
        nodes, links, renames = space.cluster.nodes, space.cluster.links, names.renames
        self.node = [space.cluster.at[renames.get(node, node)] for node in nodes]
        self.engine = [space.cluster.number[renames.get(engine, engine)] for engine in space.cluster.engines]
        # Links of a router's clients have no entry. They stay: its requests are never renamed.
        link_of = space.cluster.link_of
        self.link = [link_of.get((renames.get(a, a), renames.get(b, b)), i) for i, (a, b) in enumerate(links)]
        self.frame = Renumbering(self._frame)
        self.operation = Renumbering(self._operation)
        ends, chans, unnamed = Renumbering(self._end), Renumbering(self._chan), Renumbering(int)
        self.tables = [unnamed] * len(space.beginning())
        self.tables[: space.bag] = [ends] * space.first_link + [chans] * (space.bag - space.first_link)
        self.tables[space.bag] = Renumbering(self._bag)
        self.tables[space.task] = Renumbering(self._tasks)
        self.tables[space.op] = Renumbering(self._ops)
        self.tables[space.shadow] = Renumbering(self._shadow)

    def renaming(self) -> Renaming:
        """Return the renaming of a whole state: it renames every slot, and moves it to the place of its new name."""
        values = partial(map, getitem, self.tables)
        first = self.space.first_link
        moved = [*self.node, *(first + link for link in self.link)]
        if moved == sorted(moved):
            return values
        permute = itemgetter(*(moved.index(slot) for slot in range(len(moved))), *range(len(moved), len(self.tables)))
        return lambda state: permute(tuple(values(state)))

    def _end(self, number: int) -> int:
        node = self.space.endpoints.values[number][0]
        return self.space.endpoint(self.names.value(node), self.names.body(self.space.bodies[number]))

    def _frame(self, number: int) -> int:
        return self.space.frames.of(self.names.value(self.space.frames.values[number]))

    def _operation(self, number: int) -> int:
        known = self.space.checker.operations
        node, restarts, effect = known.values[number]
        return known.of((self.names.value(node), restarts, self.names.value(effect)))

    def _chan(self, number: int) -> int:
        chans = self.space.chans
        return chans.of(tuple(self.frame[frame] for frame in chans.values[number]))

    def _bag(self, number: int) -> int:
        bags = self.space.bags
        return bags.of(tuple(sorted((self.link[link], self.frame[frame]) for link, frame in bags.values[number])))

    def _tasks(self, number: int) -> int:
        tasks = self.space.tasks
        renamed = (
            (kind, self.node[node], self.operation[target] if kind in OPERATION_TASKS else self.node[target])
            for kind, node, target in tasks.values[number]
        )
        return tasks.of(tuple(sorted(renamed)))

    def _ops(self, number: int) -> int:
        ops = self.space.ops
        return ops.of(tuple(sorted((self.operation[op], flags) for op, flags in ops.values[number])))

    def _shadow(self, number: int) -> int:
        shadows = self.space.shadows
        shadow: ShadowState = shadows.values[number]
        requests = self.names.requests
        return shadows.of(
            shadow._replace(
                products=_moved(shadow.products, self.names.products),
                stages=_moved(shadow.stages, requests),
                landed=_moved(shadow.landed, requests),
                content=_moved(shadow.content, requests),
                restarts=_moved(shadow.restarts, self.engine),
                barred=_moved(shadow.barred, requests),
                down=_moved(shadow.down, self.engine) if shadow.down else (),
                refused=_moved(shadow.refused, self.engine) if shadow.refused else (),
            )
        )


def _moved(values: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return the values with entry i moved to index order[i]."""
    moved = dict(zip(order, values, strict=True))
    return tuple(moved[i] for i in range(len(values)))
