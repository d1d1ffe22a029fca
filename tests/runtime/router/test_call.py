"""One leg of a request, at an engine that answers this or that."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdflow.protocol.messages import Code
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.openai.fields import read_fields
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.call import Call, Leg
from pdflow_runtime.router.call_record import CallRecord
from pdflow_runtime.security.signed import Signer
from tests.runtime.http.world import LOCAL, serving


@pytest.mark.parametrize(
    ("status", "code", "has_refusal"),
    [(400, Code.REJECTED, True), (409, Code.UNREACHABLE, False), (503, Code.IO, False)],
)
@pytest.mark.trio
async def test_whose_fault_a_refusal_is(status: int, code: Code, has_refusal: bool) -> None:
    """409: the attempt is there already, since a connection broke while it was asked and the request was sent again.
    That is nothing to tell a client; another attempt has another id."""
    error = OpenAIError(status, "request r is already being prefilled")

    async def answer(request: HttpRequest, responder: Responder) -> None:
        await responder.reply(status, (JSON,), error.body())

    call: Any = SimpleNamespace(headers=(), refusal=None, record=CallRecord())
    client = HttpClient()
    async with serving(answer) as server:
        here = Coordinates(LOCAL, server.port)
        leg = Leg(call, client, EngineAddress("prefill-0", here, here), "r.1", 10.0, Signer(None))
        assert await leg.prefill(b"{}", "nixl-push") == (None, None, code)
    client.close()
    assert (call.refusal is not None) == has_refusal


@pytest.mark.trio
async def test_an_engine_gets_the_prompt_as_it_was_truncated() -> None:
    """It would else truncate once more a prompt that has grown since, such as by the beginning of an answer."""
    fields = read_fields(b'{"prompt":"abcdef","truncate_prompt_tokens":2,"truncation_side":"right","min_p":0.5}')
    call = Call("/v1/completions", fields, [1, 2], (), (), None)  # type: ignore[arg-type]
    assert json.loads(call.decode_body(None)) == {"prompt_token_ids": [1, 2], "min_p": 0.5}
