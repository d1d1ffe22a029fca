"""The HTTP API of an engine: OpenAI's, with kv_transfer_params for the half of a request that the engine is to do.

Engines of both roles share this module; each role's half is in `prefill_api` and `decode_api`. A leg is cancelled by
closing its connection. Only routers send requests here: a client's own kv_transfer_params never reach an engine.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant
from pdflow.protocol.wire.checks import id_problem
from pdflow_runtime.clock import wall_s
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.engines.sampling.constraints import Constraints
from pdflow_runtime.engines.sampling.logprobs import PromptScores
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON, STEPS, Headers, HttpRequest
from pdflow_runtime.http.openai.answers import (
    DONE,
    AnswerFormat,
    AnswerPiece,
    ChatAnswer,
    CompletionAnswer,
    Usage,
    error_event,
    usage,
)
from pdflow_runtime.http.openai.between import Between, FirstToken, read_between
from pdflow_runtime.http.openai.chat import ChatRequest, read_chat
from pdflow_runtime.http.openai.completion import CompletionRequest, read_completion
from pdflow_runtime.http.openai.models import models_body
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.observe.state import EngineState, state_of
from pdflow_runtime.process.component_api import ComponentApi
from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.security.signed import Gate

STATUS: Final = {
    Code.REJECTED: 400,
    Code.DEADLINE: 504,
    Code.UNREACHABLE: 503,
    Code.PEER_DEAD: 503,
    Code.PEER_RESTARTED: 503,
}
"""The HTTP status of a leg that ended without an answer; any other cause is a 502."""


class LegAsked(NamedTuple):
    """A leg as a router asks for it."""

    request_id: str
    """The id of the attempt."""
    body: CompletionRequest | ChatRequest
    tokens: list[int]
    """The token ids of the prompt."""
    answer: AnswerFormat
    """The form of the answer that the client gets."""
    headers: Headers = ()
    """The headers of the router's request."""

    @property
    def asked(self) -> AnswerOptions:
        return self.body.asked


_Node = TypeVar("_Node", bound=LiveEngineNode)


class EngineApi(ComponentApi, Generic[_Node]):
    """The HTTP API of an engine; subclasses implement one role's half. Args: `method` is the scenario's; `here` is
    where this engine's ranks listen; `gate` authenticates requests; `stop` ends this engine when its requests are
    done."""

    def __init__(
        self,
        node: _Node,
        prompts: Prompts,
        method: str,
        here: Coordinates,
        gate: Gate,
        stop: Callable[[], None],
    ) -> None:
        super().__init__(node, gate, stop, prompts.model)
        self.node: Final = node
        self.prompts: Final = prompts
        self.method: Final = method
        self.here: Final = here
        self.started_s: Final = wall_s()

    def state(self) -> EngineState:
        return state_of(self.node)

    def health(self) -> Headers:
        return ((STEPS, b"%d" % self.node.engine.steps),)

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except OpenAIError as error:
            if responder.begun:
                await responder.send(error_event(error) + DONE)
                await responder.end()
            else:
                await responder.reply(error.status, error.headers, error.body())

    async def _answer(self, request: HttpRequest, responder: Responder) -> None:
        if await self.operated(request, responder):
            return
        match request.method, request.path:
            case "GET", "/v1/models":
                await responder.reply(200, (JSON,), models_body([self.prompts.card(self.started_s)]))
            case "POST", "/v1/completions":
                asked = read_completion(request.body)
                await self._complete(request, asked, self.prompts.of_completion(asked), CompletionAnswer, responder)
            case "POST", "/v1/chat/completions":
                chat = read_chat(request.body)
                await self._complete(request, chat, self.prompts.of_chat(chat), ChatAnswer, responder)
            case _:
                if not await self.answered_besides(request, responder):
                    raise OpenAIError(404, f"unknown path: {request.method} {request.path}")

    async def answered_besides(self, request: HttpRequest, responder: Responder) -> bool:
        """Answer a path that only this role has. False if there is no such path."""
        return False

    @abstractmethod
    async def complete(self, leg: LegAsked, responder: Responder) -> None:
        """Do this role's half of a request. ParamsError, KeyError if the attempt is here already."""

    async def _complete(
        self,
        request: HttpRequest,
        asked: CompletionRequest | ChatRequest,
        tokens: list[int],
        form: type[CompletionAnswer] | type[ChatAnswer],
        responder: Responder,
    ) -> None:
        self.prompts.check_model(asked.model)
        if asked.asked.n > 1:
            raise OpenAIError(400, "n: an engine returns one choice; send n > 1 to the router", param="n")
        request_id = named(request)
        answer = form(request_id, wall_s(), self.prompts.model)
        tokens = self.prompts.truncated(tokens, asked.asked)
        try:
            await self.complete(LegAsked(request_id, asked, tokens, answer, request.headers), responder)
        except ParamsError as error:
            raise OpenAIError(400, f"kv_transfer_params: {error}", param="kv_transfer_params") from None
        except KeyError as error:
            raise OpenAIError(409, str(error.args[0])) from None

    def traced(self, leg: LegAsked, begun_ns: Instant) -> None:
        """Begin the span of a leg that the node has begun."""
        if self.node.traces is not None:
            self.node.traces.begin(leg.request_id, leg.headers, begun_ns)

    def between(self, leg: LegAsked) -> Between:
        """Read from the request's body what its two legs tell each other. OpenAIError."""
        between = read_between(leg.body.pdflow)
        if between.first is not None:
            self.checked(between.first)
        if between.given is not None and not 0 < between.given.tokens < len(leg.tokens):
            raise OpenAIError(400, "pdflow: the given tokens must be a part of the prompt", param="pdflow")
        return between

    def checked(self, first: FirstToken) -> FirstToken:
        if not 0 <= first.token < self.prompts.vocab_size:
            raise OpenAIError(400, f"pdflow: token ids must be below {self.prompts.vocab_size}", param="pdflow")
        return first

    def sampling(self, asked: AnswerOptions, prompt_tokens: int) -> Sampling:
        """Return how the answer's tokens are chosen, and how many there may be. OpenAIError for a prompt that is too
        long."""
        room = self.prompts.context_tokens - prompt_tokens
        # A prompt that is returned alone is computed like any other, and a token that is not returned.
        most = max(1, room if asked.max_tokens is None else asked.max_tokens)
        self.prompts.check_length(prompt_tokens, most)
        return Sampling(
            max_tokens=most,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs,
            constraints=self._constraints(asked) if asked.is_constrained else None,
        )

    def _constraints(self, asked: AnswerOptions) -> Constraints:
        self.prompts.check_token_ids(asked)
        return Constraints(
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            repetition_penalty=asked.repetition_penalty,
            logit_bias=asked.logit_bias,
            allowed=asked.allowed_token_ids,
            bad_words=self.prompts.bad_words(asked.bad_words),
            min_tokens=asked.min_tokens,
        )


def named(request: HttpRequest) -> str:
    """Return the attempt's id, or a new one for a request without. OpenAIError."""
    request_id = (request.header(b"x-request-id") or secrets.token_hex(8).encode()).decode("ascii", "replace")
    if problem := id_problem(request_id):
        raise OpenAIError(400, f"x-request-id: {problem}")
    return request_id


def shown(piece: AnswerPiece, asked: AnswerOptions, returns_token_ids: bool = False) -> AnswerPiece:
    """Return the piece, without its token ids if neither the request nor the router asks for them."""
    return (
        piece
        if asked.return_token_ids or returns_token_ids
        else AnswerPiece(piece.index, piece.text, piece.ending, piece.stop_reason, piece.logprobs)
    )


def scores_of(tokens: list[int], asked: AnswerOptions) -> PromptScores | None:
    """Return where the engine writes the logprobs of the prompt's tokens, if they are wanted."""
    return PromptScores(tokens, asked.logprobs or 0) if asked.scores_prompt else None


def usage_so_far(asked: AnswerOptions, prompt_tokens: int, generated: int) -> Usage | UnsetType:
    """Return the usage for an event of a stream, if each has it."""
    return usage(prompt_tokens, generated) if asked.continuous_usage else UNSET


def ended(code: Code, why: str = "") -> OpenAIError:
    """Return the error for a leg without an answer, with the protocol's code or the engine's own reason."""
    if why:
        return OpenAIError(STATUS[Code.REJECTED], why, code="context_length_exceeded")
    return OpenAIError(STATUS.get(code, 502), f"the request failed: {code.name.lower()}", code=code.name)
