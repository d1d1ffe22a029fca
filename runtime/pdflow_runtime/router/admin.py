"""The operator's HTTP API of the router: the state of the cluster, and which engines are to serve.

GET    /admin/state                  every engine: its pool, its streams, its requests with their states
GET    /admin/notes                  the latest notes of each process: stages, steps, transfers (`observe/event_log.py`)
POST   /admin/engines                an engine's report of itself (`reports.py`); or {"pool": NAME}: one more is started
POST   /admin/engines/NAME/drain     it gets nothing new; what it has goes on
POST   /admin/engines/NAME/resume    it does again
DELETE /admin/engines/NAME           it gets nothing new, and is stopped once nothing there is wanted any more

Requests are authenticated in `front.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import trio

from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.process.addresses import DrainOrder, EngineAddress, EngineNews, ReportAnswer, is_address
from pdflow_runtime.router.engine_metrics import MembersCollector
from pdflow_runtime.router.router_node import LiveRouterNode
from pdflow_runtime.security.tls import log_tls_failure

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""Time for an engine to answer. Prometheus waits for 10 s by default."""
STOP: Final = "/stop"
"""The path at which an engine is ordered to end that is not wanted any more."""


class Asked(NamedTuple):
    """What an engine answered, None if it did not in time, or with an error; and how long that took, in seconds."""

    answer: bytes | None
    seconds: float


class EngineToAdd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request to start one more engine of a pool."""

    pool: str


_body: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_engine_to_add: Final = msgspec.json.Decoder(EngineToAdd)
_news: Final = msgspec.json.Decoder(EngineNews)


class Admin:
    """Answers the operator's requests. Args: `vacant`: engines that may be added; `start` orders the start of one of
    these, None where engines cannot be started from here."""

    def __init__(self, node: LiveRouterNode, vacant: list[str], start: Callable[[str], None] | None) -> None:
        self.node: Final = node
        self.members: Final = node.members
        self.vacant: Final = vacant
        self.start: Final = start
        self.removed: set[str] = set()
        """Engines that are to end."""
        node.meter.registry.register(MembersCollector(self.members, self.expected))
        self._stops, self._to_stop = trio.open_memory_channel[str](len(self.members.seats))
        node.left, self.members.ended, self.members.came_up = self._left, self._ended, self._came_up

    async def run(self) -> None:
        """Stop engines that have nothing to do any more and are to end."""
        async with trio.open_nursery() as nursery:
            async for name in self._to_stop:
                nursery.start_soon(self._stop, name)

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        status, body = 200, b"{}"
        match request.method, request.path.split("/")[2:]:
            case "GET", ["state"]:
                body = msgspec.json.encode(await self.state())
            case "GET", ["notes"]:
                pages = (asked.answer for asked in (await self.ask_all("/notes", self.engine_addresses())).values())
                found = [msgspec.Raw(page) for page in pages if page is not None]
                body = msgspec.json.encode([self.node.event_log.page(), *found])
            case "POST", ["engines"]:
                status, body = self.engines(request.body)
            case "POST", ["engines", name, "drain" | "resume" as what]:
                self.change(name, what == "resume")
            case "DELETE", ["engines", name]:
                self.remove(name)
                status = 202
            case _:
                raise OpenAIError(404, f"unknown path: {request.method} {request.path}")
        await responder.reply(status, (JSON,), body)

    def engines(self, body: bytes) -> tuple[int, bytes]:
        """Handle an engine's report, or the request for one more engine; return status and body."""
        try:
            wish = "pool" in _body.decode(body)
            message = _engine_to_add.decode(body) if wish else _news.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise OpenAIError(400, f"expected an engine's report, or {{'pool': NAME}}: {error}") from None
        if isinstance(message, EngineToAdd):
            return 202, msgspec.json.encode({"engine": self.add(message.pool)})
        if not self.members.reports:
            raise OpenAIError(
                409,
                "this router accepts no reports: `pdflow serve` starts and reports its engines (docs/hosts.md)",
            )
        if isinstance(message, EngineAddress) and not (is_address(message.http) and is_address(message.kv)):
            raise OpenAIError(400, "expected an engine's address: a host, and ports from 1 to 65,535")
        if problem := self.members.apply_report(message):
            raise OpenAIError(409, problem)
        return 200, msgspec.json.encode(ReportAnswer(message.engine in self.members.drained_by_operator))

    def add(self, pool: str) -> str:
        """Start one more engine of the pool, and return its name."""
        if self.start is None:
            raise OpenAIError(
                409,
                "this router cannot start engines: run `pdflow serve FILE --role ROLE --name NAME` on its host",
            )
        vacant = [name for name in self.vacant if name not in self.members.addresses]
        name = next((name for name in vacant if name.rpartition("-")[0] == pool), None)
        if name is None:
            raise OpenAIError(
                409, f"no engine can be added to pool {pool!r}: unknown pool, or all of serve.spare_engines are in use"
            )
        self.vacant.remove(name)
        log.info("starting %s, as ordered", name)
        self.start(name)
        return name

    def change(self, name: str, up: bool) -> None:
        self._known(name)
        if up:
            self.removed.discard(name)
        self.members.set_enabled(name, up)

    def remove(self, name: str) -> None:
        """Order the engine to end once nothing there is wanted any more; at once if it is drained already."""
        self._known(name)
        if name not in self.members.addresses:
            raise OpenAIError(409, f"{name} is not up")
        if name in self.removed:
            return
        log.info("removing %s: it gets no new requests and is stopped once drained", name)
        self.removed.add(name)
        if name in self.node.router.membership.left:
            self._left(name)
        else:
            self.members.set_enabled(name, False)
        self.members.ordered(DrainOrder(name, True, removed=True))

    def remove_again(self, names: Iterable[str]) -> None:
        """Continue removals that an earlier router of this supervisor was ordered to make. An engine that is down is
        stopped when it is up."""
        for name in names:
            if name in self.members.addresses:
                self.remove(name)
            else:
                self.removed.add(name)

    def _came_up(self, name: str) -> None:
        if name in self.removed:
            self.members.set_enabled(name, False)
            self._stops.send_nowait(name)

    def _known(self, name: str) -> None:
        if name not in self.members.seats:
            raise OpenAIError(404, f"unknown engine {name!r}")

    def _left(self, name: str) -> None:
        if name in self.removed:
            self._stops.send_nowait(name)

    async def _stop(self, name: str) -> None:
        """Send the engine the order to stop, which it follows once its last lease has ended; it may be added again from
        now on."""
        address = self.members.addresses.get(name)
        if address is not None:
            try:
                with trio.move_on_after(ANSWER_S):
                    await self.ask(address, "POST", STOP)
            except UpstreamError as error:
                log.warning("could not order %s to stop: %s; stop its process by hand", name, error)
        self.removed.discard(name)
        self.members.drained_by_operator.discard(name)
        self.members.leaving.add(name)
        self._ended(name)

    def _ended(self, name: str) -> None:
        """Note that this engine may be added again."""
        if name not in self.vacant:
            self.vacant.append(name)

    def expected(self) -> list[str]:
        """Return the engines that are up, or should be."""
        return [name for name in self.members.seats if name in self.members.addresses or name not in self.vacant]

    def engine_addresses(self) -> dict[str, EngineAddress | None]:
        """Return the addresses of the engines that are up, or should be: None for one that is not up."""
        return {name: self.members.addresses.get(name) for name in self.expected()}

    async def state(self) -> dict[str, Any]:
        """Return the state of the cluster; that of an engine that does not answer is None."""
        members = self.members
        asked = await self.ask_all("/state", self.engine_addresses() | members.stores)
        engines = {name: None if one.answer is None else msgspec.Raw(one.answer) for name, one in asked.items()}
        silent = sorted(name for name in members.addresses if not members.is_member(name))
        membership = {"drained": sorted(members.drained), "silent": silent, "stalled": members.stalled}
        return {
            "open": len(self.node.calls),
            **membership,
            "router": self.node.meter.figures(),
            "engines": engines,
        }

    async def ask_all(
        self, path: str, addresses: Mapping[str, EngineAddress | None], limit_bytes: int = 16 << 20
    ) -> dict[str, Asked]:
        """Ask every engine or store node that has an address, all at once."""
        found = dict.fromkeys(addresses, Asked(None, 0.0))

        async def ask(name: str, address: EngineAddress) -> None:
            begun_ns, answer = now_ns(), None
            with suppress(UpstreamError), trio.move_on_after(ANSWER_S):
                answer = await self.ask(address, "GET", path, limit_bytes)
            found[name] = Asked(answer, (now_ns() - begun_ns) / S)

        async with trio.open_nursery() as nursery:
            for name, address in addresses.items():
                if address is not None:
                    nursery.start_soon(ask, name, address)
        return found

    async def ask(self, address: EngineAddress, method: str, path: str, limit_bytes: int = 16 << 20) -> bytes:
        """Return the engine's answer. UpstreamError, also for an answer that is an error."""
        http = address.http
        headers = self.node.signer.sign(address.engine, method, path, b"", incarnation=address.incarnation)
        try:
            async with self.node.client.request(method, http.host, http.port, path, headers) as response:
                answer = await response.read(limit_bytes)
        except UpstreamError as error:
            log_tls_failure(address.engine, error)
            raise
        if response.status != 200:
            raise UpstreamError("malformed", f"HTTP {response.status}: {answer[:200].decode(errors='replace')}")
        return answer
