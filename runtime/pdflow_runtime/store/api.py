"""The HTTP API of a store's node (`store/calls.py`): only engines of the cluster send it requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from pdflow.methods.kv_store import KV_STORE
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.store.memory import Item, blocks_of
from pdflow.protocol.messages import Code
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.engine_api import ended
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, read_decode
from pdflow_runtime.observe.state import EngineState
from pdflow_runtime.process.component_api import ComponentApi
from pdflow_runtime.security.signed import Gate
from pdflow_runtime.store.calls import PUSH, LookBody, PutBody, StoreReply, WithdrawBody
from pdflow_runtime.store.node import LiveStoreNode, StoreCall
from pdflow_runtime.store.state import StoreCollector, state_of

T = TypeVar("T")


class StoreApi(ComponentApi):
    """The HTTP API of a store's node. Args: `here` is where this node's ranks listen; `gate` authenticates requests;
    `stop` ends this node when its calls are done; `model` is the name of the model."""

    def __init__(
        self, node: LiveStoreNode, here: Coordinates, gate: Gate, stop: Callable[[], None], model: str = ""
    ) -> None:
        super().__init__(node, gate, stop, model)
        self.node: Final = node
        self.here: Final = here
        self.meter.registry.register(StoreCollector(node))

    def state(self) -> EngineState:
        return state_of(self.node)

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except OpenAIError as error:
            await responder.reply(error.status, error.headers, error.body())

    async def _answer(self, request: HttpRequest, responder: Responder) -> None:
        if await self.operated(request, responder):
            return
        match request.method, request.path:
            case "POST", "/put":
                await responder.reply(200, (JSON,), await self._put(request.body))
            case "POST", "/look":
                await responder.reply(200, (JSON,), await self._look(request.body))
            case "POST", "/withdraw":
                parsed = read(request.body, WithdrawBody)
                self.node.withdraw(parsed.request_id, parsed.xid)
                await responder.reply(200, (JSON,), b"{}")
            case _:
                raise OpenAIError(404, f"unknown path: {request.method} {request.path}")

    async def _put(self, body: bytes) -> bytes:
        parsed = read(body, PutBody)
        try:
            params, at = read_decode(PUSH, parsed.kv_transfer_params)
        except ParamsError as error:
            raise OpenAIError(400, f"kv_transfer_params: {error}", param="kv_transfer_params") from None
        items = tuple(Item(key, blocks) for key, blocks in parsed.objects)
        need = -(-params.num_tokens // self.node.config.info.shards.block_size)
        if not params.num_tokens or blocks_of(items) != need:
            raise OpenAIError(
                400, f"objects: have {blocks_of(items)} blocks, expected {need} for {params.num_tokens} tokens"
            )
        await self.node.links.update_address(params.prefill.engine, at.host, at.port)
        try:
            call = self.node.start(params, items)
        except KeyError as error:
            raise OpenAIError(409, str(error.args[0])) from None
        return await self._answered(call)

    async def _look(self, body: bytes) -> bytes:
        parsed = read(body, LookBody)
        items = tuple(Item(key, blocks) for key, blocks in parsed.objects)
        if self.node.backing is not None:
            await self.node.backing.fetch(items)
        try:
            call = self.node.look(parsed.request_id, parsed.xid, items, int(parsed.digest, 16), parsed.weights)
        except KeyError as error:
            raise OpenAIError(409, str(error.args[0])) from None
        return await self._answered(call)

    async def _answered(self, call: StoreCall) -> bytes:
        """Wait for the call's answer and return it: the parameters by which the KV can be got, or null. OpenAIError if
        it could not be put."""
        try:
            await call.answered.wait()
        finally:
            if not call.answered.is_set():
                self.node.withdraw(call.request_id, call.xid)
        if call.code is not Code.NONE:
            raise ended(call.code)
        params = None if call.params is None else decode_json(call.params, self.here, KV_STORE.name)
        return msgspec.json.encode(StoreReply(params))


def read(body: bytes, form: type[T]) -> T:
    """Parse a request's body. OpenAIError if it is not of this form."""
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OpenAIError(400, f"the body does not fit this request to a store node: {error}") from None
