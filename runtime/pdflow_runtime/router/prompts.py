"""Turns a client's request into the tokens of its prompt, and tokens into text: the model's tokenizer, and the length
of its context.

A prompt that cannot fit is refused before it is tokenized: by its bytes, of which a token stands for a bounded number,
and then by counting the tokens of slices of it, which takes memory for one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.body_values import OTHER_VALUES, check_values
from pdflow_runtime.http.openai.chat import ChatRequest
from pdflow_runtime.http.openai.completion import CompletionRequest
from pdflow_runtime.http.openai.models import (
    ModelCard,
    model_not_found,
    surely_too_long,
    too_long,
    too_long_a_prompt,
    too_many_together,
)
from pdflow_runtime.http.openai.sampling import AnswerOptions


class Tokens(Protocol):
    """A tokenizer, as far as it is needed here."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def exceeds(self, text: str, most: int) -> bool: ...
    def spelled(self, tokens: Sequence[int]) -> list[str]: ...
    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str: ...
    def chat(self, messages: Sequence[dict[str, str]], **more: Any) -> str: ...


TOKENS_AT_ONCE: Final = 1 << 19
"""Of all prompts of one request, or as many as the longest prompt has: a token takes 8 bytes here, and some 250 while
it is found."""
ESCAPED: Final = 6
"""The most bytes that JSON needs for one byte of a text: \\u0000."""
ID_BYTES: Final = 10
"""Of a token id in JSON, with what separates it from the next."""
LEAST_BODY_BYTES: Final = 4 << 20
"""A request may have a prompt for each of a thousand questions, and options."""
MOST_BODY_BYTES: Final = 16 << 20
"""Where the model's context allows more: bodies are parsed on the event loop, where 16 MiB of text take some 30 ms."""


class Prompts:
    """Makes the prompts of requests for one model. Args: the model's name, tokenizer, number of token ids, and longest
    context in tokens; `prompt_tokens`: of the longest prompt that engines can hand over, if they do; `token_bytes`: the
    most bytes of text that a token can stand for (`token_bytes.py`), if there is such a bound."""

    def __init__(
        self,
        model: str,
        tokens: Tokens,
        vocab_size: int,
        context_tokens: int,
        prompt_tokens: int | None = None,
        token_bytes: int | None = None,
    ) -> None:
        self.model: Final = model
        self.vocab_size: Final = vocab_size
        self.context_tokens: Final = context_tokens
        self.prompt_tokens: Final = prompt_tokens
        self.token_bytes: Final = token_bytes
        self._tokens: Final = tokens

    def card(self, created_s: int) -> ModelCard:
        """Return what `/v1/models` says of the model."""
        return ModelCard(id=self.model, created=created_s, max_model_len=self.context_tokens)

    def check_model(self, model: str | None) -> None:
        """Raise OpenAIError for a model that is not served here."""
        if model is not None and model != self.model:
            raise model_not_found(model)

    def of_completion(self, asked: CompletionRequest) -> list[int]:
        """Return the tokens of the one prompt. OpenAIError if there are several prompts, or tokens that the model has
        not."""
        if len(asked.prompts) > 1:
            raise OpenAIError(400, "prompt: an engine takes one prompt; send several to the router", param="prompt")
        return self.of_prompt(asked.prompts[0])

    @property
    def most_tokens(self) -> int:
        """The tokens of the longest prompt, which has an answer of one token."""
        most = self.context_tokens - 1
        return most if self.prompt_tokens is None else min(most, self.prompt_tokens)

    @property
    def body_bytes(self) -> int:
        """The longest body of a request that could be served: its prompt with all its escapes, or its token ids."""
        longest = self.token_bytes
        if longest is None:
            return MOST_BODY_BYTES
        needed = self.context_tokens * max(ESCAPED * longest, ID_BYTES)
        return min(max(needed, LEAST_BODY_BYTES), MOST_BODY_BYTES)

    def check_body(self, body: bytes) -> None:
        """Raise OpenAIError, before the body is parsed, for one with more values than any request needs: the ids of the
        most tokens that its prompts may have together, and of the whole vocabulary."""
        check_values(body, max(TOKENS_AT_ONCE, self.context_tokens) + self.vocab_size + OTHER_VALUES)

    def of_prompts(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Return the tokens of each prompt. OpenAIError if one is too long, or all of them together are."""
        most = max(TOKENS_AT_ONCE, self.context_tokens)
        if len(prompts) > 1:
            least = sum(self._least_tokens(prompt) for prompt in prompts)
            if least > most:
                raise too_many_together(least, most)
        found: list[list[int]] = []
        total = 0
        for prompt in prompts:
            found.append(self.of_prompt(prompt))
            total += len(found[-1])
            if total > most and len(prompts) > 1:
                raise too_many_together(total, most)
        return found

    def of_prompt(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._encode(prompt, special)
            if not tokens:
                raise OpenAIError(400, "prompt: is empty", param="prompt")
            return tokens
        if max(prompt) >= self.vocab_size:
            raise OpenAIError(400, f"prompt: token ids must be below {self.vocab_size}", param="prompt")
        return list(prompt)

    def of_chat(self, asked: ChatRequest, special: bool = False, add_generation_prompt: bool = True) -> list[int]:
        """Return the tokens of the chat's prompt. OpenAIError if the model takes no chats, or not this one. Messages
        count as they are sent, though a template may drop some of their text."""
        if asked.prompt_tokens is not None:
            return self.of_prompt(asked.prompt_tokens)
        least = sum(self._least_tokens(message.content) for message in asked.messages)
        if least > self.most_tokens:
            raise self._surely_too_long(least)
        messages = [{"role": message.role, "content": message.content} for message in asked.messages]
        more = {} if add_generation_prompt else {"add_generation_prompt": False}
        try:
            text = self._tokens.chat(messages, **more)
        except ValueError as error:
            raise OpenAIError(400, str(error), param="messages") from None
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text. OpenAIError, before it is tokenized whole, if it surely has too many."""
        least = self._least_tokens(text)
        if least > self.most_tokens:
            raise self._surely_too_long(least)
        if self._tokens.exceeds(text, self.most_tokens):
            raise self._surely_too_long(self.most_tokens + 1)
        return self._tokens.encode(text, special=special)

    def _surely_too_long(self, least: int) -> OpenAIError:
        if least >= self.context_tokens or self.prompt_tokens is None:
            return surely_too_long(least, self.context_tokens)
        return too_long_a_prompt(least, self.prompt_tokens)

    def _least_tokens(self, prompt: str | Sequence[int]) -> int:
        """Return how many tokens a prompt has at least; 0 where its bytes say nothing about it."""
        if not isinstance(prompt, str):
            return len(prompt)
        longest = self.token_bytes
        return 0 if longest is None else -(-len(prompt.encode()) // longest)

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        return self._tokens.spelled(tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, special ones included. OpenAIError for an id that the model has not, and for
        more tokens than its context."""
        if len(tokens) > self.context_tokens:
            problem = f"tokens: at most {self.context_tokens} are allowed, not {len(tokens)}"
            raise OpenAIError(400, problem, param="tokens")
        if tokens and max(tokens) >= self.vocab_size:
            raise OpenAIError(400, f"tokens: token ids must be below {self.vocab_size}", param="tokens")
        return self._tokens.decode(tokens, skip_special=False)

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
