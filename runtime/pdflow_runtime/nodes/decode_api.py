"""A decode engine's half of a request over HTTP: it generates from KV that a prefill engine has or will have.

Asked without kv_transfer_params, it computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
import trio

from pdflow_runtime.engines.job import Token
from pdflow_runtime.engines.sampling.logprobs import Logprobs
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON, HttpRequest
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, usage
from pdflow_runtime.http.openai.between import Between, FirstToken
from pdflow_runtime.http.openai.fields import decoded
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server_timing import server_timing
from pdflow_runtime.nodes.decode_node import DecodeLeg, LiveDecodeNode
from pdflow_runtime.nodes.engine_api import EngineApi, LegAsked, ended, named, scores_of, shown, usage_so_far
from pdflow_runtime.nodes.kv_params import Coordinates, read_decode
from pdflow_runtime.router.answer_text import AnswerText
from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.security.signed import Gate

_first: Final = msgspec.json.Decoder(FirstToken)


class FirstToCome:
    """P's token and the decode leg that waits for it: either may be here first."""

    def __init__(self, first: FirstToken | None = None) -> None:
        self.first = first
        self.leg: DecodeLeg | None = None
        self.leg_arrived: Final = trio.Event()


class DecodeApi(EngineApi[LiveDecodeNode]):
    """The HTTP API of a decode engine. Args: as EngineApi's."""

    def __init__(
        self,
        node: LiveDecodeNode,
        prompts: Prompts,
        method: str,
        here: Coordinates,
        gate: Gate,
        stop: Callable[[], None],
    ) -> None:
        super().__init__(node, prompts, method, here, gate, stop)
        self.to_come: dict[str, FirstToCome] = {}
        """Tokens and legs that wait for each other, by the id of the attempt."""

    async def answered_besides(self, request: HttpRequest, responder: Responder) -> bool:
        if (request.method, request.path) != ("POST", "/first_token"):
            return False
        await self._receive_first_token(request, responder)
        return True

    async def _receive_first_token(self, request: HttpRequest, responder: Responder) -> None:
        """Receive the first token of an attempt from P; the decode leg may be here already, or come later."""
        first = self.checked(decoded(_first, request.body))
        request_id = named(request)
        pair = self.to_come.setdefault(request_id, FirstToCome())
        pair.first = first
        try:
            if pair.leg is None:
                await pair.leg_arrived.wait()
            else:
                self.node.set_first_token(pair.leg, first.token)
        finally:
            if pair.leg is None:
                del self.to_come[request_id]
        await responder.reply(200, (JSON,), b"{}")

    async def complete(self, asked: LegAsked, responder: Responder) -> None:
        request_id, tokens, node = asked.request_id, asked.tokens, self.node
        between = self.between(asked)
        given = between.given_tokens
        sampling = self.sampling(asked.asked, len(tokens) - given)
        pair = FirstToCome(between.first)
        first = None if between.first is None else between.first.token
        if asked.body.kv_transfer_params is None:
            leg = node.begin_alone(request_id, tokens, sampling, first, given, scores=scores_of(tokens, asked.asked))
        elif asked.asked.scores_prompt:
            raise OpenAIError(
                400, "echo: with logprobs, only the engine that computes the prompt answers", param="echo"
            )
        else:
            params, at = read_decode(self.method, asked.body.kv_transfer_params)
            await node.links.update_address(params.prefill.engine, at.host, at.port)
            leg = node.begin(request_id, params, tokens, sampling, first, between.first_follows, given)
            if between.first_follows:
                pair = self.to_come.setdefault(request_id, pair)
                pair.leg = leg
                pair.leg_arrived.set()
                if pair.first is not None:
                    node.set_first_token(leg, pair.first.token)
        self.traced(asked, leg.begun_ns)
        try:
            async with aclosing(self._pieces(leg, asked.asked, pair, given)) as pieces:
                if asked.asked.stream:
                    await self._stream(pieces, leg, pair, asked, between, responder)
                else:
                    await self._whole(pieces, leg, asked, responder)
        finally:
            if between.first_follows:
                del self.to_come[request_id]
            node.abort(leg)

    async def _stream(
        self,
        pieces: AsyncIterator[AnswerPiece],
        leg: DecodeLeg,
        pair: FirstToCome,
        whole: LegAsked,
        between: Between,
        responder: Responder,
    ) -> None:
        asked, answer, returns_token_ids = whole.asked, whole.answer, between.returns_token_ids
        given = between.given_tokens
        if between.given is not None:
            answer.name = between.given.id, between.given.created
        generated = 0
        async for piece in pieces:
            generated += len(piece.token_ids or ())
            if generated == 1 and pair.first is not None:
                answer.name = pair.first.id, pair.first.created
            if 0 < generated <= given or (generated == 1 and pair.first is not None):
                # The client has this, from P or from another D.
                answer.event(shown(piece, asked))
                continue
            used = usage_so_far(asked, len(whole.tokens) - given, generated)
            if not responder.begun:
                await responder.begin(200, (EVENT_STREAM, *server_timing(leg.stages_ns)))
            await responder.send(answer.event(shown(piece, asked, returns_token_ids), used))
        last = answer.usage_event(usage(len(whole.tokens) - given, generated)) if asked.include_usage else b""
        await responder.send(last + DONE)
        await responder.end()

    async def _whole(
        self,
        pieces: AsyncIterator[AnswerPiece],
        leg: DecodeLeg,
        whole: LegAsked,
        responder: Responder,
    ) -> None:
        asked, answer = whole.asked, whole.answer
        collected = [piece async for piece in pieces]
        token_ids = [token for piece in collected for token in piece.token_ids or ()]
        logprobs = [entry for piece in collected for entry in piece.logprobs or ()]
        last = collected[-1]
        piece = AnswerPiece(
            0,
            "".join(piece.text for piece in collected),
            last.ending,
            last.stop_reason,
            None if last.logprobs is None else logprobs,
            token_ids,
        )
        done = answer.whole([shown(piece, asked)], usage(len(whole.tokens), len(token_ids)))
        await responder.reply(200, (JSON, *server_timing(leg.stages_ns)), done)

    async def _pieces(
        self, leg: DecodeLeg, asked: AnswerOptions, pair: FirstToCome, given: int
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield a piece of the answer for each token, those of P and of another D included. OpenAIError if the leg ends
        without its last token."""
        prompt = leg.prompt[: len(leg.prompt) - given]
        answer_text = AnswerText(self.prompts, asked, prompt, leg.job.scores)
        before = True
        for token in leg.prompt[len(leg.prompt) - given :]:
            # Logprobs without values: the client has them, and the text of each token counts.
            yield answer_text.piece(token, None if asked.logprobs is None else Logprobs(0.0, ()), None)
        async for item in leg.receive_channel:
            if not isinstance(item, Token):
                raise ended(item, leg.why)
            if before and pair.first is not None:
                first = pair.first
                logprobs = None if first.logprob is None else Logprobs(first.logprob, first.top)
                yield answer_text.piece(first.token, logprobs, None)
            before = False
            piece = answer_text.piece(item.token, item.logprobs, item.ending)
            yield piece
            if piece.ending is not None:
                return
