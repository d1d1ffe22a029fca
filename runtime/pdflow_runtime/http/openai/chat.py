"""Requests to /v1/chat/completions: messages with roles and texts. Images, audio and tools are not supported."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from pdflow_runtime.http.openai.fields import Fields, decoded, invalid, read_fields
from pdflow_runtime.http.openai.sampling import (
    AnswerOptions,
    SharedFields,
    asked,
    checked_logprobs,
    checked_max_tokens,
    checked_prompt_tokens,
    refuse_what_is_missing_here,
)

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

MAX_MESSAGES: Final = 4_096


class ChatMessage(msgspec.Struct, frozen=True):
    role: Role
    content: str
    name: str | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    messages: tuple[ChatMessage, ...]
    """For the model's chat template; empty only where there are `prompt_tokens`."""
    prompt_tokens: tuple[int, ...] | None
    """The prompt, if the sender has made it of the messages already."""
    asked: AnswerOptions
    kv_transfer_params: Any
    pdflow: Any
    """Fields that a router adds (`between`)."""
    fields: Fields


class _ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[_ContentPart] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Chat(SharedFields, frozen=True, kw_only=True):
    messages: list[_Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_decoder = msgspec.json.Decoder(_Chat)


def read_chat(body: bytes) -> ChatRequest:
    """Read a request. OpenAIError for anything that is not a request which this server could answer."""
    fields = read_fields(body)
    parsed = decoded(_decoder, body)
    refuse_what_is_missing_here(fields, "chat")
    tokens = parsed.prompt_token_ids
    most = checked_max_tokens("max_tokens", parsed.max_tokens)
    newer = checked_max_tokens("max_completion_tokens", parsed.max_completion_tokens)
    return ChatRequest(
        model=parsed.model,
        messages=_messages(parsed, needed=tokens is None),
        prompt_tokens=None if tokens is None else checked_prompt_tokens("prompt_token_ids", tokens),
        asked=asked(parsed, newer or most, _logprobs(parsed)),
        kv_transfer_params=parsed.kv_transfer_params,
        pdflow=parsed.pdflow,
        fields=fields,
    )


def _messages(parsed: _Chat, needed: bool) -> tuple[ChatMessage, ...]:
    messages = parsed.messages or []
    if needed and not messages:
        raise invalid("messages", "is missing" if parsed.messages is None else "is empty")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} are allowed, not {len(messages)}")
    return tuple(
        ChatMessage(message.role, _text(message, f"messages[{at}]"), message.name)
        for at, message in enumerate(messages)
    )


def _text(message: _Message, at: str) -> str:
    if message.tool_calls:
        raise invalid(f"{at}.tool_calls", "is not supported by this server")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise invalid(f"{at}.content", "is missing")
        return ""
    if isinstance(content, str):
        return content
    for index, content_part in enumerate(content):
        if content_part.type != "text" or content_part.text is None:
            raise invalid(f"{at}.content[{index}]", "is not a text; this server supports texts only")
    return "\n".join(content_part.text or "" for content_part in content)


def _logprobs(parsed: _Chat) -> int | None:
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    return checked_logprobs("top_logprobs", parsed.top_logprobs or 0) if parsed.logprobs else None
