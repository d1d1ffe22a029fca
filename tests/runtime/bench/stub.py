"""A server that answers OpenAI's completions with timings that are known, for a client to be measured with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.command import measured
from pdflow_runtime.bench.plan import plan_of
from pdflow_runtime.bench.report import BenchRun
from pdflow_runtime.bench.target import server_of
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON, HttpRequest
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, ChatAnswer, CompletionAnswer, error_event, usage
from pdflow_runtime.http.openai.models import ModelCard, models_body
from pdflow_runtime.http.responder import Responder
from tests.runtime.http.world import serving

FIRST_S, GAP_S = 0.1, 0.01
FIRST_NS, GAP_NS = 100_000_000, 10_000_000


class Stub:
    """Each answer's first token comes FIRST_S after its request, every other one GAP_S after the one before.

    `odd` gets the number of each request, from 0, and says whether it has answered it, some other way.
    """

    def __init__(self, odd: Callable[[int, Responder], Awaitable[bool]] | None = None) -> None:
        self.odd = odd
        self.asked: list[dict[str, Any]] = []
        self.at: list[float] = []
        """When each came."""
        self.open = 0
        self.most_open = 0

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        if request.path == "/v1/models":
            await responder.reply(200, (JSON,), models_body([ModelCard(id="stub", created=0, max_model_len=1 << 20)]))
            return
        number = len(self.asked)
        self.asked.append(msgspec.json.decode(request.body))
        self.at.append(trio.current_time())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if self.odd is None or not await self.odd(number, responder):
                await self.answer(self.asked[number], responder)
        finally:
            self.open -= 1

    async def answer(self, asked: dict[str, Any], responder: Responder) -> None:
        chat = "messages" in asked
        answer = (ChatAnswer if chat else CompletionAnswer)("x", 0, "stub")
        tokens = asked["max_completion_tokens" if chat else "max_tokens"]
        await trio.sleep(FIRST_S)
        await responder.begin(200, (EVENT_STREAM,))
        for token in range(tokens):
            if token:
                await trio.sleep(GAP_S)
            last = token == tokens - 1
            ids = [1000 + token] if asked.get("return_token_ids") else None
            await responder.send(
                answer.event(AnswerPiece(0, f"<{token}>", "length" if last else None, None, None, ids))
            )
        prompt = 7 if chat else len(asked["prompt"])
        await responder.send(answer.usage_event(usage(prompt, tokens)) + DONE)
        await responder.end()


async def refuse(responder: Responder) -> None:
    error = OpenAIError(503, "nobody is up")
    await responder.reply(error.status, (JSON,), error.body())


async def break_off(responder: Responder) -> None:
    """One token, and the connection ends."""
    await responder.begin(200, (EVENT_STREAM,))
    await responder.send(CompletionAnswer("x", 0, "stub").event(AnswerPiece(0, "a")))


async def give_up(responder: Responder) -> None:
    """One token, and an error in place of the next."""
    await break_off(responder)
    await responder.send(error_event(OpenAIError(502, "the request failed: peer_dead")) + DONE)
    await responder.end()


@asynccontextmanager
async def stub(odd: Callable[[int, Responder], Awaitable[bool]] | None = None) -> AsyncIterator[tuple[Stub, int]]:
    """A stub, and its port."""
    server = Stub(odd)
    async with serving(server) as running:
        yield server, running.port


async def run(port: int, **options: Any) -> BenchRun:
    """What the command does, between its options and its figures."""
    asked = BenchOptions(port=port, quiet=True, **options)
    return await measured(asked, plan_of(asked), server_of(asked))
