"""What an engine answers over HTTP: OpenAI's API, with kv_transfer_params for the half of a request that it is to do.

A prefill engine computes a prompt and says how its KV is to be had; a decode engine generates from such KV, or, asked
without parameters, from a prompt that it computes itself. Hanging up is how a leg is taken back. Only routers ask here:
what a client says of KV transfers never comes so far.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
import trio

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.messages import Code
from pdflow.protocol.wire.checks import id_problem
from runtime.clock import wall_s
from runtime.decode_node import DecodeLeg, DecodeNode
from runtime.engine_node import EngineNode
from runtime.engines.job import Logprobs, Sampling, Token
from runtime.http.errors import OpenAIError
from runtime.http.messages import EVENT_STREAM, JSON, Request
from runtime.http.openai.answers import DONE, Answer, ChatAnswer, CompletionAnswer, Piece, error_event, usage
from runtime.http.openai.between import Between, FirstAnswer, FirstToken, read_between
from runtime.http.openai.chat import ChatRequest, read_chat
from runtime.http.openai.completion import CompletionRequest, read_completion
from runtime.http.openai.fields import decoded
from runtime.http.openai.models import ModelCard, model_not_found, models_body
from runtime.http.openai.sampling import Asked
from runtime.http.responder import Responder
from runtime.kv_params import Coordinates, decode_json, read_decode, read_prefill, read_stores
from runtime.part_api import PartApi
from runtime.prefill_node import PrefillLeg, PrefillNode
from runtime.prompts import Prompts
from runtime.signed import Gate
from runtime.state import EngineState, state_of
from runtime.store_prefill_node import StorePrefillNode
from runtime.words import Words

STATUS: Final = {
    Code.REJECTED: 400,
    Code.DEADLINE: 504,
    Code.UNREACHABLE: 503,
    Code.PEER_DEAD: 503,
    Code.PEER_RESTARTED: 503,
}
"""Of a leg that ended without an answer; any other cause is a 502."""
_first: Final = msgspec.json.Decoder(FirstToken)


class FirstToCome:
    """P's token and the decode leg that waits for it: either may be here first."""

    def __init__(self, first: FirstToken | None = None) -> None:
        self.first = first
        self.leg: DecodeLeg | None = None
        self.met: Final = trio.Event()


class EngineApi(PartApi):
    """Args: method is the scenario's; `here` is where this engine's ranks hear; `gate` says whom to believe; `stop`
    ends this engine when what it has is done."""

    def __init__(
        self,
        node: EngineNode,
        prompts: Prompts,
        method: str,
        here: Coordinates,
        gate: Gate,
        stop: Callable[[], None],
    ) -> None:
        super().__init__(node, gate, stop)
        self.node: Final = node
        self.prompts: Final = prompts
        self.method: Final = method
        self.here: Final = here
        self.started_s: Final = wall_s()
        self.to_come: dict[str, FirstToCome] = {}
        """By the id of the attempt."""

    def state(self) -> EngineState:
        return state_of(self.node)

    async def __call__(self, request: Request, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except OpenAIError as error:
            if responder.begun:
                await responder.send(error_event(error) + DONE)
                await responder.end()
            else:
                await responder.reply(error.status, (JSON,), error.body())

    async def _answer(self, request: Request, responder: Responder) -> None:
        if await self.operated(request, responder):
            return
        match request.method, request.path:
            case "GET", "/v1/models":
                card = ModelCard(
                    id=self.prompts.model, created=self.started_s, max_model_len=self.prompts.context_tokens
                )
                await responder.reply(200, (JSON,), models_body([card]))
            case "POST", "/v1/completions":
                asked = read_completion(request.body)
                await self._complete(request, asked, self.prompts.of_completion(asked), CompletionAnswer, responder)
            case "POST", "/v1/chat/completions":
                chat = read_chat(request.body)
                await self._complete(request, chat, self.prompts.of_chat(chat), ChatAnswer, responder)
            case "POST", "/first_token" if isinstance(self.node, DecodeNode):
                await self._hear_first(self.node, request, responder)
            case _:
                raise OpenAIError(404, f"there is no {request.method} {request.path} here")

    async def _complete(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        tokens: list[int],
        form: type[CompletionAnswer] | type[ChatAnswer],
        responder: Responder,
    ) -> None:
        if asked.model is not None and asked.model != self.prompts.model:
            raise model_not_found(asked.model)
        if asked.asked.n > 1:
            raise OpenAIError(400, "n: an engine gives one answer; the router asks for each", param="n")
        request_id = named(request)
        answer = form(request_id, wall_s(), self.prompts.model)
        try:
            if isinstance(self.node, PrefillNode):
                await self._prefill(self.node, request_id, asked, tokens, answer, responder)
            elif isinstance(self.node, DecodeNode):
                await self._decode(self.node, request_id, asked, tokens, answer, responder)
        except ParamsError as error:
            raise OpenAIError(400, f"kv_transfer_params: {error}", param="kv_transfer_params") from None
        except KeyError as error:
            raise OpenAIError(409, str(error.args[0])) from None

    async def _prefill(
        self,
        node: PrefillNode,
        request_id: str,
        asked: CompletionRequest | ChatRequest,
        tokens: list[int],
        answer: Answer,
        responder: Responder,
    ) -> None:
        if asked.kv_transfer_params is None:
            await self._prefill_alone(node, request_id, asked.asked, tokens, answer, responder)
            return
        between = self._between(asked)
        self.prompts.check_length(len(tokens), 1)
        xid = read_prefill(self.method, asked.kv_transfer_params)
        if isinstance(node, StorePrefillNode):
            node.stores = read_stores(self.method, asked.kv_transfer_params)
        sampling = self._sampling(asked.asked, len(tokens)) if between.tells_first else None
        leg = node.begin(request_id, xid, tokens, sampling)
        try:
            await leg.answered.wait()
        finally:
            if not leg.answered.is_set():
                node.abort(leg)
        if leg.params is None:
            raise ended(leg.code, leg.why)
        params = decode_json(leg.params, leg.at or self.here, self.method)
        if between.tells_first:
            first = self._first_answer(leg, asked.asked, answer)
            if first.ends and not between.decodes:
                node.withdraw(leg.xid)
            done = msgspec.json.encode({"kv_transfer_params": params, "pdflow": first})
        else:
            done = answer.whole([Piece(0, "", "length")], usage(len(tokens), 0), params)
        await responder.reply(200, (JSON,), done)

    def _first_answer(self, leg: PrefillLeg, asked: Asked, answer: Answer) -> FirstAnswer:
        """The beginning of an answer that goes on elsewhere, if it does."""
        token = leg.token
        assert token is not None, "it was to be told"
        piece = Words(self.prompts, asked).piece(token.token, token.logprobs, token.ending)
        ends = piece.ending is not None
        used = usage(len(leg.job.tokens), 1)
        if asked.stream:
            said = answer.event(shown(piece, asked))
            if ends:
                said += (answer.usage_event(used) if asked.include_usage else b"") + DONE
        else:
            said = answer.whole([shown(piece, asked)], used) if ends else b""
        if ends:
            self.node.diary.generated(leg.request_id, 1)
        top = () if token.logprobs is None else token.logprobs.top
        chosen = None if token.logprobs is None else token.logprobs.chosen
        return FirstAnswer(FirstToken(token.token, *answer.name, chosen, top), said.decode(), ends)

    async def _prefill_alone(
        self,
        node: PrefillNode,
        request_id: str,
        asked: Asked,
        tokens: list[int],
        answer: Answer,
        responder: Responder,
    ) -> None:
        """One token is wanted, which is P's: there is nothing to decode."""
        if asked.max_tokens != 1:
            raise OpenAIError(400, "this engine computes prompts for others: kv_transfer_params is missing")
        leg = node.begin_alone(request_id, tokens, self._sampling(asked, len(tokens)))
        try:
            await leg.answered.wait()
        finally:
            if not leg.answered.is_set():
                node.abort(leg)
        if leg.code is not Code.NONE:
            raise ended(leg.code, leg.why)
        said = self._first_answer(leg, asked, answer).said.encode()
        await responder.reply(200, (EVENT_STREAM if asked.stream else JSON,), said)

    async def _hear_first(self, node: DecodeNode, request: Request, responder: Responder) -> None:
        """P has told the first token of an attempt whose decode leg is here, or on its way."""
        first = self._checked(decoded(_first, request.body))
        request_id = named(request)
        pair = self.to_come.setdefault(request_id, FirstToCome())
        pair.first = first
        try:
            if pair.leg is None:
                await pair.met.wait()
            else:
                node.tell_first(pair.leg, first.token)
        finally:
            if pair.leg is None:
                del self.to_come[request_id]
        await responder.reply(200, (JSON,), b"{}")

    def _between(self, asked: CompletionRequest | ChatRequest) -> Between:
        between = read_between(asked.pdflow)
        if between.first is not None:
            self._checked(between.first)
        return between

    def _checked(self, first: FirstToken) -> FirstToken:
        if not 0 <= first.token < self.prompts.vocab_size:
            raise OpenAIError(400, f"pdflow: the model has token ids below {self.prompts.vocab_size}", param="pdflow")
        return first

    async def _decode(
        self,
        node: DecodeNode,
        request_id: str,
        asked: CompletionRequest | ChatRequest,
        tokens: list[int],
        answer: Answer,
        responder: Responder,
    ) -> None:
        sampling = self._sampling(asked.asked, len(tokens))
        between = self._between(asked)
        pair = FirstToCome(between.first)
        first = None if between.first is None else between.first.token
        if asked.kv_transfer_params is None:
            leg = node.begin_alone(request_id, tokens, sampling, first)
        else:
            params, at = read_decode(self.method, asked.kv_transfer_params)
            await node.links.learn(params.prefill.engine, at.host, at.port)
            leg = node.begin(request_id, params, tokens, sampling, first, between.first_follows)
            if between.first_follows:
                pair = self.to_come.setdefault(request_id, pair)
                pair.leg = leg
                pair.met.set()
                if pair.first is not None:
                    node.tell_first(leg, pair.first.token)
        tell = self._stream if asked.asked.stream else self._whole
        try:
            async with aclosing(self._pieces(leg, asked.asked, pair)) as pieces:
                await tell(pieces, pair, len(tokens), asked.asked, answer, responder)
        finally:
            if between.first_follows:
                del self.to_come[request_id]
            node.abort(leg)

    def _sampling(self, asked: Asked, prompt_tokens: int) -> Sampling:
        room = self.prompts.context_tokens - prompt_tokens
        most = max(1, room) if asked.max_tokens is None else asked.max_tokens
        self.prompts.check_length(prompt_tokens, most)
        return Sampling(
            max_tokens=most,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs,
        )

    async def _stream(
        self,
        pieces: AsyncIterator[Piece],
        pair: FirstToCome,
        prompt_tokens: int,
        asked: Asked,
        answer: Answer,
        responder: Responder,
    ) -> None:
        generated = 0
        async for piece in pieces:
            generated += len(piece.token_ids or ())
            if generated == 1 and pair.first is not None:
                # The client has this from P.
                answer.name = pair.first.id, pair.first.created
                answer.event(shown(piece, asked))
                continue
            if not responder.begun:
                await responder.begin(200, (EVENT_STREAM,))
            await responder.send(answer.event(shown(piece, asked)))
        last = answer.usage_event(usage(prompt_tokens, generated)) if asked.include_usage else b""
        await responder.send(last + DONE)
        await responder.end()

    async def _whole(
        self,
        pieces: AsyncIterator[Piece],
        pair: FirstToCome,
        prompt_tokens: int,
        asked: Asked,
        answer: Answer,
        responder: Responder,
    ) -> None:
        parts = [piece async for piece in pieces]
        token_ids = [token for piece in parts for token in piece.token_ids or ()]
        logprobs = [entry for piece in parts for entry in piece.logprobs or ()]
        last = parts[-1]
        piece = Piece(
            0,
            "".join(part.text for part in parts),
            last.ending,
            last.stop_reason,
            None if last.logprobs is None else logprobs,
            token_ids,
        )
        done = answer.whole([shown(piece, asked)], usage(prompt_tokens, len(token_ids)))
        await responder.reply(200, (JSON,), done)

    async def _pieces(self, leg: DecodeLeg, asked: Asked, pair: FirstToCome) -> AsyncGenerator[Piece, None]:
        """One for each token, that of P included. OpenAIError if the leg ends without its last one."""
        words = Words(self.prompts, asked)
        before = True
        async for said in leg.said:
            if not isinstance(said, Token):
                raise ended(said, leg.why)
            if before and pair.first is not None:
                first = pair.first
                logprobs = None if first.logprob is None else Logprobs(first.logprob, first.top)
                yield words.piece(first.token, logprobs, None)
            before = False
            piece = words.piece(said.token, said.logprobs, said.ending)
            yield piece
            if piece.ending is not None:
                return


def named(request: Request) -> str:
    """The attempt's id; one of our own for whoever says none. OpenAIError."""
    request_id = (request.header(b"x-request-id") or secrets.token_hex(8).encode()).decode("ascii", "replace")
    if problem := id_problem(request_id):
        raise OpenAIError(400, f"x-request-id: {problem}")
    return request_id


def shown(piece: Piece, asked: Asked) -> Piece:
    """Token ids are told to whoever asked for them."""
    return (
        piece
        if asked.return_token_ids
        else Piece(piece.index, piece.text, piece.ending, piece.stop_reason, piece.logprobs)
    )


def ended(code: Code, why: str = "") -> OpenAIError:
    """A leg that had no answer, with the protocol's word for why, or the engine's own."""
    if why:
        return OpenAIError(STATUS[Code.REJECTED], why, code="context_length_exceeded")
    return OpenAIError(STATUS.get(code, 502), f"no answer: {code.name.lower()}", code=code.name)
