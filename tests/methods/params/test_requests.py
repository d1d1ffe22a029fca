"""kv_transfer_params of every method, as the originals write them, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.extras import Extras, Params
from pdflow.methods.params.fields import MAX_KEYS
from pdflow.methods.params.kinds import MAX_PROMPT_TOKENS, MAX_PROMPTS
from pdflow.methods.params.kv_store import KVTransferParams
from pdflow.methods.params.nixl import NixlPullDecode, NixlPushDecode
from pdflow.methods.params.parse import PARAMS, parse, to_json
from pdflow.protocol.wire.limits import MAX_BLOCKS, MAX_ID_BYTES, MAX_RANKS

PULL_ANSWER = """{
  "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8, 9]],
  "remote_engine_id": "prefill-0", "remote_request_id": "cmpl-u-0-aaaaaaaa", "remote_host": "10.0.0.1",
  "remote_port": 5600, "tp_size": 2, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 48,
  "remote_blocks_expiry_time": null, "transfer_mode": "pull"
}"""
PUSH_ANSWER = """{
  "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "prefill-0", "remote_host": "10.0.0.1",
  "remote_port": 5600, "tp_size": 2, "pp_size": 1, "remote_request_id": "cmpl-u-0-aaaaaaaa",
  "remote_block_ids": [[7, 8, 9]], "remote_num_tokens": 48, "transfer_mode": "push"
}"""
PUSH_AT_ONCE = """{
  "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "prefill-0", "remote_host": "10.0.0.1",
  "remote_port": 5600, "tp_size": 2, "pp_size": 1, "remote_request_id": "6f1c", "transfer_id": "xfer-6f1c"
}"""
NIXL_PREFILL = """{
  "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
  "remote_host": null, "remote_port": null
}"""
MOONCAKE_PREFILL = """{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-6f1c"}"""
MOONCAKE_DECODE = """{
  "do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": "http://10.0.0.1:8998",
  "remote_engine_id": "prefill-0", "transfer_id": "xfer-6f1c"
}"""
STORE = """{"prefix_prompt_ids": [1, 2, 3], "kvcache_load_keys": null, "kvcache_store_keys": ["83a1"]}"""
LOAD = """{"prefix_prompt_ids": [1, 2, 3], "kvcache_load_keys": ["83a1"], "kvcache_store_keys": null}"""

GOLDEN = [
    ("nixl-pull", "prefill", NIXL_PREFILL),
    ("nixl-push", "prefill", NIXL_PREFILL),
    ("nixl-pull", "decode", PULL_ANSWER),
    ("nixl-push", "decode", PUSH_ANSWER),
    ("nixl-push", "decode", PUSH_AT_ONCE),
    ("cpu-staged", "prefill", "{}"),
    ("cpu-staged", "decode", '{"prefill_request_id": "cmpl-u-0"}'),
    ("kv-store", "prefill", STORE),
    ("kv-store", "decode", LOAD),
    ("mooncake-v1", "prefill", MOONCAKE_PREFILL),
    ("mooncake-v1", "decode", MOONCAKE_DECODE),
    ("mooncake-v0", "decode", "{}"),
    ("p2p-nccl-get", "decode", "{}"),
]


@pytest.mark.parametrize(("method", "leg", "text"), GOLDEN)
def test_what_an_original_writes_is_read_and_written_again(method: str, leg: str, text: str) -> None:
    payload = json.loads(text)
    written = json.dumps(to_json(parse(method, leg, payload)), sort_keys=True)
    assert written == json.dumps(payload, sort_keys=True)


def refused(method: str, leg: str, payload: object) -> ParamsError:
    with pytest.raises(ParamsError) as caught:
        parse(method, leg, payload)
    return caught.value


def without(text: str, key: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text).items() if name != key}


def having(text: str, **values: Any) -> dict[str, Any]:
    return json.loads(text) | values


def test_the_field_that_ends_vllms_engine_is_one_line_to_one_request() -> None:
    error = refused("nixl-push", "decode", without(PUSH_AT_ONCE, "tp_size"))
    assert str(error) == "tp_size is missing, expected an integer of 1 to 4,096: P's tensor-parallel size"
    assert (error.field, error.wrong, error.exit_code) == ("tp_size", "is missing", 2)


REQUIRED = [
    ("nixl-push", "decode", PUSH_AT_ONCE, "remote_engine_id remote_host remote_port tp_size remote_request_id"),
    ("nixl-pull", "decode", PULL_ANSWER, "remote_block_ids remote_engine_id remote_request_id remote_host remote_port"),
    ("nixl-pull", "decode", PULL_ANSWER, "do_remote_prefill"),
    ("nixl-pull", "prefill", NIXL_PREFILL, "do_remote_decode"),
    ("cpu-staged", "decode", '{"prefill_request_id": "cmpl-u-0"}', "prefill_request_id"),
    ("mooncake-v1", "prefill", MOONCAKE_PREFILL, "do_remote_decode transfer_id"),
    ("mooncake-v1", "decode", MOONCAKE_DECODE, "do_remote_prefill remote_bootstrap_addr remote_engine_id transfer_id"),
]


@pytest.mark.parametrize(
    ("method", "leg", "text", "key"), [(m, leg, text, key) for m, leg, text, keys in REQUIRED for key in keys.split()]
)
def test_what_is_required_is_missed_by_name(method: str, leg: str, text: str, key: str) -> None:
    error = refused(method, leg, without(text, key))
    assert (error.field, error.wrong) == (key, "is missing")


def test_pulls_sizes_have_vllms_defaults() -> None:
    payload = json.loads(PULL_ANSWER)
    for key in ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode"):
        del payload[key]
    params = parse("nixl-pull", "decode", payload)
    assert isinstance(params, NixlPullDecode)
    assert (params.tp_size, params.dcp_size, params.pp_size, params.remote_num_tokens) == (1, 1, 1, None)


WRONG = [
    ("nixl-push", PUSH_AT_ONCE, "tp_size", True, "is true"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", "2", 'is "2"'),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", 2.0, "is 2.0"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", -1, "is -1"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", 0, "is 0"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", None, "is null"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", MAX_RANKS + 1, "is 4097"),
    ("nixl-push", PUSH_AT_ONCE, "tp_size", 10**5000, "is an integer of 16610 bits"),
    ("nixl-push", PUSH_AT_ONCE, "pp_size", [1], "is an array"),
    ("nixl-push", PUSH_AT_ONCE, "do_remote_prefill", 1, "is 1"),
    ("nixl-push", PUSH_AT_ONCE, "do_remote_prefill", False, "is false"),
    ("nixl-push", PUSH_AT_ONCE, "remote_host", "", "is empty"),
    ("nixl-push", PUSH_AT_ONCE, "remote_host", "a b", 'is "a b", with characters that no host has'),
    ("nixl-push", PUSH_AT_ONCE, "remote_host", "a\nb", 'is "a?b", with characters that no host has'),
    ("nixl-push", PUSH_AT_ONCE, "remote_port", 65_536, "is 65536"),
    ("nixl-push", PUSH_AT_ONCE, "remote_request_id", "\ud800", "is not UTF-8"),
    ("nixl-push", PUSH_AT_ONCE, "remote_request_id", "é" * 300, f"has 600 bytes, {MAX_ID_BYTES} are allowed"),
    ("nixl-push", PUSH_AT_ONCE, "transfer_mode", "pull", 'is "pull"'),
    ("nixl-pull", PULL_ANSWER, "transfer_mode", "push", 'is "push"'),
    ("nixl-pull", PULL_ANSWER, "dcp_size", 2, "is 2"),
    ("nixl-pull", PULL_ANSWER, "remote_num_tokens", -1, "is -1"),
    ("nixl-pull", PULL_ANSWER, "remote_blocks_expiry_time", float("nan"), "is nan"),
    ("nixl-pull", PULL_ANSWER, "remote_blocks_expiry_time", float("inf"), "is inf"),
    ("nixl-pull", PULL_ANSWER, "remote_blocks_expiry_time", True, "is true"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", None, "is null"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", {"0": 1}, "is an object"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", [[1, -1]], "holds -1"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", [[1, True]], "holds true"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", [[1], [2]], "has 2 KV-cache groups"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", [[[1]]], "holds an array"),
    ("nixl-pull", PULL_ANSWER, "remote_block_ids", [[0] * (MAX_BLOCKS + 1)], "has 65,537 block ids"),
    ("mooncake-v1", MOONCAKE_DECODE, "remote_bootstrap_addr", "10.0.0.1:8998", 'is "10.0.0.1:8998", without a scheme'),
    (
        "mooncake-v1",
        MOONCAKE_DECODE,
        "remote_bootstrap_addr",
        "http://10.0.0.1:8998/",
        'is "http://10.0.0.1:8998/": the port is "8998/", not 1 to 65,535',
    ),
    ("mooncake-v1", MOONCAKE_DECODE, "transfer_id", "", "is empty"),
    ("kv-store", LOAD, "prefix_prompt_ids", [0] * (MAX_PROMPT_TOKENS + 1), "has 1,048,577 entries"),
    ("kv-store", LOAD, "prefix_prompt_ids", [None] * (MAX_PROMPTS + 1), "has 4,097 prompts"),
    ("kv-store", LOAD, "kvcache_load_keys", [["k"] * MAX_BLOCKS, ["k"]], "has 65,537 entries"),
]


@pytest.mark.parametrize(
    ("method", "text", "key", "value", "wrong"),
    WRONG,
    ids=[f"{method}-{key}-{n}" for n, (method, _, key, *_) in enumerate(WRONG)],
)
def test_a_wrong_value_is_reported_by_field(method: str, text: str, key: str, value: Any, wrong: str) -> None:
    error = refused(method, "decode", having(text, **{key: value}))
    assert (error.field, error.wrong) == (key, wrong)


def test_a_class_made_by_hand_is_held_to_the_same() -> None:
    with pytest.raises(ParamsError, match="tp_size is true"):
        NixlPushDecode(remote_engine_id="p", remote_host="h", remote_port=1, tp_size=True, remote_request_id="r")


@pytest.mark.parametrize("payload", [[], "{}", 1, float("nan")])
def test_parameters_are_an_object(payload: object) -> None:
    assert refused("mooncake-v0", "prefill", payload).expected == "a JSON object"


def test_none_at_all_are_parameters_where_none_are_needed() -> None:
    assert parse("p2p-nccl-put", "prefill", None) == Params()
    assert refused("nixl-pull", "prefill", None).field == "do_remote_decode"


def test_method_and_leg_are_known_ones() -> None:
    assert refused("nixl", "decode", {}).field == "method"
    assert refused("nixl-pull", "answer", {}).field == "leg"


def test_keys_of_others_are_skipped() -> None:
    payload = having(PULL_ANSWER, _p_side_truncated=True, pcp_size=1, lmcache={"deep": [[[]]]})
    assert parse("nixl-pull", "decode", payload) == parse("nixl-pull", "decode", json.loads(PULL_ANSWER))


def test_a_misspelt_key_is_guessed_where_its_field_is_missed() -> None:
    payload = without(PUSH_AT_ONCE, "tp_size") | {"tpsize": 2}
    assert refused("nixl-push", "decode", payload).wrong == 'is missing (is "tpsize" meant for it?)'


def test_more_keys_than_anybody_has_are_refused() -> None:
    payload = {str(n): n for n in range(MAX_KEYS + 1)}
    assert refused("p2p-nccl-get", "decode", payload).wrong == "has 257 keys"


def test_the_extras_of_pdflow_are_read_by_every_method() -> None:
    extras = Extras(xid="xfer-6f1c/1", block_size=16, digest=2**64 - 1, weights=3, lease=((0, 17), (1, 2**64 - 1)))
    written = {
        "xid": "xfer-6f1c/1",
        "block_size": 16,
        "digest": 2**64 - 1,
        "weights": 3,
        "lease": [[0, 17], [1, 2**64 - 1]],
    }
    for method, leg, text in GOLDEN:
        params = parse(method, leg, having(text, pdflow=written))
        assert params.pdflow == extras
        assert to_json(params)["pdflow"] == written


@pytest.mark.parametrize(
    ("extras", "field", "wrong"),
    [
        ([], "pdflow", "is an array"),
        ({}, "pdflow.xid", "is missing"),
        ({"xid": "a", "leese": []}, "pdflow", 'has the unknown key "leese"'),
        ({"xid": 1}, "pdflow.xid", "is 1"),
        ({"xid": "a", "lease": [[1]]}, "pdflow.lease", "holds an entry that is no pair of integers"),
        ({"xid": "a", "lease": [[1, -1]]}, "pdflow.lease", "holds an entry that is no pair of integers"),
        ({"xid": "a", "lease": [[0, 0]] * (MAX_RANKS + 1)}, "pdflow.lease", "has 4,097 entries"),
        ({"xid": "a", "stores": [["h"]]}, "pdflow.stores", "holds an entry that is no pair of a host and a port"),
        (
            {"xid": "a", "stores": [["h", 65_536]]},
            "pdflow.stores",
            "holds an entry that is no pair of a host and a port",
        ),
        ({"xid": "a", "stores": [["h h", 1]]}, "pdflow.stores", "holds an entry that is no pair of a host and a port"),
        ({"xid": "a", "stores": [["h", 1]] * 1_001}, "pdflow.stores", "has 1,001 entries"),
        ({"xid": "a", "digest": 2**64}, "pdflow.digest", "is an integer of 65 bits"),
    ],
)
def test_under_pdflow_nothing_is_skipped(extras: object, field: str, wrong: str) -> None:
    error = refused("mooncake-v0", "decode", {"pdflow": extras})
    assert (error.field, error.wrong) == (field, wrong)


# The original's own cases, tests/test_kv_transfer_params.py of vLLM #12957.
ACCEPTED = [
    (None, None, None),
    ([None], [None], [None]),
    ([1, 2, 3], None, ["key1", "key2", "key3"]),
    ([None, [1, 2, 3]], [None, None], [None, ["key1"]]),
    ([1, 2, 3], ["key1", "key2", "key3"], None),
    ([None, [1, 2, 3]], [None, ["key1"]], [None, None]),
    ([[1, 2, 3], [1, 2]], [["key1", "key2", "key3"], ["key1", "key2"]], [None, None]),
    ([[1, 2, 3], [4, 5, 6]], [["key1", "key2", "key3"], None], [None, ["key4", "key5", "key6"]]),
    ([], [], []),
]
REFUSED = [
    (["a", "b", "c"], None, None, "prefix_prompt_ids"),
    (None, [1, 2, 3], None, "kvcache_load_keys"),
    (None, None, [1, 2, 3], "kvcache_store_keys"),
    ([[1, "a"], [3, 4]], None, None, "prefix_prompt_ids"),
    (None, [["key1", 2], ["key3"]], None, "kvcache_load_keys"),
    ([1, None], None, None, "prefix_prompt_ids"),
    ([1, [2]], None, None, "prefix_prompt_ids"),
    ([True], None, None, "prefix_prompt_ids"),
    ([-1], None, None, "prefix_prompt_ids"),
    (None, None, [""], "kvcache_store_keys"),
    (None, None, "key", "kvcache_store_keys"),
]
STORE_KEYS = ("prefix_prompt_ids", "kvcache_load_keys", "kvcache_store_keys")


@pytest.mark.parametrize("case", ACCEPTED)
def test_lists_and_lists_of_lists(case: tuple[Any, ...]) -> None:
    payload = dict(zip(STORE_KEYS, case, strict=True))
    params = parse("kv-store", "prefill", payload)
    assert isinstance(params, KVTransferParams)
    assert to_json(params) == payload


@pytest.mark.parametrize(("ids", "load", "store", "field"), REFUSED)
def test_other_lists_are_refused(ids: Any, load: Any, store: Any, field: str) -> None:
    assert refused("kv-store", "decode", dict(zip(STORE_KEYS, (ids, load, store), strict=True))).field == field


@pytest.mark.parametrize(("payload", "blocks"), [([[1, 2]], (1, 2)), ([1, 2], (1, 2)), ([], ()), ([[]], ())])
def test_one_group_may_be_a_bare_list(payload: Any, blocks: tuple[int, ...]) -> None:
    params = parse("nixl-pull", "decode", having(PULL_ANSWER, remote_block_ids=payload))
    assert isinstance(params, NixlPullDecode)
    assert params.remote_block_ids == blocks


def test_every_method_has_both_legs() -> None:
    assert all(set(legs) == {"prefill", "decode"} for legs in PARAMS.values())
