"""Both sides of a setting, played step by step: after each step they must have made the same calls.

What is no difference, and why; the adapters and `merged` see to it:

- Copies take no time: live ones are made at once. Adjacent ones of a rank count as one, as a simulated copy is of all
  layers.
- Tokens are no calls: a simulated engine reports none.
- A prompt that `begin` refuses is answered REJECTED: so the live engine's API answers it.
- Where no KV comes from a prefill, its answer's parameters are not compared: nobody reads them.
- An abort of a prefill leg that has its answer is not delivered live: its API does not hang up on itself.
- To hang up on a store is to withdraw: that is what the store's API makes of it.
- To hold an engine that is held is nothing.
- Who moves bytes when (lanes) is not looked at: an operation is posted, offered to and stopped.
- A step is composed when the node has been told of the end of the one before, as live ones are. A simulated engine
  plans it first, and a node that waits postpones what it was told of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from pdflow.protocol.errors import LocalProtocolError
from tests.serving.live import Live
from tests.serving.peers import Peers, number_of
from tests.serving.script import (
    Abort,
    Arrive,
    Call,
    Do,
    FirstToken,
    Look,
    Peer,
    Step,
    Store,
    Together,
    Wait,
    two_columns,
)
from tests.serving.scripted_engine import EngineModel
from tests.serving.setting import REQUESTS, Setting
from tests.serving.simulated import Simulated

WAITS = (100, 1_000, 9_000, 16_000, 41_000)
"""Milliseconds: a CANCEL again, a SYNC, a lease, a dead peer, a deadline."""


class Side(Protocol):
    """A node of one world."""

    name: str
    engine: EngineModel

    async def step(self, step: Any) -> list[Call]:
        """Play one, and say what the node did."""


class Differ(AssertionError):  # noqa: N818 (what was found, not an error of ours)
    """The first step at which the two sides' calls differ."""

    def __init__(self, setting: Setting, played: list[Step], simulated: list[Call], live: list[Call]) -> None:
        steps = "\n".join(f"    {step!r}," for step in played)
        super().__init__(
            f"{setting}: simulated and live differ at the last of these steps\n{steps}\n{two_columns(simulated, live)}"
        )


class Pair:
    """The two nodes of a setting, and who is around them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.simulated, self.live = Simulated(setting), Live(setting)
        self.peers = {ends.side: Peers(setting, ends) for ends in setting.ends()}
        self.asked: dict[str, list[int]] = {"look": [], "put": []}
        """What P has asked a store, and has no answer to."""
        self.looks: set[int] = set()
        self.played: list[Step] = []
        self.calls: list[Call] = []
        """All of the simulated node's."""
        self.arrived: dict[int, Arrive] = {}
        self.first_received: set[int] = set()
        self.aborted: set[int] = set()

    async def play(self, step: Step) -> None:
        """One step on both sides. Differ if they did not do the same."""
        self.played.append(step)
        event = self._resolved(step)
        if event is None:
            return
        ours, theirs = await self._both(event)
        for peers in self.peers.values():
            peers.on_calls(ours)
        for call in ours:
            if call.kind in ("store look", "store put"):
                self.asked[call.kind.removeprefix("store ")].append(number_of(call.subject))
        self.calls += ours
        ours, theirs = merged(calls_of_stores_last(ours)), merged(calls_of_stores_last(theirs))
        if ours != theirs:
            raise Differ(self.setting, self.played, ours, theirs)

    async def _both(self, event: Any) -> tuple[list[Call], list[Call]]:
        """What one side raises is a call of its own: that a node cannot do something is worth seeing beside what the
        other does."""
        found = []
        sides: tuple[Side, Side] = (self.simulated, self.live)
        for side in sides:
            try:
                found.append(await side.step(event))
            except (KeyError, ValueError, AssertionError, LocalProtocolError) as error:
                found.append([Call("raises", type(error).__name__, (str(error),))])
        if any(call.kind == "raises" for calls in found for call in calls):
            raise Differ(self.setting, self.played, *found)
        return found[0], found[1]

    def _resolved(self, step: Step) -> Any:
        match step:
            case Together(steps):
                return Together(tuple(one for one in map(self._resolved, steps) if one is not None))
            case Peer():
                return self.peers[step.side].event(step)
            case Store(what, r):
                asked = self.asked["look" if what in ("found", "nothing") else "put"]
                if r not in asked:
                    return None
                asked.remove(r)
            case Look(r):
                self.looks.add(r)
            case Arrive(r):
                self.arrived[r] = step
            case Abort(r):
                self.aborted.add(r)
            case FirstToken(r):
                self.first_received.add(r)
        return step

    # What may follow.

    def likely(self) -> list[Step]:
        """The same, each as often as it is worth: what leads on more often than what ends a request, as a long way goes
        through few steps."""
        return [step for step in self.possible() for _ in range(self._worth(step))]

    def _worth(self, step: Step) -> int:
        match step:
            case Do(act):
                return 8 if act in LEADS_ON else 2
            case Peer(what, r, rank, side):
                new = r in self.arrived and what == "register" and (r, rank) not in self.peers[side].registered
                return 12 if what in LEADS_ON or new else 2 if what == "accepted" else 1
            case Store(what):
                return 8 if what == "found" else 3
            case Arrive():
                return 2 if step.alone or step.r == len(REQUESTS) - 1 else 6
        return 1

    def possible(self) -> list[Step]:
        """Steps that may be next. The engines are in the same state, so one is asked for both."""
        found: list[Step] = [*self.simulated.engine.possible()]
        for peers in self.peers.values():
            found += peers.possible()
        found += [Store(what, r) for r in self.asked["look"] for what in ("found", "nothing")]  # type: ignore[misc]
        found += [Store(what, r) for r in self.asked["put"] for what in ("put", "refused")]  # type: ignore[misc]
        for r in range(len(REQUESTS)):
            if r not in self.arrived:
                found += self._arrivals(r)
            else:
                found += [Abort(r)] * (r not in self.aborted)
                if self.arrived[r].first == "follows" and r not in self.first_received:
                    found.append(FirstToken(r))
        if self.setting.role == "store":
            found += [Look(r) for r in range(len(REQUESTS)) if r not in self.looks | self.arrived.keys()]
        if not self.simulated.engine.step:
            found += [Wait(ms) for ms in WAITS]
        return found

    def _arrivals(self, r: int) -> list[Step]:
        if self.setting.role == "aggregated":
            return [Arrive(r, alone=True)]
        if self.setting.role == "decode" and self.setting.first_token == "prefill":
            return [Arrive(r, first="known"), Arrive(r, first="follows")]
        if self.setting.role == "store":
            return [Arrive(r)]
        return [Arrive(r), Arrive(r, alone=True)]

    # At the end.

    def done(self) -> None:
        """The pools hold the same."""
        ours, theirs = self.simulated.engine.pool, self.live.engine.pool
        assert (ours.free, ours.quarantined) == (theirs.free, theirs.quarantined)


def calls_of_stores_last(calls: list[Call]) -> list[Call]:
    """What is said to a store reaches it some time later, and so does its answer, in whatever order beside what else
    happens."""
    store_calls = [call for call in calls if call.kind.startswith("store ") or call.kind in ("found", "nothing found")]
    return [*(call for call in calls if call not in store_calls), *store_calls]


def merged(calls: list[Call]) -> list[Call]:
    """Copies of one rank, between which it offers at most what they have brought, count as one: a simulated copy is of
    all layers, live ones are layer by layer."""
    found: list[Call] = []
    copies = ""
    for call in calls:
        if call.kind == "copy" and call.subject == copies:
            continue
        if call.kind == "copy":
            copies = call.subject
        elif call.kind != "offer" or call.details[0] != copies:
            copies = ""
        found.append(call)
    return found


LEADS_ON = ("admit", "join", "computed", "layer", "compute", "connected", "done", "ended", "word")


def play(setting: Setting, *steps: Step) -> Pair:
    """A script that somebody has written down. Differ at the first step at which the two sides do."""
    pair = Pair(setting)

    async def all_of_it() -> None:
        for step in steps:
            await pair.play(step)
        pair.done()

    trio.run(all_of_it)
    return pair


__all__ = ["Abort", "Arrive", "Differ", "Do", "FirstToken", "Pair", "Peer", "Together", "Wait", "play"]
