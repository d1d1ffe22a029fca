"""Turns an engine's tokens into the pieces of an answer: text, logprobs, and whether the answer ends."""

from __future__ import annotations

from typing import Final

from pdflow_runtime.engines.detokenize import Detokenizer
from pdflow_runtime.engines.job import Ending, Logprobs
from pdflow_runtime.http.openai.answers import AnswerPiece
from pdflow_runtime.http.openai.logprobs import TokenLogprob
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.router.prompts import Prompts


class AnswerText:
    """Makes the pieces of one answer, token by token."""

    def __init__(self, prompts: Prompts, asked: AnswerOptions) -> None:
        self._prompts: Final = prompts
        self._text: Final = Detokenizer(prompts, asked.stop)

    def piece(self, token: int, logprobs: Logprobs | None, ending: Ending | None) -> AnswerPiece:
        """Return the piece of the next token. `ending`: the engine's reason why it is the last one; a stop string is
        found here."""
        text = self._text
        # The token that says stop is no part of the text.
        new = "" if ending == "stop" else text.push(token)
        reason = None
        if text.stopped is not None:
            ending, reason = "stop", text.stopped
        elif ending is not None:
            new += text.flush()
        return AnswerPiece(0, new, ending, reason, self._likely(token, logprobs), [token])

    def _likely(self, token: int, logprobs: Logprobs | None) -> list[TokenLogprob] | None:
        if logprobs is None:
            return None
        decode = self._prompts.decode
        top = tuple((decode([other]), logprob) for other, logprob in logprobs.top)
        return [TokenLogprob(decode([token]), logprobs.chosen, top)]
