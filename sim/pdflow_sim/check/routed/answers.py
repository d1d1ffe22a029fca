"""The answers of the clients in the explored world: the real `Answer` of `pdflow/routing`, one for each client.

The router's driver keeps them, beside the router's endpoint (runtime/pdflow_runtime/router/call.py,
sim/pdflow_sim/nodes/router_node.py). Here each has a slot of the state, as an endpoint has. Which attempt's pieces
reach a client is decided there and nowhere in the checker; what has reached it is checked in
routed/invariant_checker.py. Answers begin with a token of D's (first_token = "decode").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from pdflow.routing.answer import Answer
from pdflow_sim.check.state.shadow_state import CRASH, Broken, Interned
from pdflow_sim.check.state.space import Draft, State, StateSpace

Args = ParamSpec("Args")
Returned = TypeVar("Returned")


class ClientAnswers:
    """The answers of all clients: a further slot of every state for each."""

    def __init__(self, space: StateSpace) -> None:
        self.answers = Interned()
        """Fingerprints of answers. The first is that of an answer of which nothing has arrived."""
        self.bodies: list[Answer] = []
        self._asked: dict[tuple[Any, ...], tuple[int, Any]] = {}
        scope = space.scope
        self.fresh = self._known(Answer(scope.streams, first_from_prefill=False))
        self.clients = scope.requests
        self.first = space.claim((self.fresh,) * self.clients, self._by_value)

    def answer(
        self,
        draft: Draft,
        client: int,
        rule: Callable[Concatenate[Answer, Args], Returned],
        *args: Args.args,
        **named: Args.kwargs,
    ) -> Returned:
        """Call a method of this client's `Answer`, put the changed answer into a draft, and return its result. Raises
        Broken."""
        slot = self.first + client
        key = (draft[slot], rule, args, *named.items())
        found = self._asked.get(key)
        if found is None:
            body = self.bodies[draft[slot]].fork()
            try:
                returned = rule(body, *args, **named)
            except Exception as error:
                raise Broken(CRASH, f"{type(error).__name__}: {error}") from error
            found = self._asked[key] = self._known(body), returned
        draft[slot] = found[0]
        answered: Returned = found[1]
        return answered

    def forget(self, draft: Draft) -> None:
        """Forget all answers, as a router that crashes does."""
        draft[self.first : self.first + self.clients] = (self.fresh,) * self.clients

    def _by_value(self, state: State) -> dict[str, Any]:
        """Return the answers by value for a digest; {} if nothing of any has arrived."""
        answers = state[self.first : self.first + self.clients]
        return {"answers": [self.answers.values[at] for at in answers]} if any(answers) else {}

    def _known(self, body: Answer) -> int:
        found = self.answers.of(body.fingerprint())
        if found == len(self.bodies):
            self.bodies.append(body)
        return found
