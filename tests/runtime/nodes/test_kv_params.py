"""What router and engines tell each other of a transfer comes back as what was said, for each method that is served."""

from __future__ import annotations

import msgspec
import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.methods.params.errors import ParamsError
from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, Shards
from pdflow.protocol.values import NO_BLOCK, blocks_of
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, prefill_json, read_decode, read_prefill

AT = Coordinates("127.0.0.1", 5600)
ASKED = KvParams(EngineInfo("prefill-0", Shards(2, 1, 32)), "x1", "", 0)
ANSWERED = KvParams(
    EngineInfo("prefill-0", Shards(2, 1, 32)),
    "x1",
    "r1",
    40,
    (3, 4),
    (LeaseWord(1, 2**63), LeaseWord(2, 7)),
    11,
    12,
    incarnation=2**64 - 1,
)


@pytest.mark.parametrize("method", METHODS)
def test_params_are_read_as_written(method: str) -> None:
    assert read_prefill(method, via_json(prefill_json("x1", method))).xid == "x1"
    params = ANSWERED if METHODS[method].pulls else ASKED
    if method != "mooncake-v1":
        params = msgspec.structs.replace(params, request_id="r1")
    assert read_decode(method, via_json(decode_json(params, AT, method))) == (params, AT)


@pytest.mark.parametrize("method", METHODS)
def test_the_incarnation_that_p_answers_reaches_d(method: str) -> None:
    params = msgspec.structs.replace(ASKED, request_id="r1", incarnation=2**64 - 1)
    assert read_decode(method, via_json(decode_json(params, AT, method)))[0].incarnation == 2**64 - 1


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.pulls])
def test_block_tables_of_kv_cache_groups_are_read_as_written(method: str) -> None:
    groups = ((3, 4), (NO_BLOCK, 9))
    params = msgspec.structs.replace(ANSWERED, blocks=blocks_of(groups), groups=groups)
    payload = via_json(decode_json(params, AT, method))
    assert read_decode(method, payload) == (params, AT)


@pytest.mark.parametrize(
    "groups",
    [[[3, 4], [9]], [[3], [4, 9]], [], [[]] * 65, [3, 4], [[3, 4], [-2]], [[3, True]], [[3, 4], [-1] * 262_144]],
)
def test_block_tables_that_no_prefill_has_are_one_error(groups: object) -> None:
    payload = decode_json(ANSWERED, AT, "nixl-pull")
    payload["pdflow"]["groups"] = groups
    with pytest.raises(ParamsError, match=r"pdflow\.groups"):
        read_decode("nixl-pull", payload)


def test_a_prefill_leg_has_the_addresses_of_the_store_nodes() -> None:
    stores = (AT, Coordinates("127.0.0.1", 0))
    assert read_prefill("kv-store", via_json(prefill_json("x1", "kv-store", stores))).stores == stores
    assert read_prefill("kv-store", via_json(prefill_json("x1", "kv-store"))).stores == ()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("payload", [{}, {"do_remote_prefill": 3}, [1], "x", {"pdflow": {"xid": ""}}])
def test_what_is_wrong_is_one_error(method: str, leg: str, payload: object) -> None:
    with pytest.raises(ParamsError):
        (read_prefill if leg == "prefill" else read_decode)(method, payload)


def via_json(value: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_a_bootstrap_address_without_a_port_is_one_error() -> None:
    payload = decode_json(ASKED, AT, "mooncake-v1") | {"remote_bootstrap_addr": "http://127.0.0.1:none"}
    with pytest.raises(ParamsError):
        read_decode("mooncake-v1", payload)
