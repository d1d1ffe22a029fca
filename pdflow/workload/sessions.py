"""Sessions: several requests, one after the other, of which each has the whole conversation before it in its prompt.

A session is drawn as a whole when it begins, in the order of beginning. So what it says does not depend on how long
anything takes; only when its later turns are sent does. Each kind of draw has a stream of its own.

Blocks of a conversation have names from its beginning on, those of the system prompt the same ones in all sessions.
What is said does not change later, so a block's name is the same in all turns that contain it, answers included. What
of it an engine has, and need not compute or be sent again, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pdflow.protocol.values import Instant
from pdflow.scenario.schema.workload import FIRST_TURN, LATER_TURNS, Client, Sessions, Workload
from pdflow.workload import draws
from pdflow.workload.request import SESSION_BLOCK_TOKENS, Request
from pdflow.workload.rng import Rng


class Session(msgspec.Struct, frozen=True):
    """One conversation. `begins_ns` is WHEN_ONE_ENDS for one that a closed user begins after another. `think_ns` are
    the pauses after the answers, each before the next turn or, the last one, before a closed user's next session."""

    index: int
    begins_ns: Instant
    turns: tuple[Request, ...]
    think_ns: tuple[int, ...]


def sessions(workload: Workload, seed: int) -> Iterator[Session]:
    """Yield the sessions of a [workload] table, in order of beginning, without end."""
    config, arrival = workload.sessions, workload.arrival
    if config is None or arrival is None or workload.input_tokens is None or workload.output_tokens is None:
        raise ValueError("sessions need an arrival process and both lengths")
    rng = Rng(seed)
    turns, think_ns = draws.turns(config.turns, rng.stream("turns")), draws.time_ns(config.think_s, rng.stream("think"))
    first = draws.length(workload.input_tokens, rng.stream("input"))
    answer = draws.length(workload.output_tokens, rng.stream("output"))
    more = draws.length(config.new_tokens, rng.stream("new"))
    leaves_ns = draws.leaving(workload.client or Client(), rng)
    common = config.system_prompt_tokens // SESSION_BLOCK_TOKENS
    next_name = common
    for index, at in enumerate(draws.instants(arrival, rng)):
        drawn = [_Turn(more() if turn else first(), answer(), leaves_ns()) for turn in range(turns())]
        pauses = tuple(think_ns() for _ in drawn)
        total_tokens = config.system_prompt_tokens + sum(turn.new + turn.answer for turn in drawn)
        end = next_name + total_tokens // SESSION_BLOCK_TOKENS - common
        talk = _talk(config, at, drawn, (*range(common), *range(next_name, end)))
        next_name = end
        yield Session(index, at, talk, pauses[: len(talk)])


class _Turn(NamedTuple):
    new: int
    answer: int
    leaves_ns: int


def _talk(config: Sessions, at: Instant, drawn: list[_Turn], names: tuple[int, ...]) -> tuple[Request, ...]:
    """Return the turns of a session, up to the first one that would be too long. `names` are of all its blocks."""
    talk: list[Request] = []
    context = config.system_prompt_tokens
    for position, turn in enumerate(drawn):
        prompt = context + turn.new
        context = prompt + turn.answer
        if talk and config.max_context_tokens is not None and context > config.max_context_tokens:
            break
        talk.append(
            Request(
                index=position,
                arrival_ns=at,
                input_tokens=prompt,
                output_tokens=turn.answer,
                prefix=names[: context // SESSION_BLOCK_TOKENS],
                class_=LATER_TURNS if position else FIRST_TURN,
                answer_named=True,
                leaves_ns=turn.leaves_ns,
            )
        )
    return tuple(talk)
