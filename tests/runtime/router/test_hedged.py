"""The live router that hedges, and the one whose clients have their first token from P, before engines that answer by
heart: a client hears one answer, whichever legs have a part in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.governed import Rules
from pdflow_runtime.http.openai.answers import DONE
from pdflow_runtime.http.openai.between import FirstAnswer, FirstToken
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json
from tests.runtime.http.world import LOCAL
from tests.runtime.router.test_router_node import Town, counted, exchange_one_request, settled, town

SOON = 1
FIRST = FirstToken(17, "cmpl-a", 5)


def event(text: str) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode({"text": text})


def first_token_answer(text: bytes, ends: bool = False) -> tuple[int, bytes]:
    """P's answer, with its token."""
    params = KvParams(EngineInfo("prefill-0", Shards(1, 1, 16)), "x", "r", 3)
    kv_params = decode_json(params, Coordinates(LOCAL, 1), "nixl-push")
    first = FirstAnswer(FIRST, text.decode(), ends)
    return 200, msgspec.json.encode({"kv_transfer_params": kv_params, "pdflow": first})


async def received(built: Town, turns: int = 6) -> bytes:
    """What one client hears, where it comes to an end."""
    received: list[bytes] = []

    async def ask() -> None:
        received.append(await exchange_one_request(built))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for _ in range(turns):
            await settled()
            built.turn()
        nursery.cancel_scope.cancel()
    await settled()
    built.turn()
    assert not built.node.calls
    return b"".join(received)


def texts(answer: bytes) -> list[Any]:
    """Of a stream that is whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in head, answer
    assert head.count(b"content-type") == 1
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    assert chunks.pop() == b"", "the last chunk is the end"
    events = b"".join(chunks).split(b"\n\n")
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
    return [msgspec.json.decode(piece.removeprefix(b"data: ")) for piece in events]


@pytest.mark.trio
async def test_a_late_request_has_a_second_attempt_and_the_first_to_speak_is_the_answer() -> None:
    """Both legs of the other are hung up on, long before the answer has ended."""
    async with town(hedge_after_ns=SOON) as built:
        built.answer_pieces["decode-1"] = [event("a"), event("b") + DONE]
        assert texts(await received(built)) == [{"text": "a"}, {"text": "b"}]
        assert sorted(built.asked) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert sorted(built.left) == ["decode-0", "prefill-0", "prefill-1"]
        assert counted(built, "completed", "none") == 1


@pytest.mark.trio
async def test_who_speaks_is_not_late() -> None:
    async with town("decode-0", hedge_after_ns=10**18) as built, trio.open_nursery() as nursery:
        nursery.start_soon(built.ask)
        await settled()
        built.turn()
        await settled()
        assert list(built.node.router.deadlines.due)  # type: ignore[attr-defined]
        built.turn()
        assert not built.node.router.deadlines.due  # type: ignore[attr-defined]
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_of_two_simultaneous_answers_one_is_streamed() -> None:
    async with town(hedge_after_ns=SOON) as built:
        both = [event("a"), event("b") + DONE]
        built.answer_pieces.update({"decode-0": both, "decode-1": both})
        assert texts(await received(built)) == [{"text": "a"}, {"text": "b"}]
        assert counted(built, "completed", "none") == 1


@pytest.mark.trio
async def test_if_one_of_two_fails_the_other_is_waited_for() -> None:
    async with town(hedge_after_ns=SOON) as built:
        built.replies["decode-0"] = [(503, b"{}")]
        built.answer_pieces["decode-1"] = [event("a") + DONE]
        assert texts(await received(built)) == [{"text": "a"}]


@pytest.mark.trio
async def test_who_hangs_up_leaves_neither_of_two() -> None:
    async with town(hedge_after_ns=SOON) as built:
        assert await received(built, turns=3) == b""
        assert sorted(built.left) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]


@pytest.mark.trio
async def test_ps_token_is_given_at_once_and_d_goes_on_behind_it() -> None:
    async with town(dispatch="sequential", returns_first_token=True) as built:
        built.replies["prefill-0"] = [first_token_answer(event("P"))]
        async with await trio.open_tcp_stream(LOCAL, built.port) as stream, trio.open_nursery() as nursery:
            received_so_far = bytearray()

            async def receive() -> None:
                async for piece in stream:
                    received_so_far.extend(piece)

            body = msgspec.json.encode({"prompt": "x", "max_tokens": 4, "stream": True})
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            nursery.start_soon(receive)
            await settled()
            built.turn()
            await settled()
            assert event("P") in received_so_far, "D has not been asked yet"
            assert built.asked == ["prefill-0"]
            nursery.cancel_scope.cancel()
        (asked,) = built.bodies["prefill-0"]
        assert asked["pdflow"]["tells_first"]
        assert (asked["max_tokens"], asked["stream"]) == (4, True), "P makes of its token what D would have"


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_an_attempt_that_fails_behind_ps_token_is_made_anew_and_begins_with_it(dispatch: str) -> None:
    """Whatever the other P would have said."""
    async with town(dispatch=dispatch, returns_first_token=True) as built:
        built.replies["prefill-0"] = [first_token_answer(event("P"))]
        built.replies["prefill-1"] = [first_token_answer(event("Q"))]
        if dispatch == "sequential":
            built.replies["decode-0"] = [(503, b"{}")]
        built.answer_pieces["decode-1"] = [event("D") + DONE]
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await exchange_one_request(built))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for number in range(8):
                await settled()
                built.turn()
                if number == 3 and dispatch == "concurrent":
                    forwarded = [body for body in built.bodies["decode-0"] if body.get("token") == FIRST.token]
                    assert forwarded, "D waits for P's token, and is told"
                    # And then its process ends.
                    for connection in tuple(built.servers["decode-0"].connections):
                        connection._sock.shutdown(2)
            nursery.cancel_scope.cancel()
        assert texts(answers[0]) == [{"text": "P"}, {"text": "D"}]
        (again,) = built.bodies["prefill-1"]
        assert "pdflow" not in again, "nobody wants its token"
        (behind,) = [body for body in built.bodies["decode-1"] if "prompt_token_ids" in body]
        assert behind["pdflow"]["first"]["token"] == FIRST.token
        assert counted(built, "completed", "none") == 1


@pytest.mark.trio
async def test_an_answer_that_nobody_goes_on_with_is_ended_with_an_error() -> None:
    async with town(dispatch="sequential", returns_first_token=True) as built:
        built.replies["prefill-0"] = [first_token_answer(event("P"))]
        built.replies["decode-0"] = [(503, b"{}")]
        built.replies["prefill-1"] = [(503, b"{}")]
        *received_before, error = texts(await received(built, turns=8))
        assert received_before == [{"text": "P"}]
        assert error["error"]["message"] == "the answer was interrupted"
        assert counted(built, "failed", "io") == 1


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_an_answer_that_ends_with_ps_token_needs_no_d(dispatch: str) -> None:
    async with town(dispatch=dispatch, returns_first_token=True) as built:
        built.replies["prefill-0"] = [first_token_answer(event("P") + DONE, ends=True)]
        assert texts(await received(built)) == [{"text": "P"}]
        assert built.left == (["decode-0"] if dispatch == "concurrent" else [])
        assert counted(built, "completed", "none") == 1


@pytest.mark.trio
async def test_a_hedge_goes_on_behind_the_token_that_the_client_has() -> None:
    """One P has told its token; the other attempt's is not even asked for one."""
    async with town(dispatch="sequential", returns_first_token=True, hedge_after_ns=SOON) as built:
        built.replies["prefill-0"] = [first_token_answer(event("P"))]
        built.replies["prefill-1"] = [first_token_answer(event("Q"))]
        built.answer_pieces["decode-1"] = [event("D") + DONE]
        assert texts(await received(built, turns=8)) in ([{"text": "P"}, {"text": "D"}], [{"text": "Q"}, {"text": "D"}])
        assert built.left == ["decode-0"]
        for name in ("decode-0", "decode-1"):
            assert built.bodies[name][0]["pdflow"]["first"]["token"] == FIRST.token


@pytest.mark.trio
async def test_an_engine_that_computes_the_prompt_itself_does_not_start_the_answer_again() -> None:
    """It is asked first, and has no token when the hedge's P tells its own."""
    async with town(dispatch="sequential", returns_first_token=True, hedge_after_ns=SOON) as built:
        built.node.router.rules = Rules(disaggregation=Disaggregation(((100,), (0,))))
        built.replies["prefill-0"] = [first_token_answer(event("P"))]
        built.answer_pieces["decode-1"] = [event("D") + DONE]
        assert texts(await received(built, turns=8)) == [{"text": "P"}, {"text": "D"}]
        assert built.asked == ["decode-0", "prefill-0", "decode-1"]
        assert built.left == ["decode-0"]
        assert counted(built, "completed", "none") == 1
