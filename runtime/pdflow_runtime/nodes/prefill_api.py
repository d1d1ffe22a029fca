"""The HTTP API of a prefill engine: it computes the prompt, and answers with where its KV can be had."""

from __future__ import annotations

import msgspec

from pdflow.protocol.messages import Code
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, usage
from pdflow_runtime.http.openai.between import FirstAnswer, FirstToken
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server_timing import server_timing
from pdflow_runtime.nodes.engine_api import EngineApi, LegAsked, ended, scores_of, shown, usage_so_far
from pdflow_runtime.nodes.kv_params import decode_json, read_prefill
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg, LivePrefillNode
from pdflow_runtime.router.answer_text import AnswerText


class PrefillApi(EngineApi[LivePrefillNode]):
    """The HTTP API of a prefill engine. Args: as EngineApi's."""

    async def complete(self, asked: LegAsked, responder: Responder) -> None:
        tokens, node = asked.tokens, self.node
        if asked.body.kv_transfer_params is None:
            await self._alone(asked, responder)
            return
        between = self.between(asked)
        self.prompts.check_length(len(tokens), 1)
        request_params = read_prefill(self.method, asked.body.kv_transfer_params)
        node.update_stores(request_params.stores)
        sampling = self.sampling(asked.asked, len(tokens)) if between.returns_first_token else None
        leg = node.begin(asked.request_id, request_params.xid, tokens, sampling)
        self.traced(asked, leg.begun_ns)
        try:
            await leg.answered.wait()
        finally:
            if not leg.answered.is_set():
                node.abort(leg)
        if leg.params is None:
            raise ended(leg.code, leg.why)
        params = decode_json(leg.params, leg.at or self.here, self.method)
        if between.returns_first_token:
            first = self._first_answer(leg, asked)
            if first.ends and not between.decodes:
                node.withdraw(leg.xid)
            done = msgspec.json.encode({"kv_transfer_params": params, "pdflow": first})
        else:
            done = asked.answer.whole([AnswerPiece(0, "", "length")], usage(len(tokens), 0), params)
        await responder.reply(200, (JSON, *server_timing(leg.stages_ns)), done)

    def _first_answer(self, leg: LivePrefillLeg, whole: LegAsked) -> FirstAnswer:
        """Return the first token and the beginning of the answer, which goes on at D unless this token ends it."""
        asked, answer = whole.asked, whole.answer
        token = leg.token
        assert token is not None, "the prefill returned no first token"
        text = AnswerText(self.prompts, asked, leg.job.tokens, leg.job.scores)
        piece = text.piece(token.token, token.logprobs, token.ending)
        ends = piece.ending is not None
        generated = len(piece.token_ids or ())
        used = usage(len(leg.job.tokens), generated)
        if asked.stream:
            body = answer.event(shown(piece, asked), usage_so_far(asked, len(leg.job.tokens), generated))
            if ends:
                body += (answer.usage_event(used) if asked.include_usage else b"") + DONE
        else:
            body = answer.whole([shown(piece, asked)], used) if ends else b""
        if ends:
            self.node.event_log.generated(leg.request_id, generated)
        top = () if token.logprobs is None else token.logprobs.top
        chosen = None if token.logprobs is None else token.logprobs.chosen
        return FirstAnswer(FirstToken(token.token, *answer.name, chosen, top), body.decode(), ends)

    async def _alone(self, whole: LegAsked, responder: Responder) -> None:
        """Answer a request for one token: P computes it, and there is nothing to decode."""
        asked, tokens, node = whole.asked, whole.tokens, self.node
        if asked.max_tokens not in (0, 1):
            raise OpenAIError(
                400, "kv_transfer_params: is missing; a prefill engine without it answers max_tokens = 0 or 1 only"
            )
        scores = scores_of(tokens, asked)
        leg = node.begin_alone(whole.request_id, tokens, self.sampling(asked, len(tokens)), scores)
        self.traced(whole, leg.begun_ns)
        try:
            await leg.answered.wait()
        finally:
            if not leg.answered.is_set():
                node.abort(leg)
        if leg.code is not Code.NONE:
            raise ended(leg.code, leg.why)
        text = self._first_answer(leg, whole).text.encode()
        kind = EVENT_STREAM if asked.stream else JSON
        await responder.reply(200, (kind, *server_timing(leg.stages_ns)), text)
