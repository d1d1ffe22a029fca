"""Turns an engine's tokens into the pieces of an answer: text, logprobs, and whether the answer ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from pdflow_runtime.engines.detokenize import Decoder, Detokenizer
from pdflow_runtime.engines.job import Ending
from pdflow_runtime.engines.sampling.logprobs import Logprobs, PromptScores
from pdflow_runtime.http.openai.answers import AnswerPiece
from pdflow_runtime.http.openai.logprobs import TokenLogprob
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.router.prompts import Prompts


class SpellingOut:
    """Decodes tokens, special ones included."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts: Final = prompts

    def decode(self, tokens: Sequence[int], /) -> str:
        return self._prompts.decode(tokens, skip_special=False)


class AnswerText:
    """Makes the pieces of one answer, token by token. Args: `prompt`, which the answer begins with if the request asks
    for that; `scores` has its logprobs, if they are wanted."""

    def __init__(
        self, prompts: Prompts, asked: AnswerOptions, prompt: Sequence[int], scores: PromptScores | None = None
    ) -> None:
        self._decoder: Final[Decoder] = prompts if asked.skip_special_tokens else SpellingOut(prompts)
        self._text: Final = Detokenizer(self._decoder, asked.stop, asked.include_stop)
        self._asked: Final = asked
        self._echo: Sequence[int] | None = prompt if asked.echo else None
        """The prompt, while the answer has not begun with it."""
        self._scores: Final = scores
        self._tokens = 0

    def piece(self, token: int, logprobs: Logprobs | None, ending: Ending | None) -> AnswerPiece:
        """Return the piece of the next token. `ending`: the engine's reason why it is the last one; a stop string is
        found here."""
        text, asked = self._text, self._asked
        if asked.max_tokens == 0:
            return self._with_prompt(AnswerPiece(0, "", "length", None, None if asked.logprobs is None else [], []))
        self._tokens += 1
        # The token that says stop is no part of the text, unless that is asked for.
        new = ""
        if ending != "stop" or asked.include_stop:
            new = text.push(token, self._tokens > asked.min_tokens)
        reason = None
        if text.stopped is not None:
            ending, reason = "stop", text.stopped
        elif ending is not None:
            new += text.flush()
        piece = AnswerPiece(0, new, ending, reason, self._likely(token, logprobs), [token])
        return piece if self._echo is None else self._with_prompt(piece)

    def _with_prompt(self, piece: AnswerPiece) -> AnswerPiece:
        """Return the answer's first piece with the prompt before it."""
        prompt, self._echo = self._echo or (), None
        logprobs = piece.logprobs
        if logprobs is not None:
            logprobs = [*self._prompt_logprobs(prompt), *logprobs]
        return msgspec.structs.replace(piece, text=self._decoder.decode(prompt) + piece.text, logprobs=logprobs)

    def _prompt_logprobs(self, prompt: Sequence[int]) -> Iterator[TokenLogprob]:
        """Yield those of the prompt's tokens: the first one has no logprob."""
        found = [None] * len(prompt) if self._scores is None else self._scores.logprobs
        for token, logprobs in zip(prompt, found, strict=True):
            yield (
                TokenLogprob(self._decoder.decode([token]), None) if logprobs is None else self._scored(token, logprobs)
            )

    def _likely(self, token: int, logprobs: Logprobs | None) -> list[TokenLogprob] | None:
        return None if logprobs is None else [self._scored(token, logprobs)]

    def _scored(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        decode = self._decoder.decode
        top = tuple((decode([other]), logprob) for other, logprob in logprobs.top)
        return TokenLogprob(decode([token]), logprobs.chosen, top)
