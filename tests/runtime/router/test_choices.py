"""Several answers in one: each event reaches the client whole, however slowly it reads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, HttpRequest
from pdflow_runtime.http.openai.answers import DONE
from pdflow_runtime.http.openai.completion import read_completion
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.router.choices import Several
from tests.runtime.http.world import LOCAL, serving

EVENTS = 5


class SlowClient:
    """A responder whose client takes one thing at a time."""

    def __init__(self) -> None:
        self.begun = False
        self.sent: list[bytes] = []
        self._sending = False

    async def begin(self, status: int, headers: Any) -> None:
        self.begun = True

    async def send(self, data: bytes) -> None:
        assert not self._sending, "the rest of an event is still to be sent"
        self._sending = True
        for _ in range(3):
            await trio.sleep(0)
        self._sending = False
        self.sent.append(data)

    async def end(self) -> None:
        pass


async def one_answer(request: HttpRequest, responder: Responder) -> None:
    await responder.begin(200, (EVENT_STREAM,))
    for number in range(EVENTS):
        choice = {"index": 0, "text": str(number)}
        await responder.send(b"data: %b\n\n" % msgspec.json.encode({"id": "a", "choices": [choice]}))
        await trio.sleep(0)
    await responder.send(DONE)
    await responder.end()


@pytest.mark.trio
async def test_events_of_several_answers_are_not_sent_at_once() -> None:
    body = msgspec.json.encode({"prompt": [5, 6], "n": 4, "stream": True})
    asked = read_completion(body)
    client, slow = HttpClient(), SlowClient()
    async with serving(one_answer) as server:
        here = Coordinates(LOCAL, server.port)
        several = Several(client, here, "/v1/completions", (), slow)  # type: ignore[arg-type]
        with trio.fail_after(10):
            await several.answer(asked.fields, [[5, 6]], asked.asked)
    client.close()
    texts = ["", "", "", ""]
    for event in slow.sent[:-1]:
        (choice,) = msgspec.json.decode(event.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["01234"] * 4


@pytest.mark.trio
async def test_too_many_answers_are_refused_before_any_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 prompts and 128 answers to each may be asked for: nobody else would be served while these are written."""
    asked = read_completion(msgspec.json.encode({"prompt": [[5]] * 200, "n": 2}))
    monkeypatch.setattr(Several, "_body", lambda *_: pytest.fail("a request is being written"))
    several = Several(HttpClient(), Coordinates(LOCAL, 1), "/v1/completions", (), SlowClient())  # type: ignore[arg-type]
    with pytest.raises(OpenAIError, match="400 choices in all, at most 256 are allowed"):
        await several.answer(asked.fields, [[5]] * 200, asked.asked)
