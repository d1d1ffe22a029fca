"""Several answers in one: each event reaches the client whole, however slowly it reads."""

from __future__ import annotations

import errno
import socket
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON, HttpLimits, HttpRequest
from pdflow_runtime.http.openai.answers import DONE
from pdflow_runtime.http.openai.completion import read_completion
from pdflow_runtime.http.openai.fields import Fields
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.router.call import encoded_prompt
from pdflow_runtime.router.choices import Several
from tests.runtime.http.world import LOCAL, serving
from tests.runtime.router.test_router_node import Town, town

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


async def one_answer(fields: Fields, prompt: list[int], responder: Responder) -> None:
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
    slow = SlowClient()
    several = Several(one_answer, trio.CapacityLimiter(32), slow)  # type: ignore[arg-type]
    with trio.fail_after(10):
        await several.answer(asked.fields, [[5, 6]], asked.asked)
    texts = ["", "", "", ""]
    for event in slow.sent[:-1]:
        (choice,) = msgspec.json.decode(event.removeprefix(b"data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["01234"] * 4


@pytest.mark.trio
async def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    async def serve(fields: Fields, prompt: list[int], responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        choice = {"index": 0, "text": "x"}
        await responder.send(b"data: %b\n\n" % msgspec.json.encode({"id": "a", "choices": [choice]}))
        used = {"prompt_tokens": len(prompt), "completion_tokens": 7, "total_tokens": len(prompt) + 7}
        await responder.send(b"data: %b\n\n" % msgspec.json.encode({"id": "a", "choices": [], "usage": used}))
        await responder.send(DONE)
        await responder.end()

    prompts = [[1, 2], [3, 4, 5]]
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    asked = read_completion(msgspec.json.encode({"prompt": prompts, **options}))
    slow = SlowClient()
    several = Several(serve, trio.CapacityLimiter(32), slow)  # type: ignore[arg-type]
    with trio.fail_after(10):
        await several.answer(asked.fields, prompts, asked.asked)
    last = msgspec.json.decode(slow.sent[-2].removeprefix(b"data: "))
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 42, "total_tokens": 47}


async def never(fields: Fields, prompt: list[int], responder: Responder) -> None:
    pytest.fail("is served")


@pytest.mark.trio
async def test_too_many_answers_are_refused_before_any_work_is_done() -> None:
    """1,024 prompts and 128 answers to each may be asked for: nobody else would be served while these are begun."""
    asked = read_completion(msgspec.json.encode({"prompt": [[5]] * 200, "n": 2}))
    several = Several(never, trio.CapacityLimiter(1), SlowClient())  # type: ignore[arg-type]
    with pytest.raises(OpenAIError, match="400 choices in all, at most 256 are allowed"):
        await several.answer(asked.fields, [[5]] * 200, asked.asked)


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_fails_ends_the_others(stream: bool) -> None:
    cancelled: list[int] = []

    async def serve(fields: Fields, prompt: list[int], responder: Responder) -> None:
        if prompt == [2]:
            await trio.testing.wait_all_tasks_blocked()
            raise OpenAIError(502, "no engine", code="UNREACHABLE")
        try:
            await trio.sleep_forever()
        finally:
            assert responder.gone
            cancelled.extend(prompt)

    asked = read_completion(msgspec.json.encode({"prompt": [[1], [2], [3]], "stream": stream}))
    several = Several(serve, trio.CapacityLimiter(32), SlowClient())  # type: ignore[arg-type]
    with trio.fail_after(10), pytest.raises(OpenAIError, match="no engine") as failed:
        await several.answer(asked.fields, [[1], [2], [3]], asked.asked)
    assert (failed.value.status, failed.value.code) == (502, "UNREACHABLE")
    assert sorted(cancelled) == [1, 3]


@pytest.mark.trio
async def test_a_failure_does_not_get_into_an_event_that_a_slow_client_is_still_sent() -> None:
    stalled = trio.Event()

    async def serve(fields: Fields, prompt: list[int], to: Responder) -> None:
        if prompt == [2]:
            await stalled.wait()
            raise OpenAIError(502, "no engine", code="UNREACHABLE")
        await to.begin(200, (EVENT_STREAM,))
        while True:
            choice = {"index": 0, "text": "x" * 50_000}
            await to.send(b"data: %b\n\n" % msgspec.json.encode({"id": "a", "choices": [choice]}))

    def on_stall(stalls: bool) -> None:
        if stalls:
            stalled.set()

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    request = HttpRequest("POST", "/", "", (), b"", keep_alive=True, chunked_ok=True)
    asked = read_completion(b'{"prompt": [[1], [2]], "stream": true}')
    with theirs, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            responder = Responder(ours, request, trio.CancelScope(), 60.0, on_stall)

            async def answer() -> None:
                await Several(serve, trio.CapacityLimiter(32), responder).answer(asked.fields, [[1], [2]], asked.asked)
                ours.close()

            nursery.start_soon(answer)
            await stalled.wait()
            await trio.testing.wait_all_tasks_blocked()
            received = await trio.to_thread.run_sync(theirs.makefile("rb").read)
    rest, chunks = received.partition(b"\r\n\r\n")[2], list[bytes]()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        chunks.append(rest[:length])
        rest = rest[length + 2 :]
    assert b"no engine" in chunks[-2]
    assert chunks[-1] == b""


@pytest.mark.trio
@pytest.mark.parametrize(("prompt_bytes", "most"), [(10, 4), (1 << 20, 2), (9 << 20, 1)])
async def test_one_request_has_few_slots_and_with_a_long_prompt_fewer(prompt_bytes: int, most: int) -> None:
    running, peak = 0, 0

    async def serve(fields: Fields, prompt: list[int], responder: Responder) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await trio.sleep(0)
        await one_answer(fields, prompt, responder)
        running -= 1

    asked = read_completion(b'{"prompt": [1], "n": 20, "stream": true}')
    several = Several(serve, trio.CapacityLimiter(32), SlowClient(), prompt_bytes)  # type: ignore[arg-type]
    with trio.fail_after(10):
        await several.answer(asked.fields, [[1]], asked.asked)
    assert peak == most


@pytest.mark.trio
async def test_a_client_that_takes_nothing_is_given_up_if_another_waits(autojump_clock: trio.testing.MockClock) -> None:
    class Stalled(SlowClient):
        gone = trio.Event()

        @property
        def stalled_s(self) -> float:
            return trio.current_time() - begun

        def lose(self) -> None:
            self.gone.set()

        async def send(self, data: bytes) -> None:
            await self.gone.wait()

    slots, stalled, begun = trio.CapacityLimiter(1), Stalled(), trio.current_time()
    asked = read_completion(b'{"prompt": [1], "n": 2, "stream": true}')
    async with trio.open_nursery() as nursery:
        several = Several(one_answer, slots, stalled)  # type: ignore[arg-type]
        nursery.start_soon(several.answer, asked.fields, [[1]], asked.asked)
        await trio.sleep(100)
        assert not stalled.gone.is_set(), "nobody else waits"
        await slots.acquire_on_behalf_of("another")
        assert stalled.gone.is_set()
        slots.release_on_behalf_of("another")


@pytest.mark.trio
async def test_without_descriptors_several_answers_are_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pdflow_runtime.http.inner.socket.socketpair", scarce)
    asked = read_completion(b'{"prompt": [1], "n": 2}')
    several = Several(one_answer, trio.CapacityLimiter(32), SlowClient())  # type: ignore[arg-type]
    with pytest.raises(OpenAIError, match="too many open files") as failed:
        await several.answer(asked.fields, [[1]], asked.asked)
    assert failed.value.status == 503


@pytest.mark.trio
async def test_several_answers_need_no_further_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all connections are in use, and there is no reserve, they would wait for their own request. Their legs
    share one encoding of the prompt, which may be long."""
    encodings: list[list[int]] = []

    def counted(tokens: list[int]) -> msgspec.Raw:
        encodings.append(tokens)
        return encoded_prompt(tokens)

    for module in ("call", "front"):
        monkeypatch.setattr(f"pdflow_runtime.router.{module}.encoded_prompt", counted)
    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    event = b"data: %b\n\n" % msgspec.json.encode({"id": "a", "choices": [choice]})
    body = msgspec.json.encode({"prompt": [1], "max_tokens": 1, "n": 4, "stream": True, "seed": 7})
    async with town() as built, serving(built.front, HttpLimits(connections=1, reserve=0)) as narrow:
        built.front.choice_slots.total_tokens = 1
        for engine in ("decode-0", "decode-1"):
            built.answer_pieces[engine] = [event, DONE]
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(turns, built)
                async with built.client.request("POST", LOCAL, narrow.port, "/v1/completions", (JSON,), body) as answer:
                    whole = await answer.read()
                nursery.cancel_scope.cancel()
        sent = [asked for engine in ("decode-0", "decode-1") for asked in built.bodies[engine]]
    assert whole.endswith(DONE)
    assert sorted(number for number in range(4) if b'"index":%d' % number in whole) == [0, 1, 2, 3]
    assert sorted(asked["seed"] for asked in sent) == [7, 8, 9, 10]
    assert all("n" not in asked and asked["prompt_token_ids"] == [1] for asked in sent)
    assert encodings == [[1]]


async def turns(built: Town) -> None:
    while True:
        built.turn()
        await trio.sleep(0.001)
