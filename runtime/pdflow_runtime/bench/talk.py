"""Sends the turns of sessions, each a think time after the answer of the one before (the rules of
sim/pdflow_sim/clients/sessions.py).

A turn that fails or is cancelled ends its session. With closed arrivals each user begins another session a think time
after the last one's end. The workload's number of requests counts turns, in the order in which they are sent; sessions
that are open when the last one has been sent end there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import trio

from pdflow.protocol.values import Instant
from pdflow.workload.request import WHEN_ONE_ENDS
from pdflow.workload.sessions import Session
from pdflow_runtime.bench.contents import Contents, Conversation
from pdflow_runtime.bench.form import RequestForm
from pdflow_runtime.bench.load import ConcurrencyLimit


class Talk:
    """Sends the turns of sessions. Args: `drawn` are sessions in order of beginning, without end; `requests` are sent
    in all."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        drawn: Iterator[Session],
        requests: int,
        system_prompt_tokens: int,
        contents: Contents,
        form: RequestForm,
    ) -> None:
        self.limit: Final = limit
        self.ledger: Final = limit.ledger
        self._drawn: Final = drawn
        self._left = requests
        self._system_prompt_tokens: Final = system_prompt_tokens
        self._contents: Final = contents
        self._form: Final = form
        self._again: Iterator[Session] | None = None
        """With closed arrivals: the sessions that users begin after their first."""

    def prepare(self) -> None:
        """Do nothing: the prompts of later turns depend on the answers to earlier ones."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while self._left:
                session = next(self._drawn)
                if session.begins_ns == WHEN_ONE_ENDS:
                    self._again = chain((session,), self._drawn)
                    break
                if session.begins_ns:  # whoever begins at once is numbered before anybody is answered
                    await self.ledger.clock.sleep_until(session.begins_ns)
                if turn := self._turn(session, 0, session.begins_ns):
                    nursery.start_soon(self._user, turn)

    async def _user(self, turn: _TalkTurn) -> None:
        """Run one session; with closed arrivals, further ones, each a think time after the one before."""
        while True:
            at = await self._session(turn)
            if self._again is None:
                return
            await self.ledger.clock.sleep_until(at)
            again = self._turn(next(self._again), 0, at)
            if again is None:
                return
            turn = again

    async def _session(self, turn: _TalkTurn) -> Instant:
        """Run a session to its end; return the instant at which its user comes back."""
        clock = self.ledger.clock
        conversation = Conversation(self._contents, turn.session.index, self._system_prompt_tokens)
        while True:
            request = turn.session.turns[turn.turn_index]
            body = self._form.body(conversation.ask(turn.turn_index, request), request.output_tokens)
            answer = await self.limit.send(turn.number, body, request.leaves_ns)
            at = clock.now() + turn.session.think_ns[turn.turn_index]
            if self.ledger.records.outcome[turn.number] != "completed" or turn.turn_index + 1 == len(
                turn.session.turns
            ):
                return at
            conversation.add_answer(turn.turn_index, answer.token_ids, request.output_tokens)
            await clock.sleep_until(at)
            following = self._turn(turn.session, turn.turn_index + 1, at)
            if following is None:
                return at
            turn = following

    def _turn(self, session: Session, turn_index: int, at: Instant) -> _TalkTurn | None:
        """Record that the turn is due, and return it; None if the requests are used up."""
        if not self._left:
            return None
        self._left -= 1
        number = self.ledger.due(at, session.turns[turn_index], (session.index, turn_index + 1))
        return _TalkTurn(session, turn_index, number)


class _TalkTurn(NamedTuple):
    session: Session
    turn_index: int
    number: int
    """The number of its request in the ledger."""
