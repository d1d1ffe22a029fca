"""Requests for several answers: each answer is a request of its own, and the answers are merged.

A request for n answers to m prompts is m x n requests for one: each is routed, tried again and taken back like any
other, and P computes a prompt once where it remembers prefixes. Drawn answers of one prompt differ: the seed of the
i-th is the request's and i. These requests need no connections to the router. They wait for slots that only they use,
so they never wait for a request that waits for them. No request has more than a share of the slots, nor so many answers
at once that the copies of a long prompt fill the memory. A client that takes nothing of its answer keeps no slots from
others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeAlias

import msgspec
import trio

from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.inner import answered_inside
from pdflow_runtime.http.messages import EVENT_STREAM, JSON
from pdflow_runtime.http.openai.answers import DONE, Usage, error_event, usage
from pdflow_runtime.http.openai.fields import Fields
from pdflow_runtime.http.openai.parameters import TRUNCATION
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.response import Response
from pdflow_runtime.process.processes import leaves

REPLACED: Final = ("prompt", "messages", "prompt_token_ids", "n", "seed", "kv_transfer_params", "pdflow", *TRUNCATION)
MOST: Final = 256
"""Answers to one request."""

SHARE: Final = 8
"""The slots over this are the most that one request has."""
PROMPT_BYTES: Final = 2 << 20
"""Of the prompts, as JSON, of one request's answers at once; a longer one is sent for one answer at a time."""
STALLED_S: Final = 5.0
"""How long a client may take nothing while others wait for slots: as for connections (`HttpLimits.stalled_s`)."""

Serve: TypeAlias = Callable[[Fields, list[int], Responder], Awaitable[None]]
"""Serves a request for one answer to a prompt."""

_event: Final = msgspec.json.Decoder(dict[str, Any])
_encode: Final = msgspec.json.Encoder().encode


class Several:
    """Answers one request for several answers. Args: `serve` serves a request for one of them, at most `slots` of all
    requests at once; `prompt_bytes`, of the longest prompt as JSON."""

    def __init__(self, serve: Serve, slots: trio.CapacityLimiter, responder: Responder, prompt_bytes: int = 1) -> None:
        self.serve: Final = serve
        self.slots: Final = slots
        self.own_slots: Final = trio.CapacityLimiter(
            max(1, min(int(slots.total_tokens) // SHARE, PROMPT_BYTES // prompt_bytes))
        )
        self.responder: Final = responder
        self.first: dict[str, Any] | None = None
        """The first event or answer: all others get its id and its time."""
        self.prompt_tokens = self.completion_tokens = 0
        """Of the usage: each prompt counts once, however many answers it has."""
        self._send_lock: Final = trio.Lock()
        """Keeps the events of several answers apart where a client is slow."""

    async def answer(self, fields: Fields, prompts: Seq[list[int]], asked: AnswerOptions) -> None:
        """Answer the client. If a request fails before anything was sent, raises OpenAIError."""
        count = len(prompts) * asked.n
        if count > MOST:
            raise OpenAIError(400, f"n: {count} choices in all, at most {MOST} are allowed", param="n")
        if asked.continuous_usage:
            problem = "stream_options.continuous_usage_stats: is for one choice to one prompt"
            raise OpenAIError(400, problem, param="stream_options")
        kept = {name: value for name, value in fields.items() if name not in REPLACED}
        singles = [(_seeded(kept, asked, number), prompt) for prompt in prompts for number in range(asked.n)]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._give_up_stalled)
                if asked.stream:
                    await self._stream(singles, asked)
                else:
                    await self._whole(singles, asked)
                nursery.cancel_scope.cancel()
        except* (OpenAIError, UpstreamError) as errors:
            error = next(leaves(errors))
            failure = error if isinstance(error, OpenAIError) else OpenAIError(502, str(error))
        else:
            return
        if not self.responder.begun:
            raise failure
        await self.responder.send(error_event(failure) + DONE)
        await self.responder.end()

    async def _give_up_stalled(self) -> None:
        """Give the client up if it stalls while others wait for slots."""
        while True:
            await trio.sleep(STALLED_S / 5)
            if self.slots.statistics().tasks_waiting and self.responder.stalled_s >= STALLED_S:
                self.responder.lose()

    async def _whole(self, singles: Seq[tuple[Fields, list[int]]], asked: AnswerOptions) -> None:
        answers: dict[int, dict[str, Any]] = {}

        async def ask(index: int, fields: Fields, prompt: list[int]) -> None:
            async with self._answered(fields, prompt) as response:
                answer = await response.read()
                if response.status != 200:
                    raise refused(response.status, answer)
            answers[index] = _event.decode(answer)

        async with trio.open_nursery() as nursery:
            for index, single in enumerate(singles):
                nursery.start_soon(ask, index, *single)
        merged = answers[0]
        choices = []
        for index in range(len(singles)):
            (choice,) = answers[index]["choices"]
            choices.append({**choice, "index": index})
            self._count(index, asked, answers[index].get("usage"))
        await self.responder.reply(200, (JSON,), _encode({**merged, "choices": choices, "usage": self._usage()}))

    async def _stream(self, singles: Seq[tuple[Fields, list[int]]], asked: AnswerOptions) -> None:
        async def ask(index: int, fields: Fields, prompt: list[int]) -> None:
            async with self._answered(fields, prompt) as response:
                if response.status != 200:
                    raise refused(response.status, await response.read())
                rest = b""
                async with aclosing(response.pieces()) as pieces:
                    async for data in pieces:
                        *events, rest = (rest + data).split(b"\n\n")
                        for event in events:
                            await self._pass_on(index, asked, event)

        async with trio.open_nursery() as nursery:
            for index, single in enumerate(singles):
                nursery.start_soon(ask, index, *single)
        if asked.include_usage and self.first is not None:
            await self.responder.send(b"data: %b\n\n" % _encode({**self.first, "choices": [], "usage": self._usage()}))
        await self.responder.send(DONE)
        await self.responder.end()

    async def _pass_on(self, index: int, asked: AnswerOptions, event: bytes) -> None:
        """Pass an event of one answer on as an event of the merged stream."""
        if event == DONE.strip():
            return
        chunk = _event.decode(event.removeprefix(b"data: "))
        if "error" in chunk:
            raise OpenAIError(502, chunk["error"]["message"], code=chunk["error"].get("code"))
        self._count(index, asked, chunk.pop("usage", None))
        if self.first is None:
            self.first = {key: value for key, value in chunk.items() if key != "choices"}
        if not chunk["choices"]:
            return
        chunk["choices"] = [{**choice, "index": index} for choice in chunk["choices"]]
        async with self._send_lock:
            if not self.responder.begun:
                await self.responder.begin(200, (EVENT_STREAM,))
            await self.responder.send(b"data: %b\n\n" % _encode({**chunk, **self.first}))

    @asynccontextmanager
    async def _answered(self, fields: Fields, prompt: list[int]) -> AsyncIterator[Response]:
        """Yield the response to one of the requests."""

        async def answer(responder: Responder) -> None:
            await self.serve(fields, prompt, responder)

        async with self.own_slots, self.slots, answered_inside(answer) as response:
            yield response

    def _count(self, index: int, asked: AnswerOptions, used: dict[str, Any] | None) -> None:
        """Count the usage of one answer."""
        if used:
            self.completion_tokens += used["completion_tokens"]
            if index % asked.n == 0:
                self.prompt_tokens += used["prompt_tokens"]

    def _usage(self) -> Usage:
        return usage(self.prompt_tokens, self.completion_tokens)


def _seeded(fields: Fields, asked: AnswerOptions, number: int) -> Fields:
    """Return the fields of the request for that answer. Their values are shared by all of them."""
    if asked.seed is None:
        return fields
    return {**fields, "seed": msgspec.Raw(b"%d" % ((asked.seed + number) % 2**63))}


def refused(status: int, answer: bytes) -> OpenAIError:
    """Return the error that the client gets."""
    return OpenAIError.from_response(status, answer) or OpenAIError(status, "no answer")
