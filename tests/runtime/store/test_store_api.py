"""What a store's node is asked over HTTP: anything else is an error for whoever said it, and for nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any, Final

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.store.memory import Item
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.http.server import serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Gate, Signer
from pdflow_runtime.store.api import StoreApi, read
from pdflow_runtime.store.build import store_node
from pdflow_runtime.store.calls import PUSH, LookBody, PutBody, WithdrawBody
from pdflow_runtime.store.node import LiveStoreNode
from pdflow_runtime.store.state import StoreCollector, state_of
from pdflow_runtime.transports.named import transport_named
from tests.runtime.support.live_pair import LOCAL, cluster

BODIES: Final = (PutBody, LookBody, WithdrawBody)
SECRET: Final = Secret(b"a secret of the tests, long enough")
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("request_id", "xid", "objects", "digest", "weights", "kv_transfer_params")


@given(body=st.binary(max_size=200) | st.dictionaries(st.sampled_from(FIELDS), JSONS).map(msgspec.json.encode))
def test_any_bytes_are_a_body_or_an_error(body: bytes) -> None:
    for form in BODIES:
        with suppress(OpenAIError):
            assert isinstance(read(body, form), form)


class Asked:
    """A node with nobody around it."""

    def __init__(self, node: LiveStoreNode, port: int) -> None:
        self.node = node
        self.port = port

    async def ask(self, path: str, payload: Any, signer: Signer) -> tuple[int, Any]:
        client, body = HttpClient(), msgspec.json.encode(payload)
        headers = (JSON, *signer.sign(self.node.name, "POST", path, body))
        try:
            async with client.request("POST", LOCAL, self.port, path, headers, body) as response:
                return response.status, msgspec.json.decode(await response.read())
        finally:
            client.close()


@asynccontextmanager
async def alone(*overrides: str) -> AsyncIterator[Asked]:
    scenario = cluster("transfer.method=kv-store", "transfer.store_bytes=1_000_000", *overrides)
    builder = LiveBuilder(scenario, transport_named("shm"))
    node = store_node(builder, builder.transport, "store-0")
    async with trio.open_nursery() as nursery:
        await nursery.start(node.serve, (await trio.open_tcp_listeners(0, host=LOCAL))[0])
        api = StoreApi(node, Coordinates(LOCAL, node.port), Gate(SECRET, node.name), nursery.cancel_scope.cancel)
        server = await nursery.start(serve_http, listen(LOCAL, 0), api)
        yield Asked(node, server.port)
        nursery.cancel_scope.cancel()
    await node.aclose()


PARAMS: Final = KvParams(EngineInfo("prefill-0", Shards(1, 1, 16)), "x1", "r1", 40, digest=7, weights=1)


def put(tokens: int = 40, shards: tuple[int, int, int] = (1, 1, 16), **extras: Any) -> dict[str, Any]:
    engine = EngineInfo("prefill-0", Shards(*shards))
    params = msgspec.structs.replace(PARAMS, prefill=engine, num_tokens=tokens)
    params_json = decode_json(params, Coordinates(LOCAL, 1), PUSH)
    return {"kv_transfer_params": params_json, "objects": [["a", 2], ["b", 1]], **extras}


LOOK: Final = {"request_id": "r1", "xid": "x1/load", "objects": [["a", 2]], "digest": "7f", "weights": 1}


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("/put", {}),
        ("/put", put(objects=[])),
        ("/put", put(objects=[["", 3]])),
        ("/put", put(objects=[["a", 0], ["b", 3]])),
        ("/put", put(objects=[["a", 2]])),
        ("/put", put(tokens=0)),
        ("/put", put(kv_transfer_params={})),
        ("/put", put(kv_transfer_params=decode_json(PARAMS, Coordinates("h", 1), "nixl-pull"))),
        ("/look", LOOK | {"digest": "seven"}),
        ("/look", LOOK | {"weights": 2**63}),
        ("/look", LOOK | {"xid": "x" * 200}),
        ("/look", LOOK | {"objects": [["a", 2]] * 70_000}),
        ("/withdraw", {"request_id": "r1"}),
    ],
)
@pytest.mark.trio
async def test_bad_requests_are_refused_and_harm_nobody(path: str, payload: Any) -> None:
    async with alone() as asked:
        status, answer = await asked.ask(path, payload, Signer(SECRET))
        assert status == 400, answer
        assert asked.node.is_drained()
        assert await asked.ask("/look", LOOK, Signer(SECRET)) == (200, {"kv_transfer_params": None})


@pytest.mark.trio
async def test_who_does_not_know_the_secret_is_not_believed() -> None:
    async with alone() as asked:
        for path in ("/put", "/look", "/withdraw", "/stop"):
            assert (await asked.ask(path, LOOK, Signer(None)))[0] == 401
        assert (await asked.ask("/nothing", {}, Signer(SECRET)))[0] == 404


@pytest.mark.trio
async def test_a_put_of_nobody_who_is_there_fails_and_one_name_is_put_once() -> None:
    async with alone() as asked:
        answers: list[tuple[int, Any]] = []

        async def ask() -> None:
            answers.append(await asked.ask("/put", put(), Signer(SECRET)))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
        assert sorted(status for status, _ in answers) == [409, 503], answers
        assert {answer["error"]["code"] for _, answer in answers} == {None, "UNREACHABLE"}
        with trio.fail_after(20):
            while not asked.node.is_drained():
                await trio.sleep(0.01)
        asked.node.ledger.assert_empty("the store")


@pytest.mark.trio
async def test_one_request_puts_once_under_whatever_xid() -> None:
    async with alone() as asked:
        items = (Item("a", 2), Item("b", 1))
        call = asked.node.start(PARAMS, items)
        with pytest.raises(KeyError, match="r1 is already open"):
            asked.node.start(msgspec.structs.replace(PARAMS, xid="x2"), items)
        with trio.fail_after(20):
            await call.answered.wait()
            while not asked.node.is_drained():
                await trio.sleep(0.01)


@pytest.mark.parametrize("shards", [(3, 1, 16), (1, 1, 7), (1, 3, 16), (4000, 1, 16), (1, 4000, 65_536)])
@pytest.mark.trio
async def test_a_put_by_ranks_that_nothing_can_come_from_fails_alone(shards: tuple[int, int, int]) -> None:
    async with alone() as asked:
        with trio.fail_after(20):
            status, answer = await asked.ask("/put", put(shards=shards), Signer(SECRET))
        assert status >= 400, answer
        assert await asked.ask("/look", LOOK, Signer(SECRET)) == (200, {"kv_transfer_params": None})


@pytest.mark.trio
async def test_a_node_reports_the_state_of_its_server() -> None:
    pytest.importorskip("valkey", reason="needs pip install 'pdflow[valkey]'")
    with closing(listen(LOCAL, 0)) as nobody:
        port = nobody.getsockname()[1]
    overrides = ("transfer.store_granularity=block", f"serve.store_url=valkey://{LOCAL}:{port}")
    async with alone(*overrides) as asked:
        assert asked.node.backing is not None
        with trio.fail_after(20):
            while asked.node.backing.up:
                await trio.sleep(0.01)
            assert await asked.ask("/look", LOOK, Signer(SECRET)) == (200, {"kv_transfer_params": None})
        backing = state_of(asked.node).backing
        assert backing is not None
        assert (backing.server, backing.up, backing.waiting) == (f"valkey://{LOCAL}:{port}/0", False, 0)
        samples = {
            sample.name: sample.value for metric in StoreCollector(asked.node).collect() for sample in metric.samples
        }
        assert samples["pdflow_store_backing_up"] == 0
        assert "pdflow_store_backing_objects_total" in samples
    async with alone() as asked:
        assert b"backing" not in msgspec.json.encode(state_of(asked.node))
