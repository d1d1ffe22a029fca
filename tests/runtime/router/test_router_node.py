"""The live router and engines that come and go: what is taken back stays so, and what a client has heard is not begun
anew."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.messages import Code
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice
from pdflow.routing.router import Dispatch
from pdflow.routing.stalls import StallRule
from pdflow.routing.watching import WatchingRouter
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON, STEPS, HttpRequest
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, CompletionAnswer, error_event, usage
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import Server
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import ByteTokens
from pdflow_runtime.process.addresses import EngineAddress, EngineGone
from pdflow_runtime.router.admin import Admin
from pdflow_runtime.router.call import Call
from pdflow_runtime.router.front import Front
from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.router.router_node import LiveRouterNode
from pdflow_runtime.security.signed import Gate
from tests.runtime.http.world import LOCAL, serving

ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NO_LIMITS = AdmissionLimits()
ASK = msgspec.json.encode({"prompt": "x", "max_tokens": 4, "stream": True})


class Town:
    """A router in front of engines that begin answers, if at all, and end none."""

    def __init__(
        self,
        leg_timeout_s: float = math.inf,
        silence_ns: int | None = None,
        stores: Sequence[str] = (),
        hedge_after_ns: int | None = None,
        dispatch: Dispatch = "concurrent",
        returns_first_token: bool = False,
        resumes: bool = False,
        admission: AdmissionLimits = NO_LIMITS,
        stall: StallRule | None = None,
    ) -> None:
        infos = {name: EngineInfo(name, Shards(1, 1, 16)) for name in ENGINES}
        prefill, decode = ([infos[f"{role}-{number}"] for number in (0, 1)] for role in ("prefill", "decode"))
        self.client = HttpClient()
        choices = Choice("round-robin", 2), Choice("round-robin", 2)
        rules = Rules(admission, silence_ns=silence_ns, stall=stall)
        router_args = (tuple(prefill), tuple(decode), dispatch, choices, rules, 2)
        if hedge_after_ns is None:
            kind = GovernedRouter if stall is None else WatchingRouter
            router = kind(*router_args, resumes=resumes)
        else:
            router = HedgingRouter(*router_args, hedge_after_ns=hedge_after_ns)
        options = {"stores": stores, "returns_first_token": returns_first_token}
        node_args = (router, prefill, decode, "nixl-push", self.client, leg_timeout_s)
        self.node = LiveRouterNode(*node_args, **options, model="tiny")
        prompts = Prompts("tiny", ByteTokens(), 512, 4096)
        self.front = Front(self.node, prompts, Admin(self.node, [], None), Gate(None, "router"))
        self.up = [router.prefill_choice.up, router.decode_choice.up]
        self.answer_pieces: dict[str, list[bytes]] = {}
        """Whole answers, in pieces, by the engine that gives them."""
        self.ends_answers = True
        """Whether engines end the answers that they have given in pieces."""
        self.replies: dict[str, list[tuple[int, bytes]]] = {}
        """Whole answers that are none of a client's, by the engine that gives them, one to each request."""
        self.asked: list[str] = []
        """Engines that were, in order."""
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        """What they were asked."""
        self.left: list[str] = []
        """Engines that were hung up on, in order."""
        self.pages: dict[str, bytes | None] = {}
        """The metrics of an engine; None: it does not answer."""
        self.pages_asked = 0
        self.steps: bytes | None = None
        """How many steps every engine says that it has run."""
        self.stopped: list[str] = []
        """Engines that were told to end."""
        self.addresses: dict[str, EngineAddress] = {}
        self.servers: dict[str, Server] = {}
        self.port = 0
        """Where clients ask."""

    def turn(self) -> None:
        self.node.turn(now_ns())

    async def ask(self) -> None:
        """A client that waits for the end of its answer."""
        async with self.client.request("POST", LOCAL, self.port, "/v1/completions", (JSON,), ASK) as response:
            await response.read()


@asynccontextmanager
async def town(*streaming: str, **options: Any) -> AsyncIterator[Town]:
    """`streaming` are engines that begin to answer. The router's node takes no turn but those that it is given."""
    built = Town(**options)

    async def engine(name: str, nursery: trio.Nursery) -> None:
        async def answer(request: HttpRequest, responder: Responder) -> None:
            if request.path == "/stop":
                built.stopped.append(name)
            if request.path == "/metrics":
                built.pages_asked += 1
                if (page := built.pages.get(name)) is None:
                    await trio.sleep_forever()
                await responder.reply(200, (), page)
                return
            if request.method == "GET" or request.path == "/stop":
                await responder.reply(200, () if built.steps is None else ((STEPS, built.steps),))
                return
            built.asked.append(name)
            built.bodies.setdefault(name, []).append(msgspec.json.decode(request.body))
            if built.replies.get(name):
                status, body = built.replies[name].pop(0)
                await responder.reply(status, (JSON,), body)
                return
            if name in streaming or name in built.answer_pieces:
                await responder.begin(200, (EVENT_STREAM,))
                for piece in built.answer_pieces.get(name, [b"data: {}\n\n"]):
                    await responder.send(piece)
                    await trio.sleep(0.01)
            if name in built.answer_pieces and built.ends_answers:
                await responder.end()
                return
            try:
                await trio.sleep_forever()
            finally:
                built.left.append(name)

        async with serving(answer) as server:
            here = Coordinates(LOCAL, server.port)
            built.servers[name], built.addresses[name] = server, EngineAddress(name, here, here)
            built.node.members.apply_report(built.addresses[name])
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for name in ENGINES:
            nursery.start_soon(engine, name, nursery)
        await trio.testing.wait_all_tasks_blocked()
        built.turn()
        async with serving(built.front, ended=built.front.ended) as server:
            built.port = server.port
            yield built
        nursery.cancel_scope.cancel()
    built.client.close()


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.05)


@pytest.mark.trio
async def test_a_leg_that_is_taken_back_before_its_first_turn_is_never_asked_for() -> None:
    """D dies as the request comes: P of that attempt would compute for nobody, and hold what it has for a lease."""
    async with town() as built, trio.open_nursery() as nursery:
        nursery.start_soon(built.ask)
        await settled()
        built.node.members.apply_report(EngineGone("decode-0"))
        built.turn()
        await settled()
        assert sorted(built.asked) == ["decode-1", "prefill-1"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lost", [("prefill-0",), ("prefill-0", "prefill-1"), ("decode-0",)])
@pytest.mark.trio
async def test_an_answer_that_has_started_to_stream_is_not_retried(
    lost: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """P dies, its own answer not there yet, when D speaks already, with or without another P to try; or D dies."""
    async with town("decode-0", "decode-1") as built:
        ended = trio.Event()
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await exchange_one_request(built))
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settled()
            built.turn()
            await settled()
            assert sorted(built.asked) == ["decode-0", "prefill-0"]
            for name in lost:
                built.node.members.apply_report(EngineGone(name))
            built.turn()
            with trio.fail_after(5):
                await ended.wait()
        assert "decode-1" not in built.asked
        # The stream ends with the error, although its leg was taken back and did not break.
        assert answers[0].count(b"data: {}") == 1
        assert answers[0].endswith(DONE + b"\r\n0\r\n\r\n")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("order", ["the death first", "the token first"])
@pytest.mark.trio
async def test_a_token_and_the_death_of_its_engine_in_one_turn(order: str) -> None:
    """Whichever the router's endpoint is told first: no client receives two beginnings, and each one an end."""
    async with town("decode-0", "decode-1") as built, trio.open_nursery() as nursery:
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await exchange_one_request(built))

        nursery.start_soon(ask)
        await settled()
        built.turn()
        if order == "the death first":
            # The legs have been asked, and the answer begins to pass while the news waits in the queue.
            built.node.members.apply_report(EngineGone("decode-0"))
        await settled()
        if order == "the token first":
            built.node.members.apply_report(EngineGone("decode-0"))
        for _ in range(4):
            built.turn()
            await settled()
        assert len(answers) == 1
        assert answers[0].count(b"data: {}") == 1
        outcomes = [counted(built, "failed", code) for code in ("peer_dead", "io")]
        assert outcomes == [0, 1] if order == "the death first" else [1, 0]
        assert not built.node.router.attempts


@pytest.mark.trio
async def test_a_client_that_does_not_stream_has_received_nothing_before_the_end() -> None:
    """So its request is tried again, whatever D had computed of it."""
    async with town() as built, trio.open_nursery() as nursery:
        whole = msgspec.json.encode({"text": "a"})
        built.replies["decode-0"] = [(503, b"{}")]
        built.replies["decode-1"] = [(200, whole)]
        ask = msgspec.json.encode({"prompt": "x", "max_tokens": 4})
        answers: list[bytes] = []

        async def asking() -> None:
            async with built.client.request("POST", LOCAL, built.port, "/v1/completions", (JSON,), ask) as response:
                answers.append(await response.read())

        nursery.start_soon(asking)
        for _ in range(5):
            await settled()
            built.turn()
        assert answers == [whole]
        assert counted(built, "completed", "none") == 1


@pytest.mark.trio
async def test_a_drained_engine_stays_drained_after_a_restart() -> None:
    async with town() as built:
        built.front.admin.change("prefill-1", False)
        built.node.members.apply_report(EngineGone("prefill-1"))
        built.node.members.apply_report(built.addresses["prefill-1"])
        built.turn()
        assert built.up == [[True, False], [True, True]]
        built.front.admin.change("prefill-1", True)
        built.turn()
        assert built.up == [[True, True], [True, True]]


@pytest.mark.trio
async def test_connections_to_an_engine_that_is_gone_are_not_kept() -> None:
    async with town() as built:
        at = built.addresses["decode-0"].http
        async with built.client.request("GET", at.host, at.port, "/health") as response:
            await response.read()
        assert len(built.servers["decode-0"].connections) == 1
        built.node.members.apply_report(EngineGone("decode-0"))
        await settled()
        assert not built.servers["decode-0"].connections


@pytest.mark.trio
async def test_engines_that_stand_still_are_waited_for_as_long_as_a_request_may_last() -> None:
    """A stopped process keeps its connections, and would never answer: the next attempt goes elsewhere."""
    async with town(leg_timeout_s=0.2) as built, trio.open_nursery() as nursery:
        nursery.start_soon(built.ask)
        await settled()
        built.turn()
        await settled()
        assert sorted(built.asked) == ["decode-0", "prefill-0"]
        await trio.sleep(0.4)
        built.turn()
        await settled()
        assert sorted(built.asked[2:]) == ["decode-1", "prefill-1"]
        nursery.cancel_scope.cancel()


def counted(built: Town, outcome: str, code: str) -> float:
    """Requests that ended so."""
    labels = {"outcome": outcome, "code": code}
    return built.node.meter.registry.get_sample_value("pdflow_router_requests_total", labels) or 0.0


async def exchange_one_request(built: Town, ask: bytes = ASK) -> bytes:
    """All that a client hears until it is hung up on, or its answer has come."""
    stream = await trio.open_tcp_stream(LOCAL, built.port)
    async with stream:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(ask)
        await stream.send_all(head + ask)
        return b"".join([piece async for piece in stream])


@pytest.mark.trio
async def test_a_request_that_is_shed_says_when_to_come_again() -> None:
    async with town(admission=AdmissionLimits(max_inflight=0)) as built, trio.open_nursery() as nursery:
        received: list[bytes] = []

        async def ask() -> None:
            received.append(await exchange_one_request(built))

        nursery.start_soon(ask)
        await settled()
        built.turn()
        await settled()
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 1\r\n" in head
    assert msgspec.json.decode(body)["error"]["message"] == "shed: too many requests in flight"


@pytest.mark.trio
async def test_an_answer_that_broke_off_has_failed_and_was_not_taken_back_by_its_client() -> None:
    async with town("decode-0", "decode-1") as built, trio.open_nursery() as nursery:
        nursery.start_soon(exchange_one_request, built)
        await settled()
        built.turn()
        await settled()
        for connection in tuple(built.servers["decode-0"].connections):
            connection._sock.shutdown(2)
        await settled()
        built.turn()
        assert counted(built, "failed", "unreachable") == 1
        assert counted(built, "cancelled", "cancelled") == 0
        assert built.asked.count("decode-1") == 0


def event(text: str, finish_reason: str | None = None) -> bytes:
    return CompletionAnswer("r1.1", 5, "tiny").event(AnswerPiece(0, text, finish_reason, token_ids=[3]))


@pytest.mark.parametrize("lacks", ["DONE", "usage", "DONE behind the usage"])
@pytest.mark.trio
async def test_an_answer_that_lacks_only_its_end_is_ended(lacks: str) -> None:
    """Its engine dies behind the last token."""
    options = {} if lacks == "DONE" else {"stream_options": {"include_usage": True}}
    ask = {"prompt": "x", "max_tokens": 4, "stream": True, **options}
    usage_event = CompletionAnswer("r1.1", 5, "tiny").usage_event(usage(1, 2))
    async with town(resumes=True) as built, trio.open_nursery() as nursery:
        pieces = [event("a"), event("b", "length")]
        whole = pieces if lacks == "DONE" else [*pieces, usage_event]
        built.answer_pieces["decode-0"], built.ends_answers = pieces if lacks == "usage" else whole, False
        received: list[bytes] = []

        async def asking() -> None:
            received.append(await exchange_one_request(built, msgspec.json.encode(ask)))

        nursery.start_soon(asking)
        await settled()
        built.turn()
        await settled()
        built.node.members.apply_report(EngineGone("decode-0"))
        for _ in range(3):
            built.turn()
            await settled()
        events = [line for line in received[0].split(b"\n") if line.startswith(b"data: ")]
        assert events == [piece.strip() for piece in (*whole, DONE)]
        assert counted(built, "completed", "none") == 1
        assert built.node.meter.registry.get_sample_value("pdflow_router_answers_resumed_total") == 0


EXPIRED = error_event(OpenAIError(502, "the request failed: expired", code="EXPIRED"))


@pytest.mark.trio
async def test_an_error_in_an_answer_is_seen_however_its_bytes_arrive() -> None:
    data = b"data: {}\n\n" + EXPIRED + DONE
    splits = [(data[:at], data[at:]) for at in range(len(data))] + [tuple(data[at : at + 1] for at in range(len(data)))]
    for pieces in splits:
        call = Call("/", {}, [], (), (), None)  # type: ignore[arg-type]
        for piece in pieces:
            call.pieces.add(piece)
        assert call.pieces.failure() is Code.EXPIRED, pieces
    fine = Call("/", {}, [], (), (), None)  # type: ignore[arg-type]
    fine.pieces.add(msgspec.json.encode({"text": EXPIRED.decode()}))
    assert fine.pieces.failure() is Code.NONE


@pytest.mark.trio
async def test_an_answer_that_ends_with_an_error_has_failed() -> None:
    """The client has heard it all."""
    async with town() as built, trio.open_nursery() as nursery:
        built.answer_pieces["decode-0"] = [b"data: {}\n\n", EXPIRED + DONE]
        received: list[bytes] = []

        async def ask() -> None:
            received.append(await exchange_one_request(built))

        nursery.start_soon(ask)
        for _ in range(4):
            await settled()
            built.turn()
        assert len(received) == 1
        assert b"the request failed: expired" in received[0]
        assert counted(built, "failed", "expired") == 1
        assert counted(built, "completed", "none") == 0
