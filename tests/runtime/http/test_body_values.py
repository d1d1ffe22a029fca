"""Bodies of many small values are refused before they are parsed; what a request may need is not."""

from __future__ import annotations

import pytest

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.body_values import OTHER_BYTES, OTHER_VALUES, check_values
from pdflow_runtime.http.openai.chat import read_chat
from pdflow_runtime.http.openai.completion import read_completion

MOST = 100_000
TEXT = b'{"prompt": "a", '


def many(start: bytes, value: bytes, count: int, end: bytes) -> bytes:
    return start + b",".join([value] * count) + end


@pytest.mark.parametrize(
    ("start", "value", "end"),
    [
        (b'{"prompt": [', b"1", b"]}"),
        (b'{"prompt": [', b"[]", b"]}"),
        (b'{"messages": [', b"{}", b"]}"),
        (b'{"unknown": [', b"[]", b"]}"),
        (b'{"a": ', b'1, "a": 2', b"}"),
        (b"[", b"{}", b"]"),
    ],
)
def test_too_many_values_are_refused(start: bytes, value: bytes, end: bytes) -> None:
    with pytest.raises(OpenAIError, match=f"commas and opening brackets, at most {MOST} are") as refused:
        check_values(many(start, value, MOST + 1, end), MOST)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "body",
    [
        many(TEXT + b'"user": [', b"1.5e300", OTHER_VALUES, b"]}"),
        many(TEXT + b'"metadata": [', b"{}", OTHER_VALUES, b"]}"),
        many(TEXT, b'"a": 1', OTHER_VALUES, b"}"),
        many(b'{"prompt": [', b"1", OTHER_VALUES, b'], "prompt": [1]}'),
        TEXT + b'"user": ' + b"9" * OTHER_BYTES + b"}",
    ],
    ids=["user", "metadata", "fields", "twice", "bytes"],
)
def test_other_fields_may_have_few_values_and_bytes(body: bytes) -> None:
    with pytest.raises(OpenAIError, match=r"fields other than prompt, messages.*4096 and 1048576 are") as refused:
        check_values(body, MOST)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "body",
    [
        many(b'{"prompt": [', b"123456", MOST - 2, b"]}"),
        many(TEXT + b'"allowed_token_ids": [', b"123456", MOST - 3, b"]}"),
        many(TEXT + b'"user": [', b"1", OTHER_VALUES - 3, b"]}"),
        b'{"prompt": "' + b"[{," * (MOST // 3 - 1) + b'"}',
        b'{"messages": [{"role": "user", "content": "' + b"[{," * (MOST // 3 - 2) + b'"}]}',
        b"no JSON",
    ],
    ids=["prompt", "allowed", "user", "text", "chat", "malformed"],
)
def test_what_a_request_may_need_is_allowed(body: bytes) -> None:
    check_values(body, MOST)


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids", "allowed_token_ids", "stop_token_ids"])
def test_of_numbers_with_thousands_of_digits_one_is_parsed(field: str) -> None:
    with pytest.raises(OpenAIError, match=rf"{field}\[0\]"):
        read_completion(many(b'{"%b": [' % field.encode(), b"9" * 4_000, 3, b"]}"))


def test_tool_calls_are_not_parsed() -> None:
    body = many(b'{"messages": [{"role": "assistant", "tool_calls": [', b"9" * 5_000, 3, b"]}]}")
    with pytest.raises(OpenAIError, match="tool_calls: is not supported"):
        read_chat(body)  # a number of so many digits is out of range where it is parsed


def test_a_long_field_that_is_not_supported_is_refused_as_such() -> None:
    """Two hundred tools have more values than the fields of any request that is supported."""
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a", "b"]}}}'
    body = many(b'{"messages": [], "tools": [', tool, OTHER_VALUES, b"]}")
    with pytest.raises(OpenAIError, match="tools: is not supported by this server") as refused:
        check_values(body, 10 * MOST)
    assert refused.value.status == 400
