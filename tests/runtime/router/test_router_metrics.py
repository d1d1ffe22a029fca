"""What the router exports of its answers, errors and engines, on the page that Prometheus reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from pdflow.protocol.messages import Code
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, CompletionAnswer
from pdflow_runtime.observe.access_log import AccessLine, AccessLog
from pdflow_runtime.observe.router_metrics import FINISHED_REASONS
from pdflow_runtime.process.addresses import EngineGone
from pdflow_runtime.process.line_writer import LineWriter
from tests.runtime.http.world import LOCAL, response_to
from tests.runtime.router.test_router_node import Town, settled, town

ASK = {"prompt": "abc", "max_tokens": 3, "stream": True}


def value(built: Town, name: str, **labels: str) -> float | None:
    if name.startswith("vllm:"):
        labels["model_name"] = "tiny"
    found: float | None = built.node.meter.registry.get_sample_value(name, labels)
    return found


async def ask(built: Town, **fields: Any) -> int:
    """Send a request, and let the router's node take its turns until it is answered."""
    status = 0

    async def send() -> None:
        nonlocal status
        body = msgspec.json.encode({**ASK, **fields})
        async with built.client.request("POST", LOCAL, built.port, "/v1/completions", (JSON,), body) as response:
            await response.read()
        status = response.status

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for _ in range(6):
            await settled()
            built.turn()
    return status


def answer_of(tokens: int) -> list[bytes]:
    form = CompletionAnswer("1", 0, "tiny")
    pieces = [form.event(AnswerPiece(0, " a", token_ids=[7])) for _ in range(tokens - 1)]
    return [*pieces, form.event(AnswerPiece(0, " a", "length", token_ids=[7])), DONE]


@pytest.mark.trio
async def test_a_fresh_router_exports_every_error_as_zero() -> None:
    async with town() as built:
        for code in Code:
            if code is not Code.NONE:
                assert value(built, "pdflow_router_errors_total", code=code.name.lower()) == 0
        for status in (400, 404, 408, 429, 503):
            assert value(built, "pdflow_router_errors_total", code=f"http_{status}") == 0
        for reason in FINISHED_REASONS:
            assert value(built, "vllm:request_success_total", finished_reason=reason) == 0
        assert value(built, "vllm:generation_tokens_total") == 0
        assert value(built, "vllm:inter_token_latency_seconds_count") == 0
        assert (value(built, "process_resident_memory_bytes") or 0) > 1e6
        assert (value(built, "process_open_fds") or 0) > 1
        assert (value(built, "process_max_fds") or 0) > 1
        assert value(built, "process_cpu_seconds_total") is not None


@pytest.mark.trio
async def test_tokens_and_latencies_of_an_answer() -> None:
    async with town() as built:
        built.answer_pieces["decode-0"] = answer_of(5)
        assert await ask(built) == 200
        assert value(built, "vllm:prompt_tokens_total") == 3
        assert value(built, "vllm:generation_tokens_total") == 5
        assert value(built, "vllm:time_to_first_token_seconds_count") == 1
        assert value(built, "vllm:inter_token_latency_seconds_count") == 4
        assert value(built, "vllm:inter_token_latency_seconds_bucket", le="80.0") == 4
        assert value(built, "vllm:request_success_total", finished_reason="length") == 1
        assert value(built, "vllm:e2e_request_latency_seconds_count") == 1


@pytest.mark.trio
async def test_tokens_are_counted_while_an_answer_passes() -> None:
    async with town("decode-0") as built, trio.open_nursery() as nursery:
        built.answer_pieces["decode-0"] = [*answer_of(9)[:-2], *[b""] * 100]
        nursery.start_soon(ask, built)
        await settled()
        built.turn()
        with trio.fail_after(10):
            while not value(built, "vllm:generation_tokens_total"):
                await trio.sleep(0.01)
        assert value(built, "vllm:request_success_total", finished_reason="length") == 0
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_errors_by_code() -> None:
    async with town() as built:
        assert await ask(built, max_tokens=-1) == 400
        await response_to(built.port, b"nonsense\r\n\r\n")
        assert await ask(built, model="other") == 404
        await settled()
        assert value(built, "pdflow_router_errors_total", code="http_400") == 2
        assert value(built, "pdflow_router_errors_total", code="http_404") == 1
        for name in ("decode-0", "decode-1"):
            built.node.members.apply_report(EngineGone(name))
        built.turn()
        assert await ask(built) == 503
        assert value(built, "pdflow_router_errors_total", code="unreachable") == 1
        assert value(built, "pdflow_router_errors_total", code="http_503") == 0, "it is counted by its code"
        assert value(built, "vllm:request_success_total", finished_reason="error") == 1


@pytest.mark.trio
async def test_engines_as_the_router_knows_them() -> None:
    async with town() as built:

        def states(engine: str, role: str) -> list[float | None]:
            names = ("up", "drained", "silent")
            return [value(built, f"pdflow_router_engine_{name}", engine=engine, role=role) for name in names]

        assert states("prefill-0", "prefill") == [1, 0, 0]
        built.node.members.set_enabled("decode-1", False)
        built.turn()
        assert states("decode-1", "decode") == [1, 1, 0]
        built.node.members.apply_report(EngineGone("prefill-0"))
        assert states("prefill-0", "prefill") == [0, 0, 0]


@pytest.mark.trio
async def test_an_engine_that_is_silent() -> None:
    async with town(silence_ns=50_000_000) as built:
        await trio.sleep(0.1)
        built.turn()
        labels = {"engine": "decode-0", "role": "decode"}
        assert value(built, "pdflow_router_engine_silent", **labels) == 1
        assert value(built, "pdflow_router_engine_up", **labels) == 0


@pytest.mark.trio
async def test_the_access_log_has_each_request_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    writer = LineWriter(descriptor, lambda _: None)
    async with town() as built:
        with writer:
            built.front.access_log = AccessLog("json", "tiny", writer)
            built.answer_pieces["decode-0"] = answer_of(5)
            await ask(built)
            await ask(built, max_tokens=-1)
            await response_to(built.port, b"nonsense\r\n\r\n")
    os.close(descriptor)
    answered, invalid, malformed = (
        msgspec.json.decode(line, type=AccessLine) for line in path.read_bytes().splitlines()
    )
    assert (answered.client, answered.path, answered.status, answered.outcome) == (
        "127.0.0.1",
        "/v1/completions",
        200,
        "completed",
    )
    assert (answered.prefill, answered.decode, answered.attempts) == ("prefill-0", "decode-0", 1)
    assert (answered.prompt_tokens, answered.output_tokens, answered.finish_reason) == (3, 5, "length")
    assert 0 < answered.ttft_ms < answered.total_ms
    assert (invalid.status, invalid.outcome, invalid.code) == (400, "refused", "http_400")
    assert (malformed.method, malformed.path, malformed.status) == ("-", "-", 400)
