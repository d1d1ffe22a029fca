"""Smaller scopes for a counterexample: without requests, ranks, engines, particulars of the cluster or budgets; and its
moves by their names there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, ENDLESS, FaultKind, Scope
from pdflow_sim.check.state.cluster import ScopeCluster

PLAIN: dict[str, Any] = {"orphan": False, "chunks": 1, "lagging": False, "same_product": False, "same_base": False}
PLAIN |= {
    "down": False,
    "pool": 0,
    "p_pool": 0,
    "progressive": False,
    "streams": False,
    "pool_blocks": ENDLESS,
    "d_block": BLOCK_TOKENS,
    "hit_tokens": 0,
    "done_is_remote": True,
    "concurrent": False,
    "late": False,
    "decodes": False,
    "groups": 1,
    "method": "",
    "skew": 1,
    "drift": 0,
    "idle": False,
    "horizon": 0,
}
"""Values of the fields of a plain cluster."""
FRAMES = ("deliver", "drop", "delay", "duplicate", "corrupt", "late")


def simpler(scope: Scope, names: Sequence[str]) -> Iterator[tuple[Scope, list[str]]]:
    """Yield smaller scopes to try a counterexample in, and its moves by their names there."""
    for dropped in range(scope.requests if scope.requests > 1 else 0):
        fewer = attrs.evolve(
            scope,
            requests=scope.requests - 1,
            same_product=scope.same_product and scope.requests > 2,
            same_base=scope.same_base and scope.requests > 2,
        )
        yield fewer, _without_request(scope, fewer, dropped, names)
    for engine, field in (("P", "p_tp"), ("D", "d_tp")):
        for kept in range(getattr(scope, field) if getattr(scope, field) > 1 else 0):
            yield _with(scope, field, 1), _with_one_rank(engine, kept, names)
    if scope.p_tp == scope.d_tp == 2:
        for kept in range(2):
            one = attrs.evolve(scope, p_tp=1, d_tp=1)
            yield one, _with_one_rank("D", kept, _with_one_rank("P", kept, names))
    for attempts in range(1, scope.attempts):
        yield _with(scope, "attempts", attempts), list(names)
    for role, field in (("P", "p_engines"), ("D", "d_engines")):
        if getattr(scope, field) > 1:
            yield _with(scope, field, 1), [re.sub(rf"\b{role}[0-9]\b", role, text) for text in names]
    for field, plain in PLAIN.items():
        in_turn = field == "concurrent" and scope.attempts and scope.d_engines > 1
        if getattr(scope, field) != plain and not in_turn:
            yield _with(scope, field, plain), list(names)
    for fault in FaultKind:
        field = fault.name.lower()
        for amount in range(getattr(scope, field)):
            yield _with(scope, field, amount), list(names)


def loosely(text: str) -> str:
    """Return a name without the contents of its frame: its kind and its link are enough. The contents of SYNCs and
    answers depend on much that a shorter counterexample does without."""
    terms = text.split(" ")
    return " ".join((*terms[:2], *terms[-3:])) if terms[0] in FRAMES else text


def _with(scope: Scope, field: str, value: Any) -> Scope:
    return attrs.evolve(scope, **{field: value})


def _without_request(scope: Scope, fewer: Scope, dropped: int, names: Sequence[str]) -> list[str]:
    """Return the moves of the other requests, by the names that these have where there is one less."""
    if scope.attempts:
        return _without_client(dropped, names)
    old, new = ScopeCluster(scope), ScopeCluster(fewer)
    renamed: dict[str, str] = {}
    for after, before in enumerate(i for i in range(scope.requests) if i != dropped):
        renamed[old.requests[before]] = new.requests[after]
        renamed[old.xids[old.product_of[before]]] = new.xids[new.product_of[after]]
        renamed |= dict(zip(old.ends_of(before), new.ends_of(after), strict=True))
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in renamed))
    return [pattern.sub(lambda match: renamed[match[0]], text) for text in names]


def _without_client(dropped: int, names: Sequence[str]) -> list[str]:
    """Return the moves of the other clients, where the router names requests: r1 of a client, r1.2 and x1.2 of an
    attempt, never r1 of a rank."""
    number = re.compile(r"(?<![\w.>])([rx])(\d+)(?=\.\d|$)")

    def renamed(found: re.Match[str]) -> str:
        i = int(found[2])
        return f"{found[1]}{i - (i > dropped)}"

    gone = re.compile(rf"(?<![\w.>])[rx]{dropped}(?=\.\d|$)")
    return [number.sub(renamed, text) for text in names if not gone.search(text)]


def _with_one_rank(engine: str, kept: int, names: Sequence[str]) -> list[str]:
    """Return the moves of one rank of an engine, as those of rank 0."""
    other = 1 - kept
    pair = r"\br{}->" if engine == "P" else r"->r{}\b"
    gone = re.compile(rf"\b{engine}\.r{other}\b|" + pair.format(other))
    rank, operation = re.compile(rf"\b{engine}\.r{kept}\b"), re.compile(pair.format(kept))
    return [
        operation.sub(pair.format(0).replace(r"\b", ""), rank.sub(f"{engine}.r0", text))
        for text in names
        if not gone.search(text)
    ]
