"""The requests that are sent to a running cluster so that its engines make steps of all sizes: prompts one by one,
short and long, and then so many at once that batches fill.

Notes are fetched after each round, before later ones push them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import attrs
import msgspec
import trio

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.workload.request import Request
from pdflow_runtime.bench.contents import Contents
from pdflow_runtime.bench.form import RequestForm
from pdflow_runtime.bench.sender import RequestTarget
from pdflow_runtime.clock import deadline_of, now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.observe.event_log import Page
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.security.signed import operators_signer

COMPLETIONS: Final = "/v1/completions"
NOTES: Final = "/admin/notes"
LENGTHS: Final = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
SHORT: Final = 256
"""The longest prompt of those that are sent together."""
TOGETHER: Final = (2, 4, 8, 16, 32)
MOST_BYTES: Final = 1 << 30
"""The most that is read of all processes' notes: a few MB each."""
FETCH_EVERY: Final = 8
"""Rounds."""
FETCH_S: Final = 2.0
ALONE_TIMES: Final = 5
ALONE_TOKENS: Final = 12
TOGETHER_TOKENS: Final = 40


class ProbeError(PdflowError):
    """The cluster does not answer as it must to be measured."""

    exit_code = EXIT_BAD_INPUT


@attrs.frozen
class Round:
    """Requests that are sent at once: each (tokens of the prompt, tokens of the answer)."""

    requests: tuple[tuple[int, int], ...]


def rounds(scenario: ResolvedScenario, context_tokens: int) -> Iterator[Round]:
    """Yield the rounds, repeated so that every engine of each role gets prompts of each size, whichever the router
    chooses."""
    engines = max(pool.replicas for pool in scenario.pools)
    room = min([context_tokens, *(pool.step_tokens for pool in scenario.pools if pool.role != "decode")])
    lengths = [length for length in LENGTHS if length + ALONE_TOKENS <= room]
    for _ in range(ALONE_TIMES * engines):
        for length in lengths:
            yield Round(((length, ALONE_TOKENS),))
    most = min(pool.max_num_seqs for pool in scenario.pools)
    short = [length for length in lengths if length <= SHORT and length + TOGETHER_TOKENS <= context_tokens]
    for together in (count for count in TOGETHER if count <= most):
        for turn in range(2):
            sizes = [short[(number + turn) % len(short)] for number in range(together * engines)]
            yield Round(tuple((size, TOGETHER_TOKENS) for size in sizes))


class NotesSource(NamedTuple):
    """Where a cluster's notes are fetched: its address, and the client for it."""

    at: RequestTarget
    client: HttpClient


class Probe:
    """Sends requests to one cluster, and collects the notes of its processes. Args: `server` has the headers of
    clients' requests; `notes`, if the notes are fetched elsewhere."""

    def __init__(
        self, client: HttpClient, server: RequestTarget, model: str, seed: int, notes: NotesSource | None = None
    ) -> None:
        self._client: Final = client
        self._notes: Final = NotesSource(server._replace(path=NOTES), client) if notes is None else notes
        self._signer: Final = operators_signer(self._notes.at.host, self._notes.at.port)
        self._at: Final = server._replace(path=COMPLETIONS)
        self._form: Final = RequestForm(path=COMPLETIONS, model=model, ignore_eos=True, sampling={"temperature": 0.0})
        self._contents: Final = Contents(seed, 1)
        self._sent = 0
        self._pages: dict[str, Page] = {}

    async def send_all(self, rounds: Iterable[Round]) -> None:
        """Send the rounds one after the other."""
        for number, each in enumerate(rounds, start=1):
            await self._send(each)
            if number % FETCH_EVERY == 0:
                await self.fetch()
        await self.fetch()

    async def play(self, requests: Sequence[Request]) -> None:
        """Send each request at its own instant."""
        begun = now_ns()
        async with trio.open_nursery() as watching:
            watching.start_soon(self.watch)
            async with trio.open_nursery() as nursery:
                for request in requests:
                    body = self._body(request.input_tokens, request.output_tokens)
                    await trio.sleep_until(deadline_of(begun + request.arrival_ns))
                    nursery.start_soon(self._ask, body)
            watching.cancel_scope.cancel()
        await self.fetch()

    async def watch(self) -> None:
        """Fetch again and again, until cancelled."""
        while True:
            await self.fetch()
            await trio.sleep(FETCH_S)

    async def _send(self, probe_round: Round) -> None:
        """Send the requests of a round, and wait until all are answered. ProbeError if one is not."""
        async with trio.open_nursery() as nursery:
            for prompt, answer in probe_round.requests:
                nursery.start_soon(self._ask, self._body(prompt, answer))

    def _body(self, prompt: int, answer: int) -> bytes:
        """Return the body of a request with a new prompt each time, so that none is in a cache."""
        self._sent += 1
        return self._form.body(self._contents.made(f"probe/{self._sent}", prompt), answer)

    async def _ask(self, body: bytes) -> None:
        host, port, path, headers, _ = self._at
        try:
            async with self._client.request("POST", host, port, path, headers, body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise ProbeError(f"{self._at.url}: HTTP {response.status}: {answer[:200]!r}")
        except UpstreamError as error:
            raise ProbeError(f"{self._at.url} does not answer: {error}") from None

    async def fetch(self) -> None:
        """Fetch what all processes have noted since the last call."""
        at, client = self._notes
        try:
            signed = self._signer.sign(ROUTER, "GET", NOTES, b"")
            async with client.request("GET", at.host, at.port, NOTES, signed) as response:
                body = await response.read(MOST_BYTES)
                if response.status != 200:
                    raise ProbeError(f"{at.url}: HTTP {response.status}: {body[:400]!r}")
        except UpstreamError as error:
            raise ProbeError(f"{at.url} does not answer: {error}") from None
        for page in msgspec.json.decode(body, type=list[Page]):
            before = self._pages.get(page.node)
            self._pages[page.node] = page if before is None else continued(before, page)

    def pages(self) -> Sequence[Page]:
        return list(self._pages.values())


def continued(before: Page, page: Page) -> Page:
    """Append the new notes of a page to the known ones. A restarted engine counts its notes from 0 again; its clock
    goes on."""
    new = page.noted - before.noted
    if new < 0:
        new = len(page.notes)
    notes = before.notes + (page.notes[-new:] if new else [])
    return Page(page.node, page.offset_ns, notes, page.noted)
