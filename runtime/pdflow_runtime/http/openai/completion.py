"""Requests to /v1/completions."""

from __future__ import annotations

from typing import Any, Final, TypeAlias, cast

import msgspec

from pdflow_runtime.http.openai.fields import Fields, decoded, invalid, read_fields
from pdflow_runtime.http.openai.sampling import (
    AnswerOptions,
    SharedFields,
    TokenId,
    asked,
    checked_logprobs,
    checked_max_tokens,
    checked_prompt_tokens,
    refuse_what_is_missing_here,
)

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""
MAX_PROMPTS: Final = 1_024

Prompt: TypeAlias = str | tuple[int, ...]
"""A text, or token ids."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    prompts: tuple[Prompt, ...]
    """At least one; each is answered with `asked.n` choices, in order."""
    asked: AnswerOptions
    kv_transfer_params: Any
    pdflow: Any
    """Fields that a router adds (`between`)."""
    fields: Fields


class _Completion(SharedFields, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


_decoder = msgspec.json.Decoder(_Completion)


def read_completion(body: bytes) -> CompletionRequest:
    """Read a request. OpenAIError for anything that is not a request which this server could answer."""
    fields = read_fields(body)
    parsed = decoded(_decoder, body)
    refuse_what_is_missing_here(fields, "completions")
    echo = parsed.echo or False
    given = DEFAULT_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    most = checked_max_tokens("max_tokens", given, 0 if echo else 1)
    return CompletionRequest(
        model=parsed.model,
        prompts=_prompts(parsed),
        asked=asked(parsed, most, checked_logprobs("logprobs", parsed.logprobs), echo),
        kv_transfer_params=parsed.kv_transfer_params,
        pdflow=parsed.pdflow,
        fields=fields,
    )


def _prompts(parsed: _Completion) -> tuple[Prompt, ...]:
    if parsed.prompt_token_ids is not None:
        return (checked_prompt_tokens("prompt_token_ids", parsed.prompt_token_ids),)
    prompt = parsed.prompt
    if prompt is None:
        raise invalid("prompt", "is missing")
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid("prompt", "is empty")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return (checked_prompt_tokens("prompt", cast("list[int]", prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} are allowed, not {len(prompt)}")
    if kinds == {str}:
        return tuple(cast("list[str]", prompt))
    if kinds == {list}:
        lists = cast("list[list[int]]", prompt)
        return tuple(checked_prompt_tokens(f"prompt[{at}]", item) for at, item in enumerate(lists))
    raise invalid("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")
