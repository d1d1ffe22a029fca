"""Any body is a request or an error in OpenAI's shape; what a request says is what its reader hears."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pdflow_runtime.http.errors import ErrorBody, OpenAIError
from pdflow_runtime.http.openai.chat import ChatMessage, ChatRequest, read_chat
from pdflow_runtime.http.openai.completion import CompletionRequest, read_completion
from pdflow_runtime.http.openai.fields import read_fields, rewritten
from pdflow_runtime.http.openai.parameters import REFUSED, Api, RefusedField
from pdflow_runtime.http.openai.sampling import AnswerOptions, SharedFields

READERS: dict[Api, Callable[[bytes], CompletionRequest | ChatRequest]] = {
    "completions": read_completion,
    "chat": read_chat,
}
PROMPT: dict[Api, dict[str, Any]] = {
    "completions": {"prompt": "p"},
    "chat": {"messages": [{"role": "user", "content": "p"}]},
}
each_api = pytest.mark.parametrize("api", READERS)


def read(api: Api, **fields: Any) -> CompletionRequest | ChatRequest:
    return READERS[api](json.dumps(PROMPT[api] | fields).encode())


def refused(read: Callable[[], object]) -> OpenAIError:
    with pytest.raises(OpenAIError) as caught:
        read()
    return caught.value


@each_api
def test_omitted_fields_have_openais_defaults(api: Api) -> None:
    request = read(api, model=None, n=None, stop=None, temperature=None, stream_options=None, unknown={"a": 1})
    assert request.model is None
    assert request.kv_transfer_params is None
    assert request.asked == AnswerOptions(max_tokens=16 if api == "completions" else None)


@each_api
def test_request_fields_are_decoded(api: Api) -> None:
    request = read(
        api,
        model="tiny",
        max_tokens=7,
        n=2,
        stop=["a", "b"],
        stop_token_ids=[3, 3],
        ignore_eos=True,
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        seed=-5,
        min_tokens=2,
        frequency_penalty=-0.5,
        presence_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "0": 1.5},
        allowed_token_ids=[9, 7, 9],
        bad_words=["no", " never"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=-1,
        truncation_side="right",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        kv_transfer_params={"do_remote_decode": True},
    )
    assert request.model == "tiny"
    assert request.kv_transfer_params == {"do_remote_decode": True}
    assert request.asked == AnswerOptions(
        max_tokens=7,
        n=2,
        stop=("a", "b"),
        stop_token_ids=frozenset({3}),
        ignore_eos=True,
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        seed=-5,
        min_tokens=2,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((7, -100.0), (0, 1.5)),
        allowed_token_ids=(9, 7),
        bad_words=("no", " never"),
        include_stop=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=-1,
        keeps_prompt_end=False,
        stream=True,
        include_usage=True,
        continuous_usage=True,
        return_token_ids=True,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_many(prompt: Any, prompts: tuple[Any, ...]) -> None:
    request = read_completion(json.dumps({"prompt": prompt}).encode())
    assert request.prompts == prompts


def test_token_ids_stand_for_prompt_or_messages() -> None:
    assert read_completion(b'{"prompt":"as text","prompt_token_ids":[5,6]}').prompts == ((5, 6),)
    chat = read_chat(b'{"prompt_token_ids":[5,6]}')
    assert (chat.messages, chat.prompt_tokens) == ((), (5, 6))


def test_messages_are_texts_of_roles() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "u", "name": "n"},
        {"role": "assistant", "content": None},
    ]
    assert read("chat", messages=messages).messages == (  # type: ignore[union-attr]
        ChatMessage("system", "a\nb"),
        ChatMessage("user", "u", "n"),
        ChatMessage("assistant", ""),
    )


def test_logprobs_are_a_number_or_a_switch_with_a_number() -> None:
    assert read("completions", logprobs=0).asked.logprobs == 0
    assert read("completions", logprobs=5).asked.logprobs == 5
    assert read("chat", logprobs=True).asked.logprobs == 0
    assert read("chat", logprobs=True, top_logprobs=5).asked.logprobs == 5
    assert read("chat", logprobs=False).asked.logprobs is None


def test_the_newer_limit_counts() -> None:
    assert read("chat", max_tokens=1, max_completion_tokens=2).asked.max_tokens == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": 7.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [2**31]}, "prompt_token_ids"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x" * 101]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"best_of": 2}, "best_of"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"priority": 1}, "priority"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"guided_json": {}}, "guided_json"),
]
WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    ([], "prompt"),
    ({}, "prompt"),
    (5, "prompt"),
    (["a", 1], "prompt"),
    ([[1], "a"], "prompt"),
    ([[1], []], "prompt[1]"),
    ([-1], "prompt"),
    ([True], "prompt[0]"),
    (["a"] * 1_025, "prompt"),
]
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hello", "messages"),
    ([{"content": "a"}], "messages[0]"),
    ([{"role": "wizard", "content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "a"}] * 4_097, "messages"),
]


@each_api
@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_names_its_field(api: Api, fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: read(api, **fields))
    assert (error.status, error.param) == (400, param)
    assert len(str(error)) < 200


@pytest.mark.parametrize(("prompt", "param"), WRONG_PROMPTS, ids=lambda value: str(value)[:40])
def test_a_wrong_prompt_is_named(prompt: Any, param: str) -> None:
    assert refused(lambda: read("completions", prompt=prompt)).param == param


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES, ids=lambda value: str(value)[:40])
def test_a_wrong_message_is_named(messages: Any, param: str) -> None:
    assert refused(lambda: read("chat", messages=messages)).param == param


def test_logprobs_of_the_other_api_are_refused() -> None:
    assert refused(lambda: read("completions", logprobs=True)).param == "logprobs"
    assert refused(lambda: read("completions", logprobs=21)).param == "logprobs"
    assert refused(lambda: read("chat", top_logprobs=2)).param == "top_logprobs"
    assert refused(lambda: read("chat", logprobs=True, top_logprobs=21)).param == "top_logprobs"


@pytest.mark.parametrize(("api", "field"), [(api, field) for field in REFUSED for api in field.apis], ids=str)
def test_what_is_missing_here_may_be_asked_not_to_be(api: Api, field: RefusedField) -> None:
    for value in (None, *field.neutral):
        READERS[api](json.dumps({"prompt_token_ids": [1], field.name: value}).encode())
    error = refused(lambda: READERS[api](json.dumps({"prompt_token_ids": [1], field.name: {"a": "b"}}).encode()))
    assert error.param == field.name
    assert field.why in str(error)


def test_echo_is_of_completions_and_scores_a_prompt_alone() -> None:
    assert read("completions", echo=True, max_tokens=0).asked.max_tokens == 0
    assert read("completions", echo=True, max_tokens=9).asked.echo
    for most in (0, 1):
        assert read("completions", echo=True, max_tokens=most, logprobs=1).asked.scores_prompt
    for fields in ({"max_tokens": 2}, {}):
        error = refused(lambda fields=fields: read("completions", echo=True, logprobs=1, **fields))  # type: ignore[misc]
        assert error.param == "echo"
        assert "max_tokens must be 0 or 1" in str(error)
    assert refused(lambda: read("completions", echo=False, max_tokens=0)).param == "max_tokens"
    assert refused(lambda: read("chat", echo=True)).param == "echo"


@each_api
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{} {}",
        b'{"prompt": "\xff"}',
        b'{"\xff": 1}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"x": ' + b"[" * 100_000,
        b'{"kv_transfer_params": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_json_object_is_refused(api: Api, body: bytes) -> None:
    error = refused(lambda: READERS[api](body))
    assert error.status == 400
    assert msgspec.json.decode(error.body(), type=ErrorBody).error.type == "invalid_request_error"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, "x" * 2000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
NAMES = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "return_token_ids",
    "prompt_token_ids",
    "kv_transfer_params",
    "logprobs",
    "top_logprobs",
    "role",
    *SharedFields.__struct_fields__,
]
content_parts = st.fixed_dictionaries({}, optional={"type": values | st.just("text"), "text": values})
messages = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "tool"]) | values, "content": values | st.lists(content_parts)}
    ),
    max_size=3,
)
bodies = st.dictionaries(st.sampled_from(NAMES + [field.name for field in REFUSED]), values, max_size=6)
spoiled = st.tuples(bodies, st.integers(0, 200), st.binary(max_size=3)).map(
    lambda given: (text := json.dumps(given[0]).encode())[: given[1]] + given[2] + text[given[1] + 1 :]
)


def check_error_body(error: OpenAIError) -> None:
    assert 400 <= error.status < 500
    body = json.loads(error.body())
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}


@each_api
@given(body=st.binary() | bodies.map(lambda fields: json.dumps(fields).encode()) | spoiled)
@example(body=b'{"prompt":"\\u0000"}')
def test_any_bytes_are_a_request_or_an_error_in_openais_shape(api: Api, body: bytes) -> None:
    try:
        READERS[api](body)
    except OpenAIError as error:
        check_error_body(error)


@given(fields=bodies, value=messages)
def test_any_messages_are_a_request_or_an_error(fields: dict[str, Any], value: Any) -> None:
    try:
        read_chat(json.dumps(fields | {"messages": value}).encode())
    except OpenAIError as error:
        check_error_body(error)


@given(fields=st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_a_forwarded_request_differs_only_in_the_replaced_fields(fields: dict[str, Any]) -> None:
    try:
        received = read_fields(json.dumps({"kv_transfer_params": {"evil": 1}} | fields).encode())
    except OpenAIError:
        assume(False)  # numbers that JSON has not
    on = rewritten(received, drop=["kv_transfer_params"], put={"max_tokens": 1})
    left = fields | {"max_tokens": 1}
    left.pop("kv_transfer_params", None)
    assert json.loads(on) == left
