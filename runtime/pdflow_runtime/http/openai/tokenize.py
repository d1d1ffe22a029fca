"""Requests to /tokenize and /detokenize, and their answers, with vLLM's fields
(`vllm/entrypoints/openai/protocol.py`)."""

from __future__ import annotations

from typing import Final

import msgspec

from pdflow_runtime.http.openai.chat import ChatRequest, read_chat
from pdflow_runtime.http.openai.fields import decoded, invalid, read_fields, rewritten
from pdflow_runtime.http.openai.sampling import TokenId, checked_prompt_tokens

OF_A_CHAT: Final = ("model", "messages")
NOT_HERE: Final = (
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "tools",
)
"""vLLM's fields that would change the tokens, and are not implemented."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    prompt: str | None
    chat: ChatRequest | None
    """Either of the two is None."""
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


class DetokenizeRequest(msgspec.Struct, frozen=True):
    model: str | None
    tokens: tuple[int, ...]


class _Tokenize(msgspec.Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class _Detokenize(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


class _Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


_tokenize = msgspec.json.Decoder(_Tokenize)
_detokenize = msgspec.json.Decoder(_Detokenize)


def read_tokenize(body: bytes) -> TokenizeRequest:
    """Read a request with a `prompt`, or with `messages`. OpenAIError."""
    fields = read_fields(body)
    parsed = decoded(_tokenize, body)
    for name in NOT_HERE:
        if bytes(fields.get(name, b"null")) not in (b"null", b"false", b"[]", b"{}"):
            raise invalid(name, "is not supported by this server")
    if (parsed.prompt is None) is ("messages" not in fields):
        raise invalid("prompt", "expected either a prompt or messages")
    chat = None
    if parsed.prompt is None:
        chat = read_chat(rewritten(fields, drop=[name for name in fields if name not in OF_A_CHAT]))
    special = parsed.add_special_tokens
    return TokenizeRequest(
        model=parsed.model,
        prompt=parsed.prompt,
        chat=chat,
        add_special_tokens=chat is None if special is None else special,
        add_generation_prompt=parsed.add_generation_prompt,
        return_token_strs=bool(parsed.return_token_strs),
    )


def read_detokenize(body: bytes) -> DetokenizeRequest:
    parsed = decoded(_detokenize, body)
    return DetokenizeRequest(parsed.model, checked_prompt_tokens("tokens", parsed.tokens) if parsed.tokens else ())


def tokenized_body(tokens: list[int], context_tokens: int, pieces: list[str] | None) -> bytes:
    return msgspec.json.encode(_Tokenized(len(tokens), context_tokens, tokens, pieces))


def detokenized_body(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})
