"""Answers hold the keys that clients of OpenAI and of vLLM read, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.answers import (
    DONE,
    AnswerFormat,
    AnswerPiece,
    ChatAnswer,
    CompletionAnswer,
    error_event,
    usage,
)
from pdflow_runtime.http.openai.logprobs import TokenLogprob
from pdflow_runtime.http.openai.models import ModelCard, model_not_found, models_body, too_long

USED = usage(3, 2)
LOGPROBS = (
    TokenLogprob("he", -0.5, (("he", -0.5), ("é", -1.5))),
    TokenLogprob("y", float("-inf"), (("he", -0.25), ("y", float("-inf")))),
)


def events(data: bytes) -> list[Any]:
    """What an SSE client reads."""
    assert data.endswith(b"\n\n")
    chunks = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in chunks)
    return [json.loads(event.removeprefix("data: ")) for event in chunks]


def test_a_whole_completion() -> None:
    answer = CompletionAnswer("r1", 1_700_000_000, "tiny")
    pieces = [AnswerPiece(0, "hey", "length"), AnswerPiece(1, "you", "stop", stop_reason="!")]
    assert json.loads(answer.whole(pieces, usage(3, 2, cached_tokens=1))) == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "hey", "logprobs": None, "finish_reason": "length"},
            {"index": 1, "text": "you", "logprobs": None, "finish_reason": "stop", "stop_reason": "!"},
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_whole_chat() -> None:
    answer = ChatAnswer("r1", 1_700_000_000, "tiny")
    piece = AnswerPiece(0, "hey", "stop", stop_reason=7, token_ids=(1, 2), prompt_token_ids=(9,))
    assert json.loads(answer.whole([piece], USED, {"remote_port": 1})) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hey"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 7,
                "token_ids": [1, 2],
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "prompt_token_ids": [9],
        "kv_transfer_params": {"remote_port": 1},
    }


def test_a_streamed_completion() -> None:
    answer = CompletionAnswer("r1", 5, "tiny")
    (first,) = events(answer.event(AnswerPiece(0, "he", prompt_token_ids=(9,), token_ids=(1,))))
    assert first == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": 5,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "he",
                "logprobs": None,
                "finish_reason": None,
                "token_ids": [1],
                "prompt_token_ids": [9],
            }
        ],
    }
    (last,) = events(answer.event(AnswerPiece(0, "y", "stop")))
    assert last["choices"][0]["finish_reason"] == "stop"
    (used,) = events(answer.usage_event(USED))
    assert used["choices"] == []
    assert used["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_streamed_chat_opens_each_choice_with_its_role() -> None:
    answer = ChatAnswer("r1", 5, "tiny")
    chunks = events(
        answer.event(AnswerPiece(0, "a", prompt_token_ids=(9,))) + answer.event(AnswerPiece(1, "b", "stop"))
    )
    chunks += events(answer.event(AnswerPiece(0, "c", "length")))
    assert {event["object"] for event in chunks} == {"chat.completion.chunk"}
    assert [event.get("prompt_token_ids") for event in chunks] == [[9], None, None, None, None]
    assert [(event["choices"][0]["index"], event["choices"][0]["delta"]) for event in chunks] == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"content": "a"}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}),
        (0, {"content": "c"}),
    ]
    assert [event["choices"][0]["finish_reason"] for event in chunks] == [None, None, None, "stop", "length"]


def test_logprobs_of_a_completion_count_characters_from_the_beginning() -> None:
    answer = CompletionAnswer("r1", 5, "tiny")
    answer.event(AnswerPiece(0, "hey", logprobs=LOGPROBS))
    (event,) = events(answer.event(AnswerPiece(0, "hey", logprobs=LOGPROBS)))
    assert event["choices"][0]["logprobs"] == {
        "tokens": ["he", "y"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"he": -0.5, "é": -1.5}, {"he": -0.25, "y": -9999.0}],
        "text_offset": [3, 5],
    }


def test_logprobs_of_a_chat_hold_bytes() -> None:
    body = json.loads(ChatAnswer("r1", 5, "tiny").whole([AnswerPiece(0, "hey", "stop", logprobs=LOGPROBS[:1])], USED))
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "he",
                "logprob": -0.5,
                "bytes": [104, 101],
                "top_logprobs": [
                    {"token": "he", "logprob": -0.5, "bytes": [104, 101]},
                    {"token": "é", "logprob": -1.5, "bytes": [195, 169]},
                ],
            }
        ]
    }


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("text", ["\n\n", "data: [DONE]\n\n", "\r", "\u2028", "🦙", '"\\', "\x00"])
def test_no_text_breaks_an_event(kind: type[CompletionAnswer] | type[ChatAnswer], text: str) -> None:
    answer: AnswerFormat = kind("r1", 5, "tiny")
    choice = events(answer.event(AnswerPiece(0, text)))[-1]["choices"][0]
    assert choice.get("text", choice.get("delta", {}).get("content")) == text


def test_a_stream_that_cannot_go_on_has_an_error_event() -> None:
    (event,) = events(error_event(OpenAIError(502, "gone")))
    assert event == {"error": {"message": "gone", "type": "server_error", "param": None, "code": None}}
    assert DONE == b"data: [DONE]\n\n"


def test_models_and_what_follows_from_them() -> None:
    assert json.loads(models_body([ModelCard(id="tiny", created=5, max_model_len=128)])) == {
        "object": "list",
        "data": [{"id": "tiny", "object": "model", "created": 5, "owned_by": "pdflow", "max_model_len": 128}],
    }
    assert (model_not_found("x").status, model_not_found("x").code) == (404, "model_not_found")
    error = too_long(100, 50, 128)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "150 tokens (100 in the prompt, 50 in the completion)" in str(error)


def test_a_received_error_equals_the_sent_one() -> None:
    sent = OpenAIError(503, "the request failed: deadline", param="prompt", code="DEADLINE")
    received = OpenAIError.from_response(503, sent.body())
    assert received is not None
    assert (received.status, str(received), received.param, received.code) == (503, str(sent), "prompt", "DEADLINE")


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"error": "no"}', b'{"error": {"message": 3}}'])
def test_what_is_no_error_is_not_taken_for_one(body: bytes) -> None:
    assert OpenAIError.from_response(500, body) is None
