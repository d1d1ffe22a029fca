"""The answer to /v1/models, and the errors that follow from a model: it is not here, or the request is too long for
it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdflow_runtime.http.errors import OpenAIError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pdflow"
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelCard]


def models_body(cards: Iterable[ModelCard]) -> bytes:
    return msgspec.json.encode(_Models("list", list(cards)))


def model_body(card: ModelCard) -> bytes:
    return msgspec.json.encode(card)


def model_not_found(model: str) -> OpenAIError:
    return OpenAIError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")


def too_long(prompt_tokens: int, answer_tokens: int, context_tokens: int) -> OpenAIError:
    """Return the error for a prompt that, with the answer asked for, is longer than the model's context."""
    message = (
        f"This model's maximum context length is {context_tokens} tokens. However, you requested "
        f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the prompt, {answer_tokens} in the completion). "
        "Please reduce the length of the prompt or of the completion."
    )
    return OpenAIError(400, message, code="context_length_exceeded")


def surely_too_long(least_tokens: int, most_tokens: int) -> OpenAIError:
    """Return the error for a prompt that was not tokenized, as it has at least so many tokens."""
    message = (
        f"This model's maximum context length is {most_tokens} tokens. However, your prompt has at least "
        f"{least_tokens} tokens. Please reduce its length."
    )
    return OpenAIError(400, message, code="context_length_exceeded")


def too_many_together(least_tokens: int, most_tokens: int) -> OpenAIError:
    """Return the error for a request whose prompts are too long together."""
    message = (
        f"The prompts of one request may have at most {most_tokens} tokens together. However, yours have at least "
        f"{least_tokens} tokens. Please send them in several requests."
    )
    return OpenAIError(400, message, param="prompt", code="context_length_exceeded")


def too_long_a_prompt(prompt_tokens: int, most_tokens: int) -> OpenAIError:
    """Return the error for a prompt that fits the model, but has more blocks than one engine can announce to another at
    once."""
    message = (
        f"This server accepts prompts of at most {most_tokens} tokens: a transfer cannot have more blocks. "
        f"However, you requested {prompt_tokens} tokens in the prompt. Please reduce its length."
    )
    return OpenAIError(400, message, code="context_length_exceeded")
