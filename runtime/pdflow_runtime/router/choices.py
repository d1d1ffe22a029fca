"""Requests for several answers: a request of its own is sent for each answer, and the answers are merged.

A request for n answers to m prompts is m x n requests for one, sent to this router: each is routed, tried again and
taken back like any other, and P computes a prompt once where it remembers prefixes. Drawn answers of one prompt differ:
the seed of the i-th is the request's and i.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any, Final

import msgspec
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON, Headers
from pdflow_runtime.http.openai.answers import DONE, error_event
from pdflow_runtime.http.openai.fields import Fields, rewritten
from pdflow_runtime.http.openai.parameters import TRUNCATION
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.processes import leaves

REPLACED: Final = ("prompt", "messages", "prompt_token_ids", "n", "seed", "kv_transfer_params", "pdflow", *TRUNCATION)
MOST: Final = 256
"""Answers to one request."""

_event: Final = msgspec.json.Decoder(dict[str, Any])
_encode: Final = msgspec.json.Encoder().encode


class Several:
    """Answers one request for several answers. Args: `here` is the router's own address; `headers` go along with each
    request."""

    def __init__(self, client: HttpClient, here: Coordinates, path: str, headers: Headers, responder: Responder):
        self.client: Final = client
        self.here: Final = here
        self.path: Final = path
        self.headers: Final = headers
        self.responder: Final = responder
        self.first: dict[str, Any] | None = None
        """The first event or answer: all others get its id and its time."""
        self.usage: dict[str, int] = {}
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
        bodies = [self._body(fields, prompt, asked, number) for prompt in prompts for number in range(asked.n)]
        try:
            if asked.stream:
                await self._stream(bodies, asked)
            else:
                await self._whole(bodies)
        except* (OpenAIError, UpstreamError) as errors:
            error = next(leaves(errors))
            failure = error if isinstance(error, OpenAIError) else OpenAIError(502, str(error))
        else:
            return
        if not self.responder.begun:
            raise failure
        await self.responder.send(error_event(failure) + DONE)
        await self.responder.end()

    def _body(self, fields: Fields, prompt: list[int], asked: AnswerOptions, number: int) -> bytes:
        new_fields: dict[str, Any] = {"prompt_token_ids": prompt}
        if asked.seed is not None:
            new_fields["seed"] = (asked.seed + number) % 2**63
        return rewritten(fields, drop=REPLACED, put=new_fields)

    async def _whole(self, bodies: Seq[bytes]) -> None:
        answers: dict[int, dict[str, Any]] = {}

        async def ask(index: int, body: bytes) -> None:
            async with self._request(body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise refused(response.status, answer)
            answers[index] = _event.decode(answer)

        async with trio.open_nursery() as nursery:
            for index, body in enumerate(bodies):
                nursery.start_soon(ask, index, body)
        merged = answers[0]
        choices = []
        for index in range(len(bodies)):
            (choice,) = answers[index]["choices"]
            choices.append({**choice, "index": index})
            self._count(answers[index].get("usage"))
        await self.responder.reply(200, (JSON,), _encode({**merged, "choices": choices, "usage": self.usage}))

    async def _stream(self, bodies: Seq[bytes], asked: AnswerOptions) -> None:
        async def ask(index: int, body: bytes) -> None:
            async with self._request(body) as response:
                if response.status != 200:
                    raise refused(response.status, await response.read())
                rest = b""
                async with aclosing(response.pieces()) as pieces:
                    async for data in pieces:
                        *events, rest = (rest + data).split(b"\n\n")
                        for event in events:
                            await self._pass_on(index, event)

        async with trio.open_nursery() as nursery:
            for index, body in enumerate(bodies):
                nursery.start_soon(ask, index, body)
        if asked.include_usage and self.first is not None:
            await self.responder.send(b"data: %b\n\n" % _encode({**self.first, "choices": [], "usage": self.usage}))
        await self.responder.send(DONE)
        await self.responder.end()

    async def _pass_on(self, index: int, event: bytes) -> None:
        """Pass an event of one answer on as an event of the merged stream."""
        if event == DONE.strip():
            return
        chunk = _event.decode(event.removeprefix(b"data: "))
        if "error" in chunk:
            raise OpenAIError(502, chunk["error"]["message"], code=chunk["error"].get("code"))
        self._count(chunk.pop("usage", None))
        if self.first is None:
            self.first = {key: value for key, value in chunk.items() if key != "choices"}
        if not chunk["choices"]:
            return
        chunk["choices"] = [{**choice, "index": index} for choice in chunk["choices"]]
        async with self._send_lock:
            if not self.responder.begun:
                await self.responder.begin(200, (EVENT_STREAM,))
            await self.responder.send(b"data: %b\n\n" % _encode({**chunk, **self.first}))

    def _request(self, body: bytes) -> Any:
        here = self.here
        return self.client.request("POST", here.host, here.port, self.path, (JSON, *self.headers), body)

    def _count(self, usage: dict[str, Any] | None) -> None:
        for key, tokens in (usage or {}).items():
            if isinstance(tokens, int):
                self.usage[key] = self.usage.get(key, 0) + tokens


def refused(status: int, answer: bytes) -> OpenAIError:
    """Return the error that the client gets."""
    return OpenAIError.from_response(status, answer) or OpenAIError(status, "no answer")
