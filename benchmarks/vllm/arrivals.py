"""The prompts of an identity run and how they arrive, the same for one vLLM alone and for a pair.

Phases follow each other; prompts of one phase are sent `concurrency` at a time, in order. Those of the prefix phases
begin with whole blocks of prompts that were sent before; `forget` says whose prefix cache is emptied first, so that
the hit is at P only, at D only, or at both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import attrs
import trio

from benchmarks.vllm.client import Reply
from benchmarks.vllm.model import prompt

LONGEST: Final = 1900
Kind: TypeAlias = Literal["sequential", "concurrent", "hits at P", "hits at D", "hits at both"]
KINDS: Final[tuple[Kind, ...]] = ("sequential", "concurrent", "hits at P", "hits at D", "hits at both")
SHARES: Final = {"sequential": 0.35, "concurrent": 0.35, "hits at P": 0.1, "hits at D": 0.1, "hits at both": 0.1}
FORGET: Final[dict[str, str]] = {"hits at P": "d", "hits at D": "p"}

T = TypeVar("T", bound="Answer")


class Answer(Protocol):
    """What a request ended with: a Reply, or the Legs of one that went through a pair."""

    @property
    def ok(self) -> bool: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...


@attrs.frozen
class Phase:
    kind: Kind
    prompts: tuple[list[int], ...]
    concurrency: int
    forget: str | None = None
    """`p` or `d`: whose prefix cache is emptied before this phase."""


def phases(
    count: int, block_size: int, concurrency: int = 16, seed: int = 0, kinds: tuple[Kind, ...] = KINDS
) -> list[Phase]:
    """Return the phases of a run with `count` prompts in all. The edges of a block come first."""
    random = Random(f"arrivals/{seed}")
    edges = [
        n for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3, LONGEST) if 1 <= n <= LONGEST
    ]
    weight = sum(SHARES[kind] for kind in kinds)
    numbers = {kind: int(count * SHARES[kind] / weight) for kind in kinds}
    numbers[kinds[0]] += count - sum(numbers.values())
    sent: list[list[int]] = []
    found = []
    for kind in kinds:
        fresh: list[list[int]] = []
        for index in range(numbers[kind]):
            name = f"{seed}/{kind}/{index}"
            length = edges.pop(0) if edges and kind == kinds[0] else _length(random)
            old = random.choice(sent) if kind.startswith("hits") and sent else []
            shared = old[: max(len(old) // block_size, 1) * block_size]
            fresh.append((shared + prompt(length, name))[:LONGEST])
        sent.extend(fresh)
        at_once = 1 if kind == "sequential" else concurrency
        if fresh:
            found.append(Phase(kind, tuple(fresh), at_once, FORGET.get(kind)))
    return found


def _length(random: Random) -> int:
    """Short prompts are as frequent as long ones: half of all lengths are below 200 tokens."""
    return random.randint(1, 200) if random.random() < 0.5 else random.randint(201, LONGEST)


async def send_phase(phase: Phase, send: Callable[[list[int]], Awaitable[T]]) -> list[T]:
    """Send the prompts of a phase and return what each ended with, in their order."""
    answers: dict[int, T] = {}
    slots = trio.CapacityLimiter(phase.concurrency)

    async def one(index: int, tokens: list[int]) -> None:
        try:
            answers[index] = await send(tokens)
        finally:
            slots.release_on_behalf_of(index)

    async with trio.open_nursery() as nursery:
        for index, tokens in enumerate(phase.prompts):
            await slots.acquire_on_behalf_of(index)
            nursery.start_soon(one, index, tokens)
    return [answers[index] for index in range(len(phase.prompts))]


@attrs.frozen
class Difference:
    """An answer that is not the reference's. `gap` is how far the two likeliest tokens were apart, as log
    probabilities, where the answers part; 0 is a tie, which rounding decides."""

    kind: Kind
    index: int
    prompt_tokens: int
    position: int
    gap: float

    def __str__(self) -> str:
        return f"{self.kind} {self.index}: {self.prompt_tokens} tokens, differs at {self.position}, gap {self.gap:.2g}"


def compare(phase: Phase, reference: list[Reply], answers: list[T]) -> tuple[list[Difference], int]:
    """Return the answers that differ, and the number of those that failed."""
    found, failed = [], 0
    for index, (expected, answer) in enumerate(zip(reference, answers, strict=True)):
        if not answer.ok:
            failed += 1
        elif answer.tokens != expected.tokens:
            pairs = zip(expected.tokens, answer.tokens, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
            gap = expected.gaps[at] if at < len(expected.gaps) else float("nan")
            found.append(Difference(phase.kind, index, len(phase.prompts[index]), at, gap))
    return found, failed
