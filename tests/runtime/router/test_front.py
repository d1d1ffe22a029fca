"""What the router answers itself: health, versions, the model, its tokens; and HEAD wherever there is a GET."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdflow.version import version
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.http.openai.tokenize import read_tokenize
from pdflow_runtime.process.addresses import EngineGone
from pdflow_runtime.router.prompts import TOKENS_AT_ONCE
from tests.runtime.http.world import LOCAL, response_to, serving
from tests.runtime.router.test_router_node import Town, town


async def asked(router: Town, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    sent = b"" if body is None else msgspec.json.encode(body)
    async with router.client.request(method, LOCAL, router.port, path, (JSON,), sent) as response:
        answer = await response.read()
    return response.status, msgspec.json.decode(answer) if answer else None


@pytest.mark.trio
async def test_the_model_and_the_version() -> None:
    async with town() as router:
        status, listed = await asked(router, "GET", "/v1/models")
        assert (status, [card["id"] for card in listed["data"]]) == (200, ["tiny"])
        assert await asked(router, "GET", "/v1/models/tiny") == (200, listed["data"][0])
        status, error = await asked(router, "GET", "/v1/models/org/other")
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        assert await asked(router, "GET", "/version") == (200, {"version": version()})
        for path in ("/health", "/health/ready", "/health/live", "/ping"):
            assert await asked(router, "GET", path) == (200, None)


@pytest.mark.trio
async def test_a_router_without_engines_lives_and_is_not_ready() -> None:
    async with town() as router:
        for number in (0, 1):
            router.node.members.apply_report(EngineGone(f"decode-{number}"))
        router.turn()
        assert await asked(router, "GET", "/health/ready") == await asked(router, "GET", "/health") == (503, None)
        assert await asked(router, "GET", "/health/live") == (200, None)


@pytest.mark.trio
async def test_tokens_of_a_text_and_back() -> None:
    async with town() as router:
        status, found = await asked(router, "POST", "/tokenize", {"model": "tiny", "prompt": "ab"})
        assert status == 200
        assert found == {"count": 2, "max_model_len": 4096, "tokens": [99, 100], "token_strs": None}
        _, found = await asked(router, "POST", "/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert len(found["token_strs"]) == 2
        messages = [{"role": "user", "content": "hi"}]
        _, found = await asked(router, "POST", "/tokenize", {"messages": messages, "add_generation_prompt": True})
        assert found["count"] == len("user: hi\n")
        assert await asked(router, "POST", "/tokenize", {"prompt": ""}) == (
            200,
            {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": None},
        )
        status, text = await asked(router, "POST", "/detokenize", {"tokens": [99, 100]})
        assert (status, len(text["prompt"])) == (200, 2)
        for path, body, problem in (
            ("/tokenize", {}, "either a prompt or messages"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "either a prompt or messages"),
            ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools: is not supported"),
            ("/tokenize", {"prompt": "a" * 5_000}, "maximum context length is 4096"),
            ("/detokenize", {"tokens": [512]}, "below 512"),
            ("/detokenize", {"tokens": [5] * 4097}, "at most 4096"),
            ("/detokenize", {}, "tokens"),
        ):
            status, error = await asked(router, "POST", path, body)
            assert (status, problem in error["error"]["message"]) == (400, True), (path, error)
        status, _ = await asked(router, "POST", "/tokenize", {"model": "other", "prompt": "ab"})
        assert status == 404


@pytest.mark.trio
async def test_with_a_cluster_port_operators_are_refused_at_the_port_for_clients() -> None:
    async with town() as router:
        router.front.cluster_port = 8443
        async with serving(router.front.at_cluster_port) as inside:
            for method, path in (
                ("GET", "/admin/state"),
                ("POST", "/admin/engines"),
                ("POST", "/admin/engines/decode-0/drain"),
                ("GET", "/%61dmin/state"),
            ):
                status, error = await asked(router, method, path)
                assert status == 403, path
                assert "at the cluster port 8443 only" in error["error"]["message"]
            head = b"HEAD /admin/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert (await response_to(router.port, head)).startswith(b"HTTP/1.1 403 ")
            assert not router.node.members.drained_by_operator
            for path in ("/health", "/metrics", "/v1/models", "/version"):
                async with router.client.request("GET", LOCAL, router.port, path) as response:
                    assert response.status == 200, path
                    await response.read()
            router.port = inside.port
            assert (await response_to(router.port, head)).startswith(b"HTTP/1.1 200 ")
            assert (await asked(router, "POST", "/admin/engines/decode-0/drain"))[0] == 200
            assert router.node.members.drained_by_operator == {"decode-0"}
            assert (await asked(router, "GET", "/v1/models"))[0] == 200


@pytest.mark.trio
async def test_head_is_get_without_its_body() -> None:
    async with town() as router:
        for path in (b"/health", b"/v1/models", b"/v1/models/tiny", b"/version", b"/metrics", b"/admin/state"):
            request = b"HEAD %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path
            answer = await response_to(router.port, request)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
            assert answer.endswith(b"\r\n\r\n")
        answer = await response_to(
            router.port, b"HEAD /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 404 ")


def test_special_tokens_are_vllms_defaults() -> None:
    assert read_tokenize(b'{"prompt": "a"}').add_special_tokens
    chat = read_tokenize(b'{"messages": [{"role": "user", "content": "a"}]}')
    assert not chat.add_special_tokens
    assert chat.add_generation_prompt


@pytest.mark.trio
async def test_a_body_of_many_small_values_is_refused_before_it_is_parsed() -> None:
    async with town() as router:
        small = [[]] * (TOKENS_AT_ONCE // 2 + 3_000)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, error = await asked(router, "POST", path, {"tokens": small})
            assert (status, "commas and opening brackets" in error["error"]["message"]) == (413, True), path
