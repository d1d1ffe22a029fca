"""Session affinity: a session stays at the engine that has its conversation, while that engine is up and not full.

Full is more than `most_load` times its share of all open legs, this one included, rounded up: the bound of consistent
hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350). A session whose engine is full moves to
the least loaded one, and stays there for its next turns. A request without a session goes to the
least loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import ceil
from typing import Final

from pdflow.routing.events import NO_SESSION, RequestArrived
from pdflow.routing.policy import Choice

MOST_SESSIONS: Final = 100_000
"""The most sessions that are remembered; the least recently used are forgotten first."""
NOWHERE: Final = (-1, 0)


class SessionAffinity(Choice):
    __slots__ = ("assigned", "most_load", "most_sessions")

    def __init__(self, engines: int, most_load: float = 1.25, most_sessions: int = MOST_SESSIONS) -> None:
        super().__init__("session-affinity", engines)
        self.most_load = most_load
        self.most_sessions = most_sessions
        self.assigned: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """The engine of each session and the tokens of its last prompt; the least recently used session first."""

    def fork(self) -> Choice:
        other = SessionAffinity(0, self.most_load, self.most_sessions)
        other.assigned = self.assigned.copy()
        return self.copied_to(other)

    def fingerprint(self) -> Hashable:
        return tuple(self.loads), tuple(self.up), tuple(self.assigned.items())

    def pick(self, asked: RequestArrived, avoid: int | None) -> int | None:
        among = self.candidates(avoid)
        if not among:
            return None
        chosen_before, _ = self.assigned.get(asked.session, NOWHERE)
        if chosen_before in among and not self._is_full(chosen_before, among):
            return chosen_before
        return min(among, key=self.loads.__getitem__)

    def choose(self, asked: RequestArrived, avoid: int | None) -> int | None:
        chosen = self.pick(asked, avoid)
        if chosen is None:
            return None
        if asked.session != NO_SESSION:
            self.assigned[asked.session] = (chosen, asked.prompt_tokens)
            self.assigned.move_to_end(asked.session)
            if len(self.assigned) > self.most_sessions:
                self.assigned.popitem(last=False)
        return self.opened(asked, chosen)

    def found(self, asked: RequestArrived, engine: int) -> int:
        """Return the tokens of the session's last prompt, if it went to this engine: the next turn continues it."""
        chosen_before, tokens = self.assigned.get(asked.session, NOWHERE)
        return min(tokens, max(0, asked.prompt_tokens - 1)) if chosen_before == engine else 0

    def forget(self, engine: int) -> None:
        """Forget the sessions of an engine that has lost its KV, so that none returns to it for that."""
        for session in [session for session, chosen_before in self.assigned.items() if chosen_before[0] == engine]:
            del self.assigned[session]

    def _is_full(self, engine: int, among: list[int]) -> bool:
        open_legs = 1 + sum(self.loads[other] for other in among)
        return self.loads[engine] + 1 > ceil(self.most_load * open_legs / len(among))
