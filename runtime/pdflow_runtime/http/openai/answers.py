"""The answers that clients get: whole, or as the events of a stream; for either API, from the same pieces.

One answer is one object: a stream's state (whose role has been sent, how far a choice's text is) is in it. Keys that
only vLLM has (`stop_reason`, `token_ids`, `prompt_token_ids`, `kv_transfer_params`) are there where there is a value.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, TokenLogprob, of_chat, of_completion

Ending: TypeAlias = Literal["stop", "length", "abort"]

DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerPiece(msgspec.Struct, frozen=True):
    """The next part of one choice; of an answer that is not streamed, all of it."""

    index: int
    text: str
    ending: Ending | None = None
    """Set with the last piece."""
    stop_reason: int | str | None = None
    """The stop token or the stop string that ended it."""
    logprobs: Seq[TokenLogprob] | None = None
    token_ids: Seq[int] | None = None
    prompt_token_ids: Seq[int] | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Usage:
    details = UNSET if cached_tokens is None else PromptDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class AnswerFormat(Protocol):
    """The format of one answer, of either API."""

    name: tuple[str, int]
    """Its id, and when it was begun, in seconds."""

    def event(self, piece: AnswerPiece, used: Usage | UnsetType = UNSET) -> bytes:
        """Return the stream's next event, or events, with the usage so far if it is given."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last event before DONE, where it was asked for."""
        ...

    def whole(self, pieces: Seq[AnswerPiece], usage: Usage, kv_transfer_params: Any = None) -> bytes: ...


def error_event(error: OpenAIError) -> bytes:
    """Return the event that ends a stream which cannot go on. DONE follows, as with vLLM."""
    return b"data: " + error.body() + b"\n\n"


class CompletionAnswer:
    def __init__(self, request_id: str, created_s: int, model: str) -> None:
        self.name = f"cmpl-{request_id}", created_s
        self._model = model
        self._text_offsets: dict[int, int] = {}
        """Characters of each choice's text so far."""

    def event(self, piece: AnswerPiece, used: Usage | UnsetType = UNSET) -> bytes:
        return self._event((self._choice(piece),), used)

    def usage_event(self, usage: Usage) -> bytes:
        return self._event((), usage)

    def whole(self, pieces: Seq[AnswerPiece], usage: Usage, kv_transfer_params: Any = None) -> bytes:
        choices = tuple(self._choice(piece) for piece in pieces)
        return _encode(
            _CompletionAnswer(*self.name, self._model, choices, usage, _given(kv_transfer_params)),
        )

    def _event(self, choices: tuple[_CompletionChoice, ...], usage: Usage | UnsetType = UNSET) -> bytes:
        return b"data: %b\n\n" % _encode(_CompletionAnswer(*self.name, self._model, choices, usage))

    def _choice(self, piece: AnswerPiece) -> _CompletionChoice:
        logprobs = None
        if piece.logprobs is not None:
            text_offset = self._text_offsets.get(piece.index, 0)
            logprobs = of_completion(piece.logprobs, text_offset)
            self._text_offsets[piece.index] = text_offset + sum(len(token.text) for token in piece.logprobs)
        return _CompletionChoice(
            piece.index,
            piece.text,
            logprobs,
            piece.ending,
            _given(piece.stop_reason),
            _given(piece.token_ids),
            _given(piece.prompt_token_ids),
        )


class ChatAnswer:
    def __init__(self, request_id: str, created_s: int, model: str) -> None:
        self.name = f"chatcmpl-{request_id}", created_s
        self._model = model
        self._opened: set[int] = set()
        """Choices whose role the stream has sent."""

    def event(self, piece: AnswerPiece, used: Usage | UnsetType = UNSET) -> bytes:
        opening = b""
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            opening = self._event((_ChatChoice(piece.index, delta=_AnswerMessage("", "assistant")),), used, piece)
        logprobs = None if piece.logprobs is None else of_chat(piece.logprobs)
        choice = _ChatChoice(
            piece.index,
            logprobs,
            piece.ending,
            _given(piece.stop_reason),
            _given(piece.token_ids),
            delta=_AnswerMessage(piece.text),
        )
        return opening + self._event((choice,), used)

    def usage_event(self, usage: Usage) -> bytes:
        return self._event((), usage)

    def whole(self, pieces: Seq[AnswerPiece], usage: Usage, kv_transfer_params: Any = None) -> bytes:
        choices = tuple(
            _ChatChoice(
                piece.index,
                None if piece.logprobs is None else of_chat(piece.logprobs),
                piece.ending,
                _given(piece.stop_reason),
                _given(piece.token_ids),
                message=_AnswerMessage(piece.text, "assistant"),
            )
            for piece in pieces
        )
        prompt = _given(pieces[0].prompt_token_ids) if pieces else UNSET
        return _encode(
            _ChatAnswer(
                self.name[0],
                "chat.completion",
                self.name[1],
                self._model,
                choices,
                usage,
                prompt,
                _given(kv_transfer_params),
            ),
        )

    def _event(
        self, choices: tuple[_ChatChoice, ...], usage: Usage | UnsetType = UNSET, first: AnswerPiece | None = None
    ) -> bytes:
        prompt = UNSET if first is None else _given(first.prompt_token_ids)
        chunk = _ChatAnswer(self.name[0], "chat.completion.chunk", self.name[1], self._model, choices, usage, prompt)
        return b"data: %b\n\n" % _encode(chunk)


class _CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Ending | None
    stop_reason: int | str | UnsetType
    token_ids: Seq[int] | UnsetType
    prompt_token_ids: Seq[int] | UnsetType


class _CompletionAnswer(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    choices: tuple[_CompletionChoice, ...]
    usage: Usage | UnsetType
    kv_transfer_params: Any = UNSET


class _AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: str | UnsetType = UNSET


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: Ending | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: Seq[int] | UnsetType = UNSET
    message: _AnswerMessage | UnsetType = UNSET
    delta: _AnswerMessage | UnsetType = UNSET


class _ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChatChoice, ...]
    usage: Usage | UnsetType
    prompt_token_ids: Seq[int] | UnsetType = UNSET
    kv_transfer_params: Any = UNSET


def _given(value: Any) -> Any:
    return UNSET if value is None else value
