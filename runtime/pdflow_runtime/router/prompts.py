"""Turns a client's request into the tokens of its prompt, and tokens into text: the model's tokenizer, and the length
of its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.chat import ChatRequest
from pdflow_runtime.http.openai.completion import CompletionRequest
from pdflow_runtime.http.openai.models import too_long, too_long_a_prompt


class Tokens(Protocol):
    """A tokenizer, as far as it is needed here."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def decode(self, tokens: Sequence[int], /) -> str: ...
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

    def decode(self, tokens: Sequence[int], /) -> str:
        return self._tokens.decode(tokens)

    def check_length(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raise OpenAIError if the two together are more than the model's context, or the prompt is more than a
        registration can name blocks of."""
        if prompt_tokens + answer_tokens > self.context_tokens:
            raise too_long(prompt_tokens, answer_tokens, self.context_tokens)
        if self.prompt_tokens is not None and prompt_tokens > self.prompt_tokens:
            raise too_long_a_prompt(prompt_tokens, self.prompt_tokens)
