"""A client's request at the router: its content, and the legs of its attempts.

A leg is an HTTP request to an engine, and runs in the nursery of its call: when the client hangs up, all legs are
cancelled. Which attempt streams the answer is decided in `pdflow/routing/answer.py`; its bytes pass as they came. An
answer that another attempt continues is settled first: the legs of that attempt wait until nothing more of the one
before is passed on, and are then sent with the tokens that the client has.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Callable
from itertools import count
from typing import Any, Final, Literal

import msgspec
import trio

from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow.routing.answer import Answer, PieceUse
from pdflow.routing.events import NO_SESSION
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.client import Exchange, HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import JSON, Headers
from pdflow_runtime.http.openai.answers import DONE, ChatAnswer, CompletionAnswer, usage
from pdflow_runtime.http.openai.between import NOTHING, Between, FirstAnswer, FirstToken, GivenTokens
from pdflow_runtime.http.openai.fields import Fields, rewritten
from pdflow_runtime.http.openai.parameters import TRUNCATION
from pdflow_runtime.http.relay import relay
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server_timing import stages_of
from pdflow_runtime.nodes.kv_params import read_decode
from pdflow_runtime.observe.passing_answers import EndedAnswer, TokenIntervals
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.answer_pieces import AnswerPieces
from pdflow_runtime.router.call_record import CallRecord
from pdflow_runtime.router.passed import PassedAnswer
from pdflow_runtime.router.request_traces import LegTrace, RequestTrace
from pdflow_runtime.security.signed import Signer
from pdflow_runtime.security.tls import log_tls_failure

log = logging.getLogger(__name__)

CHAT: Final = "/v1/chat/completions"
INCLUDE_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')
NO_SEED: Final = b"null"
SEEDS: Final = count(secrets.randbits(62))
"""Of answers whose clients give none: a random number for each would be a system call."""
UNCOUNTED: Final = TokenIntervals()
"""For calls of which nobody collects metrics."""
NOT_FOR_ENGINES: Final = ("kv_transfer_params", "prompt_token_ids", "prompt", "messages", "pdflow", *TRUNCATION)
"""Fields that the router sets itself, whatever the client sends (spec 2.12), or has applied already."""


class Call:
    """A client's request. Args: `path` is the API that was asked; `tokens` its prompt; `headers` go along with every
    leg, `answered` with the answer; `begun_ns`: when the request was whole; `intervals`: the times between tokens
    of all answers; `encoded`: the prompt as JSON, which the calls for several answers share."""

    def __init__(
        self,
        path: str,
        fields: Fields,
        tokens: list[int],
        headers: Headers,
        answered: Headers,
        responder: Responder,
        session: int = NO_SESSION,
        one_token: bool = False,
        prompt_alone: bool = False,
        resumes: bool = False,
        begun_ns: Instant | None = None,
        intervals: TokenIntervals = UNCOUNTED,
        encoded: msgspec.Raw | None = None,
    ) -> None:
        self.path: Final = path
        self.fields: Final = fields
        self.tokens: Final = tokens
        self.encoded = encoded
        self.headers: Final = headers
        self.answered: Final = answered
        self.responder: Final = responder
        self.session: Final = session
        self.one_token: Final = one_token
        """Whether only one token is wanted."""
        self.prompt_alone: Final = prompt_alone
        """Whether no token is wanted, or the logprobs of the prompt's tokens: P answers alone."""
        self.streams: Final = bytes(fields.get("stream", b"")) == b"true"
        self.passed: Final = PassedAnswer() if resumes and self.streams else None
        """What the client has received, if another attempt may continue it."""
        self.new_fields: Final[dict[str, Any]] = {}
        """Fields of every leg that brings an answer. All attempts of an answer that may be resumed share a seed."""
        if self.passed is not None and bytes(fields.get("seed", NO_SEED)) == NO_SEED:
            self.new_fields["seed"] = next(SEEDS)
        self.given: tuple[GivenTokens, list[int]] | None = None
        """The beginning of the answer that the attempt under way continues, and its tokens."""
        self.first_token: FirstToken | None = None
        """P's first token, if the answer starts with it."""
        self.number: int
        """The router's number of the request."""
        self.answer: Answer
        """Which attempt streams, and which legs await P's first token."""
        self.decoding: Final[dict[RequestId, EngineAddress]] = {}
        """The engines of the decode legs that may await it."""
        self.report: Callable[[RequestId], None]
        """Called with the attempt that streams, once."""
        self.answering: Final = trio.Lock()
        """Held while an answer is passed on: a leg that was taken back may not have noticed it yet."""
        self.model = ""
        """The name of the model, as answers have it."""
        self.resumed: Callable[[], None] = ignore
        """Called when another attempt is about to continue the answer."""
        self.begun_ns: Final = now_ns() if begun_ns is None else begun_ns
        self.record: Final = CallRecord(prompt_tokens=len(tokens))
        self.trace: RequestTrace | None = None
        self.pieces: Final = AnswerPieces(intervals, self.passed)
        self._settled: tuple[RequestId, Code | None] | None = None
        self.received_all = False
        """True if all of an answer has come that may not have been sent yet."""
        self.over: Final = trio.Event()
        self.nursery: trio.Nursery
        self.refusal: OpenAIError | None = None
        """An engine's error that says that the request itself is at fault."""

    def ended(self) -> EndedAnswer:
        """Return what is known of the answer, of which nothing more is passed on."""
        return self.pieces.ended(chat=self.streams and self.path == CHAT)

    def leg_ended(self, role: Literal["prefill", "decode"], request_id: RequestId) -> None:
        self.answer.leg_ended(role, request_id)
        if role == "decode":
            self.decoding.pop(request_id, None)

    async def settle(self, request_id: RequestId) -> Code | None:
        """Wait until nothing more of the attempts before this one is passed on, which is to continue the answer.
        Returns None if it can; else the answer ends here, and the code says how."""
        async with self.answering:
            if self._settled is None or self._settled[0] != request_id:
                self._settled = request_id, await self._settle()
            return self._settled[1]

    async def _settle(self) -> Code | None:
        if self.answer.over:
            return Code.NONE
        if (code := self.pieces.failure()) is not Code.NONE:
            return code
        if self.received_all:
            if not self.responder.done:
                await self.responder.end()
            return Code.NONE
        given = None if self.passed is None else self.passed.given()
        if self.passed is None or given is None or not self.responder.framing:
            log.warning("an answer cannot be resumed: %s", self._why_not())
            return Code.IO
        if self.passed.finished:
            return await self._finish(self.passed, given)
        self.given = given, self.passed.tokens
        self.record.resumed = True
        self.resumed()
        return None

    async def _finish(self, passed: PassedAnswer, given: GivenTokens) -> Code:
        """End an answer of which the client has the last token: it lacks the usage, if it asked for it, and DONE."""
        last = DONE
        if INCLUDE_USAGE.search(bytes(self.fields.get("stream_options", b""))) and not passed.has_usage:
            answer = (ChatAnswer if "chat" in self.path else CompletionAnswer)("", given.created, self.model)
            answer.name = given.id, given.created
            last = answer.usage_event(usage(len(self.tokens), given.tokens)) + DONE
        if not passed.is_done:
            await self.responder.send(last)
        await self.responder.end()
        return Code.NONE

    def _why_not(self) -> str:
        if not self.streams:
            return "its client does not stream, and has received a part of it"
        if not self.responder.framing:
            return "its client has received an incomplete chunk, or does not understand chunks (HTTP/1.0)"
        return "its engine has named no token ids, or its client has received an incomplete event"

    def prefill_body(self, params: dict[str, Any]) -> bytes:
        """Return the body of a prefill leg that is for KV alone."""
        body = {"prompt_token_ids": self._prompt(), "max_tokens": 1, "kv_transfer_params": params}
        return msgspec.json.encode(body)

    def _prompt(self) -> msgspec.Raw:
        """Return the prompt of a leg as JSON: encoded once for all legs, unless the answer has begun."""
        if self.given is not None:
            return encoded_prompt(self.tokens + self.given[1])
        if self.encoded is None:
            self.encoded = encoded_prompt(self.tokens)
        return self.encoded

    def decode_body(self, params: dict[str, Any] | None, between: Between | None = None) -> bytes:
        """Return the body of a leg for the answer, or for its first token."""
        new_fields: dict[str, Any] = {"prompt_token_ids": self._prompt(), **self.new_fields}
        if params is not None:
            new_fields["kv_transfer_params"] = params
        if self.given is not None:
            between = Between(given=self.given[0])
        if self.passed is not None:
            between = msgspec.structs.replace(between or NOTHING, returns_token_ids=True)
        if between is not None:
            new_fields["pdflow"] = between
        return rewritten(self.fields, drop=NOT_FOR_ENGINES, put=new_fields)


def encoded_prompt(tokens: list[int]) -> msgspec.Raw:
    """Return the prompt as a value in the body of a leg."""
    return msgspec.Raw(msgspec.json.encode(tokens))


def ignore() -> None:
    pass


class Leg:
    """A leg of a call, at one engine. `leg_timeout_s`: for P's answer, or the beginning of D's. Engines keep a
    request's deadline themselves, unless they stand still."""

    def __init__(
        self,
        call: Call,
        client: HttpClient,
        address: EngineAddress,
        request_id: RequestId,
        leg_timeout_s: float,
        signer: Signer,
    ) -> None:
        self.call: Final = call
        self.client: Final = client
        self.address: Final = address
        self.request_id: Final = request_id
        self.leg_timeout_s: Final = leg_timeout_s
        self.signer: Final = signer
        self.headers: Final = (JSON, (b"x-request-id", request_id.encode()), *call.headers)
        self.trace: LegTrace | None = None
        self.code: Code | None = None
        """How it ended; None: it has not, or was cancelled."""

    async def prefill(
        self, body: bytes, method: str, returns_first_token: bool = False
    ) -> tuple[KvParams | None, FirstAnswer | None, Code]:
        """Send the prefill leg; return where P has the KV, and the answer's first token; or the code of why there is
        none."""
        asked = self._asked(self.call.path if returns_first_token else "/v1/completions", body)
        answer = None
        try:
            with trio.move_on_after(self.leg_timeout_s):
                async with asked as response:
                    self.call.record.stages_ms |= stages_of(response.headers)
                    answer = await response.read()
                    if response.status != 200:
                        return None, None, self._refused(response.status, answer)
        except UpstreamError as error:
            log_tls_failure(self.address.engine, error)
            return None, None, Code.UNREACHABLE
        if answer is None:
            return None, None, Code.DEADLINE
        try:
            decoded = msgspec.json.decode(answer, type=Answered)
            params, _ = read_decode(method, decoded.kv_transfer_params)
        except (msgspec.DecodeError, ParamsError):
            return None, None, Code.IO
        if returns_first_token and decoded.pdflow is None:
            return None, None, Code.IO
        self.call.pieces.active.add(self.address.engine)
        return params, decoded.pdflow, Code.NONE

    async def forward(self, first: FirstToken) -> None:
        """Send P's token to a decode leg that waits for it. Without it that leg fails, or is late."""
        try:
            async with self._asked("/first_token", msgspec.json.encode(first)) as response:
                await response.read()
        except UpstreamError as error:
            log.debug("could not send a first token to %s: %s", self.address.engine, error)

    async def decode(self, body: bytes) -> Code | None:
        """Pass the engine's answer on to the client. Returns NONE if all of it was, else why not; None if it is
        dropped."""
        call = self.call
        asked = self._asked(call.path, body)
        try:
            with trio.move_on_after(self.leg_timeout_s) as timeout:
                async with asked as response:
                    timeout.deadline = math.inf
                    if response.status != 200:
                        return self._refused(response.status, await response.read())
                    piece = call.answer.piece_arrived(self.request_id)
                    if piece is PieceUse.DROP:
                        return None
                    call.record.stages_ms |= stages_of(response.headers)
                    if piece is PieceUse.FIRST:
                        call.report(self.request_id)
                    call.answering.acquire_nowait()
                    call.pieces.sent_by(self.address.engine)
                    try:
                        await relay(response, call.responder, call.answered, call.pieces.add)
                    finally:
                        # What is decoded for a client of HTTP/1.0 waits outside of the responder until it is sent.
                        call.received_all = response.complete and (call.responder.done or call.responder.chunked_ok)
                        call.answering.release()
        except UpstreamError as error:
            log_tls_failure(self.address.engine, error)
            return Code.UNREACHABLE
        if timeout.cancelled_caught:
            return Code.DEADLINE
        code = call.pieces.failure()
        if code is Code.NONE:
            call.answer.whole(self.request_id)
        return code

    def _asked(self, path: str, body: bytes) -> Exchange:
        at = self.address.http
        incarnation = self.address.incarnation
        headers = self.headers if self.trace is None else (*self.headers, *self.trace.headers)
        signed = self.signer.sign(self.address.engine, "POST", path, body, headers, incarnation)
        return self.client.request("POST", at.host, at.port, path, (*headers, *signed), body)

    def _refused(self, status: int, answer: bytes) -> Code:
        """Return the code of an engine's error; where the request is at fault, the client gets the engine's message."""
        error = OpenAIError.from_response(status, answer)
        if error is None:
            return Code.IO
        if status == 401:
            log.error("%s rejected a request of this router: %s", self.address.engine, error)
            return Code.UNREACHABLE
        if status == 409:
            # Its connection broke while it was asked, and was asked anew: that attempt is there, and is let go of.
            return Code.UNREACHABLE
        if status < 500:
            self.call.refusal = error
            return Code.REJECTED
        return Code.__members__.get(str(error.code), Code.IO)


class Answered(msgspec.Struct, frozen=True):
    kv_transfer_params: Any = None
    pdflow: FirstAnswer | None = None
