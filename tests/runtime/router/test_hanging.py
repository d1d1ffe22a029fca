"""The live router and requests that hang at an engine which serves others."""

from __future__ import annotations

import msgspec
import pytest
import trio

from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.values import S
from pdflow.routing.stalls import StallRule
from pdflow_runtime.http.openai.answers import DONE
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json
from tests.runtime.http.world import LOCAL
from tests.runtime.router.test_router_node import Town, event, exchange_one_request, town

RULE = StallRule(S // 20, least=1000, passed=2)


def prefill_answer() -> tuple[int, bytes]:
    params = KvParams(EngineInfo("prefill-0", Shards(1, 1, 16)), "x", "r", 3)
    kv_params = decode_json(params, Coordinates(LOCAL, 1), "nixl-push")
    return 200, msgspec.json.encode({"kv_transfer_params": kv_params})


WHOLE = [event("a"), event("b", "length"), DONE]


def events(answer: bytes) -> list[bytes]:
    return [line for line in answer.split(b"\n") if line.startswith(b"data: ")]


class HangingRequest:
    """A client whose request hangs at decode-0, and others that follow until it has its answer."""

    def __init__(self, built: Town) -> None:
        self.built = built
        self.answer = b""
        for name in ("prefill-0", "prefill-1"):
            built.replies[name] = [prefill_answer() for _ in range(1000)]

    async def run(self) -> None:
        built = self.built
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(built.node.checks.run)
                nursery.start_soon(self.turns)
                async with trio.open_nursery() as client:
                    client.start_soon(self._ask)
                    while "decode-0" not in built.asked:
                        await trio.sleep(0.001)
                    # The engine has sent what it sends to this request behind the first of these, and hangs.
                    await trio.sleep(0.05)
                    await trio.sleep(0.05)
                    built.answer_pieces.update(dict.fromkeys(("decode-0", "decode-1"), WHOLE))
                    built.ends_answers = True
                    client.start_soon(self._others)
                nursery.cancel_scope.cancel()

    async def _ask(self) -> None:
        self.answer = await exchange_one_request(self.built)

    async def _others(self) -> None:
        while not self.answer:
            assert DONE in await exchange_one_request(self.built)

    async def turns(self) -> None:
        while True:
            self.built.turn()
            await trio.sleep(0.001)


def hung(built: Town) -> float | None:
    return built.node.meter.registry.get_sample_value("pdflow_router_requests_hanging_total")


@pytest.mark.trio
async def test_a_request_without_a_first_token_is_answered_by_another_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with town(stall=RULE, dispatch="sequential") as built:
        hanging = HangingRequest(built)
        await hanging.run()
        assert built.left == ["decode-0"]
        assert hung(built) == 1
    assert events(hanging.answer) == [piece.strip() for piece in WHOLE]
    assert ".1 hangs at decode-0, which serves others" in caplog.text


@pytest.mark.trio
async def test_a_stream_that_gets_nothing_more_continues_at_another_engine() -> None:
    async with town(stall=RULE, dispatch="sequential", resumes=True) as built:
        built.answer_pieces["decode-0"], built.ends_answers = WHOLE[:1], False
        hanging = HangingRequest(built)
        await hanging.run()
        assert built.left == ["decode-0"]
        assert hung(built) == 1
        given = [body["pdflow"]["given"] for body in built.bodies["decode-1"]]
        assert [each["tokens"] for each in given if each] == [1]
    assert events(hanging.answer) == [WHOLE[0].strip(), *(piece.strip() for piece in WHOLE)], "as decode-1 sends it"


@pytest.mark.parametrize("steps", [None, b"5"])
@pytest.mark.trio
async def test_a_whole_answer_leaves_an_engine_that_responds_and_runs_no_step(steps: bytes | None) -> None:
    """It waits at one that does not say how many steps it runs."""
    ask = msgspec.json.encode({"prompt": "x", "max_tokens": 4})
    rule = StallRule(S // 100, least=4)
    async with town(stall=rule, dispatch="sequential") as built, trio.open_nursery() as nursery:
        built.steps = steps
        request = HangingRequest(built)
        nursery.start_soon(built.node.checks.run)
        nursery.start_soon(request.turns)
        nursery.start_soon(exchange_one_request, built, ask)
        with trio.move_on_after(5 if steps is not None else 1) as waiting:
            while "decode-1" not in built.asked:
                await trio.sleep(0.01)
        assert waiting.cancelled_caught == (steps is None)
        assert built.node.members.stalled == ([] if steps is None else ["decode-0"])
        nursery.cancel_scope.cancel()
