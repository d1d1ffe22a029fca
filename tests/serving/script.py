"""The vocabulary of a script, and of the calls that a node makes while it is played.

A script is a list of steps. It names requests by number; the same steps go to the simulated node and to the live one.
A step is what happens to one node from outside: a leg arrives or is taken back, its engine does something, a peer or
the transport answers, time passes. Calls are what the node does about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias

EngineAct: TypeAlias = Literal["admit", "join", "token", "finish", "preempt", "compute", "layer", "computed"]


class Lengths(NamedTuple):
    """What a client asks for."""

    prompt: int
    output: int


class Arrive(NamedTuple):
    """A leg arrives. `alone`: the engine serves it without a transfer. `first`: where the answer's first token is P's,
    whether the decode leg brings it ("known") or it comes later ("follows")."""

    r: int
    alone: bool = False
    first: Literal["", "known", "follows"] = ""


class FirstToken(NamedTuple):
    """P's token, which a decode leg waits for, arrives."""

    r: int


class Abort(NamedTuple):
    """Who asked has hung up, or the router takes the leg back."""

    r: int


class Do(NamedTuple):
    """The engine does something with a request. `n`: tokens that are cached here (admit), or computed (compute).
    "layer" and "computed" are of the step that runs, whosever prompt that is: their request is -1."""

    act: EngineAct
    r: int = -1
    n: int = 0


class Peer(NamedTuple):
    """A peer or the transport says something, which `peers.py` turns into an endpoint's event."""

    what: str
    r: int = -1
    rank: int = 0
    side: str = ""
    """Which of the node's names it is said to, where it has two."""


class Store(NamedTuple):
    """A store answers P: what it has of a prompt, or what became of a put."""

    what: Literal["found", "nothing", "put", "refused"]
    r: int


class Look(NamedTuple):
    """P asks a store's node what it has of a prompt."""

    r: int


class Wait(NamedTuple):
    """Time passes."""

    ms: int
    ns: int = 0


class Together(NamedTuple):
    """These happen before the node has its next turn."""

    steps: tuple[Step, ...]


Step: TypeAlias = Arrive | FirstToken | Abort | Do | Peer | Store | Look | Wait | Together


class Event(NamedTuple):
    """A `Peer` step, resolved: this event reaches the endpoint at that address."""

    address: str
    event: Any


class Call(NamedTuple):
    """Something that a node does: to its engine, its endpoints, its host, or to who asked."""

    kind: str
    subject: str
    details: tuple[Any, ...] = ()

    def __str__(self) -> str:
        details = ", ".join(short(detail) for detail in self.details)
        return f"{self.kind} {self.subject}" + (f" ({details})" if details else "")


def short(detail: Any) -> str:
    """A detail, without what every frame repeats."""
    text = str(detail)
    return text if len(text) <= 90 else text[:87] + "..."


def two_columns(left: Iterable[Call], right: Iterable[Call], width: int = 76) -> str:
    """Both sides' calls of one step; lines that differ are marked."""
    lines = [f"    {'simulated':{width}}   live"]
    for one, other in zip_longest(left, right):
        mark = " " if one == other else "*"
        ours, theirs = ("-" if call is None else str(call) for call in (one, other))
        lines.append(f"  {mark} {ours:{width}} | {theirs}")
    return "\n".join(lines)
