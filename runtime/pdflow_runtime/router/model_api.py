"""What clients ask about the model: its card, and texts made tokens and tokens made text (vLLM's /tokenize and
/detokenize)."""

from __future__ import annotations

from typing import Final

from pdflow.version import version
from pdflow_runtime.clock import wall_s
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.openai.models import model_body, models_body
from pdflow_runtime.http.openai.tokenize import (
    TokenizeRequest,
    detokenized_body,
    read_detokenize,
    read_tokenize,
    tokenized_body,
)
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.router.body_reader import BodyReader
from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.router.tokenizer_pool import TokenizerPool

MODEL: Final = "/v1/models/"


class ModelApi:
    """Answers requests about the model; they reach no engine."""

    def __init__(self, prompts: Prompts, pool: TokenizerPool, bodies: BodyReader) -> None:
        self.prompts: Final = prompts
        self.pool: Final = pool
        self.bodies: Final = bodies
        self.started_s: Final = wall_s()

    async def answers(self, method: str, request: HttpRequest, responder: Responder) -> bool:
        """Answer the request; False if it is none of these."""
        match method, request.path:
            case "GET", "/v1/models":
                body = models_body([self.prompts.card(self.started_s)])
            case "GET", path if path.startswith(MODEL):
                self.prompts.check_model(path.removeprefix(MODEL))
                body = model_body(self.prompts.card(self.started_s))
            case "GET", "/version":
                body = b'{"version":"%b"}' % version().encode("ascii")
            case "POST", "/tokenize":
                body = await self.tokenize(request.body)
            case "POST", "/detokenize":
                asked = await self.bodies.read(request.body, read_detokenize)
                self.prompts.check_model(asked.model)
                text = await self.pool.run(len(request.body), lambda: self.prompts.text(asked.tokens))
                body = detokenized_body(text)
            case _:
                return False
        await responder.reply(200, (JSON,), body)
        return True

    async def tokenize(self, body: bytes) -> bytes:
        asked = await self.bodies.read(body, read_tokenize)
        self.prompts.check_model(asked.model)

        def work() -> bytes:
            tokens = self._tokens(asked)
            pieces = self.prompts.spelled(tokens) if asked.return_token_strs else None
            return tokenized_body(tokens, self.prompts.context_tokens, pieces)

        return await self.pool.run(len(body), work)

    def _tokens(self, asked: TokenizeRequest) -> list[int]:
        if asked.chat is not None:
            return self.prompts.of_chat(asked.chat, asked.add_special_tokens, asked.add_generation_prompt)
        return self.prompts.of_prompt(asked.prompt or "", asked.add_special_tokens) if asked.prompt else []
