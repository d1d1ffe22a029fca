"""The calls of a store's node over HTTP, and the engines' client for them.

    POST /put        PutStart: a prompt's KV is here, as a push's decode leg says it; answered when the store has it
    POST /look       GetReplicaList: what is stored of a prompt; answered at once
    POST /withdraw   no engine will come for what was put or found

An answer to the first two has the `kv_transfer_params` by which an engine gets the KV, or null. Closing the connection
withdraws a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import trio

from pdflow.methods.kv_store import KV_STORE
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.store.memory import Item
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Xid
from pdflow.protocol.wire.limits import MAX_BLOCKS, MAX_ID_BYTES, MAX_U63
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, read_decode
from pdflow_runtime.security.signed import UNSIGNED, Signer
from pdflow_runtime.security.tls import Tls, cluster_client, log_tls_failure

LOOK_S: Final = 2.0
"""The time limit of a lookup: a prompt whose answer comes later is computed."""
PUSH: Final = "nixl-push"
"""The method in whose parameters a put is described, as it is a push: the store registers, P writes."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_BYTES // 4)]
"""A name that in UTF-8 is no longer than an id may be."""
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
Objects = Annotated[list[tuple[Name, Count]], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
"""The objects of a prompt, from its start on: the key of each, and how many blocks it takes."""
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,16}$")]
"""64 bits in hexadecimal: not every JSON has numbers so large."""
U63 = Annotated[int, msgspec.Meta(ge=0, le=MAX_U63)]


class PutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kv_transfer_params: dict[str, Any]
    objects: Objects


class LookBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: Name
    xid: Name
    objects: Objects
    digest: Digest
    """The digest of the whole prompt."""
    weights: U63


class WithdrawBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: Name
    xid: Name


class StoreReply(msgspec.Struct, frozen=True):
    """The answer to a put or lookup."""

    kv_transfer_params: Any = None


class StoredKv(NamedTuple):
    """The answer of a store: the parameters of KV there, and where its node's ranks listen. `code` says why there is
    none; NONE, if the store has answered that it has none."""

    params: KvParams | None
    at: Coordinates | None = None
    code: Code = Code.NONE


class StoreClient:
    """The engine's client of store nodes, for an engine at `host`. `timeout_s`: the time limit of a put, which waits
    for room in the store."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host: Final = host
        self.timeout_s: Final = timeout_s
        self._signer = UNSIGNED
        self._client = HttpClient()

    def secured_by(self, signer: Signer, tls: Tls | None) -> None:
        """Set what requests are signed with, and the TLS that they go by, if any. To be called before any request."""
        self._signer, self._client = signer, cluster_client(tls)

    def close(self) -> None:
        self._client.close()

    async def put(self, node: str, at: Coordinates, params: KvParams, port: int, items: Sequence[Item]) -> StoredKv:
        """Put a prompt's KV, and return the parameters by which D gets it, once the store has it all. `port`: where our
        ranks listen."""
        params_json = decode_json(params, Coordinates(self.host, port), PUSH)
        body = PutBody(params_json, [(item.key, item.blocks) for item in items])
        return await self._ask(node, at, "/put", body, self.timeout_s)

    async def look(
        self,
        node: str,
        at: Coordinates,
        request_id: RequestId,
        xid: Xid,
        items: Sequence[Item],
        *,
        digest: int,
        weights: int,
    ) -> StoredKv:
        """Look up which objects of a prompt are stored, given the prompt's digest and the number of its model's
        weights."""
        objects = [(item.key, item.blocks) for item in items]
        body = LookBody(request_id, xid, objects, f"{digest:x}", weights)
        return await self._ask(node, at, "/look", body, LOOK_S)

    async def withdraw(self, node: str, at: Coordinates, request_id: RequestId, xid: Xid) -> None:
        await self._ask(node, at, "/withdraw", WithdrawBody(request_id, xid), LOOK_S)

    async def _ask(self, node: str, at: Coordinates, path: str, message: msgspec.Struct, timeout_s: float) -> StoredKv:
        body = msgspec.json.encode(message)
        headers = (JSON, *self._signer.sign(node, "POST", path, body))
        answer = None
        try:
            with trio.move_on_after(timeout_s):
                async with self._client.request("POST", at.host, at.port, path, headers, body) as response:
                    answer = await response.read()
                    if response.status != 200:
                        return StoredKv(None, None, code_of(response.status, answer))
        except UpstreamError as error:
            log_tls_failure(node, error)
            return StoredKv(None, None, Code.UNREACHABLE)
        if answer is None:
            return StoredKv(None, None, Code.DEADLINE)
        try:
            params = msgspec.json.decode(answer, type=StoreReply).kv_transfer_params
            return StoredKv(None) if params is None else StoredKv(*read_decode(KV_STORE.name, params))
        except (msgspec.DecodeError, ParamsError):
            return StoredKv(None, None, Code.IO)


def code_of(status: int, answer: bytes) -> Code:
    """Return the protocol's code for a node's refusal."""
    error = OpenAIError.from_response(status, answer)
    return Code.IO if error is None else Code.__members__.get(str(error.code), Code.IO)
