"""Turns a client's request into the tokens of its prompt, and tokens into text: the model's tokenizer, and the length
of its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.chat import ChatRequest
from pdflow_runtime.http.openai.completion import CompletionRequest
from pdflow_runtime.http.openai.models import too_long, too_long_a_prompt
from pdflow_runtime.http.openai.sampling import AnswerOptions


class Tokens(Protocol):
    """A tokenizer, as far as it is needed here."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str: ...
    def chat(self, messages: Sequence[dict[str, str]]) -> str: ...


class Prompts:
    """Makes the prompts of requests for one model. Args: the model's name, tokenizer, number of token ids, and longest
    context in tokens; `prompt_tokens`: of the longest prompt that engines can hand over, if they do."""

    def __init__(
        self, model: str, tokens: Tokens, vocab_size: int, context_tokens: int, prompt_tokens: int | None = None
    ) -> None:
        self.model: Final = model
        self.vocab_size: Final = vocab_size
        self.context_tokens: Final = context_tokens
        self.prompt_tokens: Final = prompt_tokens
        self._tokens: Final = tokens

    def of_completion(self, asked: CompletionRequest) -> list[int]:
        """Return the tokens of the one prompt. OpenAIError if there are several prompts, or tokens that the model has
        not."""
        if len(asked.prompts) > 1:
            raise OpenAIError(400, "prompt: an engine takes one prompt; send several to the router", param="prompt")
        return self.of_prompt(asked.prompts[0])

    def of_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._tokens.encode(prompt)
            if not tokens:
                raise OpenAIError(400, "prompt: is empty", param="prompt")
            return tokens
        if max(prompt) >= self.vocab_size:
            raise OpenAIError(400, f"prompt: token ids must be below {self.vocab_size}", param="prompt")
        return list(prompt)

    def of_chat(self, asked: ChatRequest) -> list[int]:
        """Return the tokens of the chat's prompt. OpenAIError if the model takes no chats, or not this one."""
        if asked.prompt_tokens is not None:
            return self.of_prompt(asked.prompt_tokens)
        try:
            text = self._tokens.chat([{"role": message.role, "content": message.content} for message in asked.messages])
        except ValueError as error:
            raise OpenAIError(400, str(error), param="messages") from None
        return self._tokens.encode(text, special=False)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return self._tokens.decode(tokens, skip_special)

    def truncated(self, tokens: list[int], asked: AnswerOptions) -> list[int]:
        """Return the tokens of a prompt that the request keeps, of which it keeps all by default."""
        kept = asked.truncate_prompt_tokens
        if kept is None:
            return tokens
        if kept == -1:
            kept = max(1, self.context_tokens - (asked.max_tokens or 1))
        return tokens[-kept:] if asked.keeps_prompt_end else tokens[:kept]

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, as a text begins with it and as it follows a space."""
        spelled = [text for phrase in words for text in (phrase.lstrip(), f" {phrase.lstrip()}")]
        found = dict.fromkeys(tuple(self._tokens.encode(text, special=False)) for text in spelled)
        return tuple(tokens for tokens in found if tokens)

    def check_token_ids(self, asked: AnswerOptions) -> None:
        """Raise OpenAIError if the request names tokens that the model has not."""
        named = {"logit_bias": dict(asked.logit_bias), "allowed_token_ids": asked.allowed_token_ids or ()}
        for param, tokens in named.items():
            if max(tokens, default=0) >= self.vocab_size:
                raise OpenAIError(400, f"{param}: token ids must be below {self.vocab_size}", param=param)

    def check_length(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raise OpenAIError if the two together are more than the model's context, or the prompt is more than a
        registration can name blocks of."""
        if prompt_tokens + answer_tokens > self.context_tokens:
            raise too_long(prompt_tokens, answer_tokens, self.context_tokens)
        if self.prompt_tokens is not None and prompt_tokens > self.prompt_tokens:
            raise too_long_a_prompt(prompt_tokens, self.prompt_tokens)
