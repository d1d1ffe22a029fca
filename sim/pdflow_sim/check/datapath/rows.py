"""Rows of the data path table: the faults found of each method in each dialect. With our guards there are none; as
published, those that the original is known for."""

from __future__ import annotations

from enum import Enum
from typing import Final

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import AS_PUBLISHED, MemoryKind, Method
from pdflow_sim.check.datapath.acts import Acts
from pdflow_sim.check.datapath.decoding import ALONE, FOLLOWS, PLAIN, DecodingWorld
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.setting import Setting
from pdflow_sim.check.datapath.store import SETTINGS, StoreWorld
from pdflow_sim.check.datapath.storing import StoringWorld
from pdflow_sim.check.search.forward import Explorable, Explored, explore

STRICT: Final = "strict"
FIRST: Final = next(iter(METHODS))
_PUT: Final = frozenset({Finding.SKIPPED, Finding.DEAF, Finding.PEER})
PUBLISHED: Final[dict[str, frozenset[Finding]]] = {
    "p2p-nccl-put": _PUT,
    "p2p-nccl-put-async": _PUT,
    "p2p-nccl-get": frozenset({Finding.SKIPPED, Finding.PEER}),
    "cpu-staged": frozenset({Finding.INDEX, Finding.RING, Finding.PEER}),
    "kv-store": frozenset({Finding.SALT}),
}
"""Faults that must be found of a method as it was published (docs/methods.md). Other methods have none:
NIXL's faults are in its messages, which scopes and races show in `vllm-stock`."""


@attrs.frozen(kw_only=True)
class DataPathRow:
    """The result for one method in one dialect, over all its worlds."""

    method: str
    dialect: str
    states: int
    transitions: int
    counterexamples: dict[Enum, tuple[str, ...]]
    missed: tuple[str, ...]
    """Moves that should have been made, and findings that should have been found, and were not."""

    @property
    def expected(self) -> frozenset[Finding]:
        return PUBLISHED.get(self.method, frozenset()) if self.dialect == AS_PUBLISHED else frozenset()

    @property
    def ok(self) -> bool:
        return not self.missed and self.counterexamples.keys() == self.expected


def explorables(method: Method, dialect: str) -> list[Explorable]:
    """Return the worlds of a method: two requests of one P, and of a P each; of a store, its settings, and a P that
    uses it. D's core alone is the same for all methods, but for those whose D waits."""
    pipeline_policy = method.pipeline_policy(dialect)
    found: list[Explorable] = []
    if method.name == FIRST or (pipeline_policy.decode_waits and not method.staged_at_d):
        found.append(DecodingWorld(pipeline_policy, (FOLLOWS, ALONE)))
        found.append(DecodingWorld(pipeline_policy, (PLAIN, FOLLOWS), updates=True))
    if method.stores:
        stores = [StoreWorld(pipeline_policy, setting) for setting in SETTINGS]
        return [*found, *stores, StoringWorld(pipeline_policy)]
    return [*found, *(Acts(Setting(method, pipeline_policy, ps)) for ps in (1, 2))]


def row(method: Method, dialect: str) -> DataPathRow:
    each = [explore(world) for world in explorables(method, dialect)]
    done = {verb for one in each for verb in one.done}
    counterexamples: dict[Enum, tuple[str, ...]] = {}
    for one in each:
        for finding, counterexample in one.counterexamples.items():
            counterexamples[finding] = min(counterexamples.get(finding, counterexample), counterexample, key=len)
    return DataPathRow(
        method=method.name,
        dialect=dialect,
        states=sum(one.states for one in each),
        transitions=sum(one.transitions for one in each),
        counterexamples=dict(sorted(counterexamples.items(), key=lambda found: found[0].value)),
        missed=tuple(sorted(_missed(method, dialect, each, done))),
    )


def _missed(method: Method, dialect: str, each: list[Explored], done: set[str]) -> set[str]:
    """Return the moves and findings that are missing, without which a clean row would say little."""
    if dialect == AS_PUBLISHED:
        known = PUBLISHED.get(method.name, frozenset())
        return {finding.value for finding in known if not any(finding in one.counterexamples for one in each)}
    due = {"ask", "compute", "post", "land", "lose", "die", "admit", "load", "end"}
    if method.stores:
        due = {"put", "room", "written", "lapse", "get", "read", "give_up", "free"}
        due |= {"request", "found", "admit", "loaded", "load_fails", "compute", "reject", "fail", "dropped", "abort"}
    elif method.p_memory is not MemoryKind.BLOCKS:
        due.add("copy")
    ended = set() if all(one.ends for one in each) else {"an end"}
    return (due - done) | ended


def selected_rows(names: list[str], dialect: str | None) -> list[tuple[Method, str]]:
    """Return the rows to compute, in this order. `as-published` is `vllm-stock` in the protocol's words; where pieces
    go, `vllm-compat` is strict, and not looked at again."""
    dialects = {None: (STRICT, AS_PUBLISHED), "strict": (STRICT,), "vllm-stock": (AS_PUBLISHED,)}.get(dialect, ())
    return [(METHODS[name], one) for name in names for one in dialects]
