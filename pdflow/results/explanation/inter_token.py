"""The worst inter-token latency of one request, and what the engine's steps had in them while it waited.

Records have no steps, so this needs a simulation of the run, whose step logs also list the prompts of each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from pdflow.results.explanation.others import NAMED
from pdflow.results.figures.itls import Instants, StepEnds, itls_ns, step_numbers
from pdflow.results.formatting import count, number
from pdflow.results.records import EngineTokens, Records
from pdflow.results.steps import Steps

PromptTokens: TypeAlias = tuple[int, int]
"""A request, and how many tokens of its prompt a step computed."""
StepPrompts: TypeAlias = Sequence[tuple[int, tuple[PromptTokens, ...]]]
"""The steps of one engine that computed prompts: their numbers from 0, ascending, and what they computed."""


@attrs.frozen(kw_only=True)
class WorstItl:
    """The longest wait of one request for a token after its first, and its cause.

    `token` is the one that it waited for, counted from 1. `sequences` waited for a token of the wait's last step,
    `usual_sequences` is the median of that over the request's steps.
    """

    request: int
    engine: str
    token: int
    duration_ns: int
    median_ns: int
    begin_ns: int
    steps: int
    sequences: int
    usual_sequences: int
    prompts: tuple[PromptTokens, ...] = ()
    preempted: bool = False
    with_transfer: bool = False
    resumed_from: str | None = None

    @property
    def cause(self) -> str:
        """What made the wait long, by name."""
        if self.resumed_from is not None:
            return "resumption"
        if self.with_transfer:
            return "transfer"
        if self.preempted:
            return "preemption"
        if self.prompts:
            return "prompt chunk"
        return "long batch" if self.sequences > self.usual_sequences else "long step"

    @property
    def text(self) -> str:
        """What made the wait long, in words."""
        prompts = _prompts_text(self.prompts)
        if self.resumed_from is not None:
            return f"{self.resumed_from} failed: the wait lasts until {self.engine} could continue the answer"
        if self.with_transfer:
            return f"the first token came from P: this wait holds the whole transfer to {self.engine}"
        if self.preempted:
            again = f", which computed {prompts}" if prompts else ""
            return (
                f"{self.engine} ran out of KV blocks and preempted it; its tokens were computed again within "
                f"{count(self.steps)} steps{again}"
            )
        batch = f"{count(self.sequences)} sequences (its median: {count(self.usual_sequences)})"
        if prompts:
            return f"the step of {self.engine} also computed {prompts}; it had {batch}"
        if self.sequences > self.usual_sequences:
            return f"a long batch: the step of {self.engine} had {batch}"
        return (
            f"the step of {self.engine} took longer, with {batch}: longer contexts, noise, or its host posted transfers"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for --json, times in ns."""
        return {**attrs.asdict(self), "cause": self.cause, "text": self.text}


def worst_itl(
    records: Records, request: int, logs: Mapping[str, Steps], prompts: Mapping[str, StepPrompts]
) -> WorstItl | None:
    """Return the worst ITL of a request; None if it was not completed or has one token, or if the step is not logged,
    as the last ones of an engine that died. `prompts` by engine."""
    waits = next(itls_ns(records.only([request]), logs))
    engine, runs = records.decode_engine[request], records.token_steps[request]
    if not len(waits) or engine is None or runs is None:
        return None
    worst = int(waits.argmax())
    every = [*records.earlier.get(request, []), EngineTokens(engine, runs, ())]
    engine, numbers, last, resumed_from = _generating_engine(worst + 1, len(waits) + 1, every)
    if last >= len(numbers):
        return None
    ends = StepEnds(logs[engine])
    begun = numbers[last - 1] + 1 if last else numbers[0]
    within = [found for step, found in prompts.get(engine, ()) if begun <= step <= numbers[last]]
    batches = ends.waiting_in(numbers)
    after_ns = int(waits[worst + 1 :].sum())
    return WorstItl(
        request=request,
        engine=engine,
        token=worst + 2,
        duration_ns=int(waits[worst]),
        median_ns=int(np.median(waits)),
        begin_ns=records.last_token_ns[request] - after_ns - int(waits[worst]),
        steps=int(numbers[last] - begun) + 1,
        sequences=int(batches[last]),
        usual_sequences=int(np.median(batches)),
        prompts=_summed([each for found in within for each in found]),
        resumed_from=resumed_from,
        preempted=bool(last) and int(numbers[last]) > int(numbers[last - 1]) + 1 and _computed(request, within),
        with_transfer=not last and resumed_from is None,
    )


def _generating_engine(token: int, tokens: int, every: Sequence[EngineTokens]) -> tuple[str, Instants, int, str | None]:
    """Find the engine that generated a token, counted from 0: return its name, the numbers of its logged steps that had
    tokens of the request, which of them had this one, and the engine before it, if this is its first. `every`: the
    tokens of each engine, in order."""
    first = tokens - sum(map(len, every))  # 1 if the first token came from P
    before = None
    for share in every:
        if token - first < len(share):
            break
        first, before = first + len(share), share.engine
    return share.engine, step_numbers(share.steps), token - first, before if token == first else None


def _computed(request: int, within: Sequence[tuple[PromptTokens, ...]]) -> bool:
    """Return whether the steps computed tokens of the request itself, which is what follows a preemption."""
    return any(who == request for found in within for who, _ in found)


def _summed(prompts: Sequence[PromptTokens]) -> tuple[PromptTokens, ...]:
    tokens: dict[int, int] = {}
    for request, computed in prompts:
        tokens[request] = tokens.get(request, 0) + computed
    return tuple(tokens.items())


def _prompts_text(prompts: Sequence[PromptTokens]) -> str:
    if not prompts:
        return ""
    names = ", ".join(f"r{request}" for request, _ in prompts[:NAMED]) + (", ..." if len(prompts) > NAMED else "")
    return f"{count(sum(tokens for _, tokens in prompts))} prompt tokens ({names})"


def milliseconds(ns: int) -> str:
    """Format a duration in ms."""
    return f"{number(ns / 1e6)} ms"
