"""Requests to vLLM instances: token-id prompts in, token ids and log probabilities out, over pdflow's HTTP client.

One request goes through two legs as a router would send it: the prompt to P with `max_tokens` 1, then the same prompt
to D with the parameters that P answered, unchanged, and the same X-Request-Id.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import attrs
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON

Outcome: TypeAlias = Literal["ok", "error", "hung", "broken"]
ASK_PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
REPLY_S: Final = 60.0
"""After so long a request counts as hung: the slowest of the stock connector's deadlines that end one is 30 s."""


@attrs.frozen
class Reply:
    """The answer to one request. `error` with a status, `hung` at the deadline, `broken` where the connection ended."""

    outcome: Outcome
    seconds: float
    status: int = 0
    tokens: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    """For each token, the log probability of the likeliest less that of the second."""
    params: dict[str, Any] | None = None
    """kv_transfer_params, of P's answer."""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    def __str__(self) -> str:
        detail = f" {self.status} {self.error[:100]}" if self.outcome in ("error", "broken") else ""
        return f"{self.outcome}{detail} after {self.seconds:.1f} s"


class Legs(NamedTuple):
    p: Reply
    d: Reply | None
    """None where P's answer had no parameters to send on."""

    @property
    def ok(self) -> bool:
        return self.d is not None and self.d.ok

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.d.tokens if self.d is not None else ()

    @property
    def seconds(self) -> float:
        return self.p.seconds + (self.d.seconds if self.d is not None else 0.0)


@attrs.frozen
class Client:
    """Requests to one instance, each over a connection of its own: an abort is its end."""

    host: str
    port: int

    async def complete(
        self,
        tokens: list[int],
        max_tokens: int = 16,
        *,
        request_id: str | None = None,
        params: dict[str, Any] | None = None,
        timeout_s: float = REPLY_S,
        **extra: Any,
    ) -> Reply:
        """Send one greedy completion. At the deadline the connection is closed, by which vLLM learns of an abort."""
        body: dict[str, Any] = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 2}
        if params is not None:
            body["kv_transfer_params"] = params
        start = trio.current_time()
        with trio.move_on_after(timeout_s):
            try:
                status, data = await self.send("POST", "/v1/completions", body | extra, request_id)
            except UpstreamError as error:
                return Reply("broken", trio.current_time() - start, error=str(error))
            return _reply(status, data, trio.current_time() - start)
        return Reply("hung", trio.current_time() - start)

    async def send(
        self, method: str, path: str, body: dict[str, Any] | None = None, request_id: str | None = None
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer. UpstreamError where none comes."""
        headers = () if body is None else (JSON,)
        if request_id is not None:
            headers = (*headers, (b"x-request-id", request_id.encode("ascii")))
        client = HttpClient()
        data = b"" if body is None else json.dumps(body).encode()
        try:
            async with client.request(method, self.host, self.port, path, headers, data) as response:
                return response.status, await response.read()
        finally:
            client.close()

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        """True if /health answers 200: the API server runs, and its engine core has not ended."""
        with trio.move_on_after(timeout_s):
            try:
                return (await self.send("GET", "/health"))[0] == 200
            except UpstreamError:
                return False
        return False

    async def metrics(self) -> dict[str, float]:
        """Return each sample of /metrics: `name{label="value",...}` to its value."""
        _, data = await self.send("GET", "/metrics")
        lines = [line for line in data.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def reset_prefix_cache(self) -> None:
        await self.send("POST", "/reset_prefix_cache")


def total(metrics: dict[str, float], name: str, **labels: str) -> float:
    """Return the sum of the samples of this name that have these labels."""
    found = 0.0
    for sample, value in metrics.items():
        base, _, rest = sample.partition("{")
        if base == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
            found += value
    return found


def prompt_tokens_by_source(metrics: dict[str, float]) -> dict[str, int]:
    """Return how many prompt tokens were computed, found in the prefix cache, or loaded, by vLLM's own count."""
    name = "vllm:prompt_tokens_by_source_total"
    found = {}
    for sample, value in metrics.items():
        if sample.startswith(f"{name}{{"):
            found[sample.partition('source="')[2].partition('"')[0]] = int(value)
    return found


def new_request_id() -> str:
    return uuid.uuid4().hex


async def two_legs(
    p: Client,
    d: Client,
    tokens: list[int],
    max_tokens: int = 16,
    *,
    request_id: str | None = None,
    timeout_s: float = REPLY_S,
) -> Legs:
    """Send one request through both legs, the decode leg once P has answered."""
    request_id = request_id or new_request_id()
    first = await p.complete(tokens, 1, request_id=request_id, params=ASK_PREFILL, timeout_s=timeout_s)
    if first.params is None:
        return Legs(first, None)
    return Legs(
        first,
        await d.complete(tokens, max_tokens, request_id=request_id, params=first.params, timeout_s=timeout_s),
    )


def _reply(status: int, data: bytes, seconds: float) -> Reply:
    if status != 200:
        return Reply("error", seconds, status, error=data.decode(errors="replace"))
    body = json.loads(data)
    choice = body["choices"][0]
    if choice.get("finish_reason") == "error":
        return Reply("error", seconds, status, error="finish_reason error")
    top = [sorted(each.values(), reverse=True) for each in (choice.get("logprobs") or {}).get("top_logprobs") or ()]
    gaps = tuple(values[0] - values[1] for values in top if len(values) > 1)
    return Reply(
        "ok",
        seconds,
        status,
        tuple(choice.get("token_ids") or ()),
        gaps,
        body.get("kv_transfer_params"),
    )
