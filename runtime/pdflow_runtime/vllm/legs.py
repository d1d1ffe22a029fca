"""What the two legs of a request to vLLM instances contain, for each of vLLM's connectors that a proxy can serve.

NIXL's connectors and pdflow's return the parameters of the decode leg with the prefill leg's answer. MooncakeConnector
returns none: both legs have a transfer id of the proxy's, and the decode leg names P's engine, which P's bootstrap
server knows. Source: the classes NixlConnector, NixlPushConnector and MooncakeConnector of vLLM 0.32.0.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import attrs

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import Headers

DP_RANK: Final = b"x-data-parallel-rank"
"""The header that names the data-parallel rank for vLLM."""


@attrs.frozen
class VllmInstance:
    """The address of one instance's API server, or of its bootstrap server."""

    host: str
    port: int


def moves_kv(body: Mapping[str, Any]) -> bool:
    """Whether the KV of a request's prompt can be moved. A prompt's KV goes to one sequence, and an answer has the
    parameters of one prompt: with several of either, the decode instance computes the prompts."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and all((body.get(key) or 1) == 1 for key in ("n", "best_of"))


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the prefill leg: the request, for one token that is not streamed."""
    asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "min_tokens")}
    asked["max_tokens"] = 1
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked


class LegPair(Protocol):
    """The two legs of one request."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The kv_transfer_params of the prefill leg."""

    @property
    def headers(self) -> Headers:
        """Headers of the prefill leg."""

    def decode_params(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the kv_transfer_params of the decode leg, from the prefill leg's answer; None: D computes the
        prompt."""


class TransferLegs(Protocol):
    """Begins the two legs of a request."""

    async def begin(self, client: HttpClient, prefill: VllmInstance, name: str) -> LegPair:
        """Return the legs of a request of this name. UpstreamError if the instance cannot be asked."""


@attrs.frozen
class NixlLegs:
    """The legs of vLLM's NIXL connectors, and of pdflow's: the same for every request."""

    params: Mapping[str, Any] = attrs.field(default={"do_remote_decode": True, "do_remote_prefill": False}, init=False)
    headers: Headers = attrs.field(default=(), init=False)

    async def begin(self, client: HttpClient, prefill: VllmInstance, name: str) -> LegPair:
        """Return this."""
        return self

    def decode_params(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what the prefill instance answered, unchanged."""
        params = answer.get("kv_transfer_params")
        return params if isinstance(params, dict) else None


@attrs.frozen
class MooncakeLegPair:
    """The legs of one request, with MooncakeConnector."""

    transfer_id: str
    bootstrap: str
    engine_id: str
    headers: Headers

    @property
    def params(self) -> Mapping[str, Any]:
        """The kv_transfer_params of the prefill leg."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.transfer_id}

    def decode_params(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the parameters, of which none is from the answer."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self.transfer_id,
            "remote_bootstrap_addr": self.bootstrap,
            "remote_engine_id": self.engine_id,
        }


@attrs.frozen
class MooncakeLegs:
    """Begins legs with MooncakeConnector. Data-parallel ranks of a prefill instance are taken in turn."""

    bootstraps: Mapping[VllmInstance, VllmInstance]
    """The bootstrap server of each prefill instance."""
    _turns: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    async def begin(self, client: HttpClient, prefill: VllmInstance, name: str) -> LegPair:
        """Ask for the ids of the instance's engines, which change when it restarts. UpstreamError if none come."""
        at = self.bootstraps[prefill]
        async with client.request("GET", at.host, at.port, "/query") as response:
            status, data = response.status, await response.read()
        engines = engine_ids(data) if status == 200 else {}
        if not engines:
            raise UpstreamError("malformed", f"the bootstrap server {at.host}:{at.port} names no engine", began=True)
        rank = sorted(engines)[next(self._turns) % len(engines)]
        headers = ((DP_RANK, str(rank).encode("ascii")),) if len(engines) > 1 else ()
        return MooncakeLegPair(f"xfer-{name}", f"http://{at.host}:{at.port}", engines[rank], headers)


def engine_ids(data: bytes) -> dict[int, str]:
    """Return the engine id of each data-parallel rank, from a bootstrap server's answer; {} if it has none."""
    try:
        found = json.loads(data)
        return {int(rank): str(entry["engine_id"]) for rank, entry in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
