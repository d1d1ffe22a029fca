"""Sends the turns of sessions: each a think time after the answer of the one before.

A turn that fails or is cancelled ends its session, for the next one would need its answer. With closed arrivals each
user begins another session a think time after the last one's end. The workload's number of requests counts turns, in
the order in which they are sent; sessions that are open when the last one has been sent end there.
"""

from __future__ import annotations

from collections.abc import Iterator

from simpy.events import Event

from pdflow.results.records import Outcome
from pdflow.workload.request import WHEN_ONE_ENDS
from pdflow.workload.sessions import Session
from pdflow_sim.clients.clients import Clients
from pdflow_sim.environment import ClockEnvironment, ProcessSteps


class SessionClients:
    """The users that send sessions, one simpy process each.

    Args:
    drawn: sessions in order of beginning, without end.
    requests: how many are sent in all.
    """

    def __init__(self, env: ClockEnvironment, clients: Clients, drawn: Iterator[Session], requests: int) -> None:
        self.env = env
        self.clients = clients
        self.records = clients.metrics.records
        self.drawn = drawn
        self.left = requests
        self.answers: dict[int, Event] = {}
        """The event of each open request's end, by request; its value is the outcome."""
        self.next_session: Session | None = None
        """With closed arrivals, once all users have begun: the session that the next free user begins."""

    def begin(self) -> None:
        """Let users begin their sessions."""
        self.env.process(self.arrivals())

    def arrivals(self) -> ProcessSteps:
        """Start each user when its session begins."""
        while self.left:
            session = next(self.drawn)
            if session.begins_ns == WHEN_ONE_ENDS:
                self.next_session = session
                return
            yield self.env.timeout(session.begins_ns - self.env.now)
            self.env.process(self.user(session))

    def user(self, session: Session) -> ProcessSteps:
        """Send one user's session and, with closed arrivals, another one a think time after its end."""
        while True:
            for number, think_ns in enumerate(session.think_ns):
                if not self.left:
                    return
                outcome = yield self.send(session, number)
                if outcome != "completed" or number + 1 == len(session.turns):
                    break
                yield self.env.timeout(think_ns)
            if self.next_session is None:
                return
            yield self.env.timeout(think_ns)
            session, self.next_session = self.next_session, next(self.drawn)

    def send(self, session: Session, number: int) -> Event:
        """Send one turn. Returns the event of its end."""
        self.left -= 1
        self.clients.exhausted = not self.left
        answer = self.answers[len(self.records)] = self.env.event()
        self.records.sessions.append((session.index, number + 1))
        self.clients.enter(session.turns[number])
        return answer

    def ended(self, request: int, outcome: Outcome) -> None:
        """Trigger the event of a request's end: the answer is whole, or there will be none."""
        self.answers.pop(request).succeed(outcome)
