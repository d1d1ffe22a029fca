"""The answers of the clients in the explored world: the real `Answer` of `pdflow/routing`, one for each client.

The router's driver keeps them, beside the router's endpoint (runtime/call.py, sim/router_node.py). Here each has a slot
of the state, as an endpoint has. Which attempt's pieces reach a client is decided there and nowhere in the checker;
what has reached it is judged in routed_judge.py. Answers begin with a token of D's (first_token = "decode").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from pdflow.routing.answer import Answer
from sim.check.ghost import CRASH, Broken, Interned
from sim.check.relation import Relation
from sim.check.scope import Scope
from sim.check.world import Draft, State

Args = ParamSpec("Args")
Said = TypeVar("Said")


class Answers(Relation):
    """A Relation with a further slot for each client's answer, behind all others."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.first_answer = len(super().beginning())
        self.answers = Interned()
        """Their fingerprints. The first is that of an answer of which nothing has come."""
        self.answer_bodies: list[Answer] = []
        self._asked: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def beginning(self) -> State:
        fresh = self._known(Answer(self.scope.streams, first_from_prefill=False))
        return (*super().beginning(), *[fresh] * self.scope.requests)

    def answer(
        self,
        draft: Draft,
        client: int,
        rule: Callable[Concatenate[Answer, Args], Said],
        *args: Args.args,
        **named: Args.kwargs,
    ) -> Said:
        """What a method of this client's `Answer` says, and the change that it makes to a draft. Raises Broken."""
        slot = self.first_answer + client
        key = (draft[slot], rule, args, *named.items())
        found = self._asked.get(key)
        if found is None:
            body = self.answer_bodies[draft[slot]].fork()
            try:
                said = rule(body, *args, **named)
            except Exception as error:
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
            found = self._asked[key] = self._known(body), said
        draft[slot] = found[0]
        answered: Said = found[1]
        return answered

    def further(self, state: State) -> dict[str, Any]:
        """Those of which nothing has come say nothing."""
        further, answers = super().further(state[: self.first_answer]), state[self.first_answer :]
        return {**further, "answers": [self.answers.values[at] for at in answers]} if any(answers) else further

    def _known(self, body: Answer) -> int:
        found = self.answers.of(body.fingerprint())
        if found == len(self.answer_bodies):
            self.answer_bodies.append(body)
        return found
