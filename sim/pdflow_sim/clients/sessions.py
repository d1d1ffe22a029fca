"""Sends the turns of sessions: each a think time after the answer of the one before.

A turn that fails or is cancelled ends its session, for the next one would need its answer. With closed arrivals each
user begins another session a think time after the last one's end. The workload's number of requests counts turns, in
the order in which they are sent; sessions that are open when the last one has been sent end there.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.results.records import Outcome
from pdflow.workload.request import WHEN_ONE_ENDS
from pdflow.workload.sessions import Session
from pdflow_sim.clients.clients import Clients


class SessionClients:
    """Args:
    drawn: sessions in order of beginning, without end.
    requests: how many are sent in all.
    """

    def __init__(self, clients: Clients, drawn: Iterator[Session], requests: int) -> None:
        self.clients = clients
        self.env = clients.env
        self.records = clients.metrics.records
        self.drawn = drawn
        self.left = requests
        self.open: dict[int, tuple[Session, int]] = {}
        """By request that has not ended: whose it is, and which turn."""
        self.closed: Session | None = None
        """With closed arrivals, once all users have begun: the next session."""

    def begin(self) -> None:
        """Let sessions begin, one in the queue at a time."""
        session = next(self.drawn)
        if session.begins_ns == WHEN_ONE_ENDS:
            self.closed = session
        else:
            self.env.call(session.begins_ns - self.env.now, self.begun, session)

    def begun(self, session: Session) -> None:
        self.send((session, 0))
        if self.left:
            self.begin()

    def begun_again(self, _: None) -> None:
        """A closed user comes back."""
        session = self.closed
        assert session is not None
        self.closed = next(self.drawn)
        self.send((session, 0))

    def send(self, about: tuple[Session, int]) -> None:
        """One turn, if it is not one too many."""
        if not self.left:
            return
        session, turn = about
        self.left -= 1
        self.clients.exhausted = not self.left
        request = len(self.records)
        self.open[request] = about
        self.records.sessions.append((session.index, turn + 1))
        self.clients.enter(session.turns[turn])

    def ended(self, request: int, outcome: Outcome) -> None:
        """The answer is whole, or there will be none."""
        session, turn = self.open.pop(request)
        think_ns = session.think_ns[turn]
        if outcome == "completed" and turn + 1 < len(session.turns):
            self.env.call(think_ns, self.send, (session, turn + 1))
        elif self.closed is not None:
            self.env.call(think_ns, self.begun_again, None)
