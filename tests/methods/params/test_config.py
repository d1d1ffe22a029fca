"""--kv-transfer-config of every connector: the published ones, the defaults, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.params.config import CONNECTORS, EXTRA, KvTransferConfig, read_kv_transfer_config
from pdflow.methods.params.connectors import (
    CpuExtra,
    MooncakeStoreExtra,
    MooncakeV0Extra,
    MooncakeV1Extra,
    NixlExtra,
    P2pNcclExtra,
)
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.parse import PARAMS
from pdflow.methods.params.settings import MAX_FILE_CHARS

GB = 10**9

CPU = """{"kv_connector":"CPUConnector","kv_role":"kv_consumer",
    "kv_connector_extra_config": {"host": "localhost", "port": "54321", "size": 8}}"""
"""From the review of vLLM #18332."""

NCCL_P = """{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":"1e1","kv_port":"21001",
    "kv_connector_extra_config":{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20001"}}"""
NCCL_D = """{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_buffer_size":"8e9","kv_port":"22001",
    "kv_connector_extra_config":{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20002","send_type":"GET",
    "mem_pool_size_gb":"33","nccl_num_channels":"16"}}"""
"""From the design document of vLLM #18242; the last three keys are ours."""

MOONCAKE_V0 = """{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,
    "kv_buffer_size":2e9}"""
"""From Mooncake's guide for V0."""

MOONCAKE_V1 = '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}'
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
PUSH = """{"kv_connector":"NixlPushConnector","kv_role":"kv_producer","kv_load_failure_policy":"recompute",
    "kv_connector_extra_config":{"kv_lease_duration":60,"decoder_kv_blocks_ttl":100,"backends":["UCX","GDS"]}}"""
STORE = '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_producer"}'


def repr_short(source: object) -> str:
    return ascii(source)[:20]


def read(text: str, **changes: Any) -> KvTransferConfig:
    return read_kv_transfer_config(json.loads(text) | changes)


def refused(source: object) -> ParamsError:
    with pytest.raises(ParamsError) as caught:
        read_kv_transfer_config(source)
    return caught.value


@pytest.mark.parametrize(
    ("text", "method", "extra"),
    [
        (CPU, "cpu-staged", CpuExtra(host="localhost", port=54_321, size=8)),
        (NCCL_P, "p2p-nccl-put-async", P2pNcclExtra(proxy_ip="10.0.1.1", proxy_port=30_001, http_port=20_001)),
        (MOONCAKE_V0, "mooncake-v0", MooncakeV0Extra()),
        (MOONCAKE_V1, "mooncake-v1", MooncakeV1Extra()),
        (NIXL, "nixl-pull", NixlExtra()),
        (STORE, "kv-store", MooncakeStoreExtra()),
    ],
)
def test_published_configurations(text: str, method: str, extra: object) -> None:
    config = read_kv_transfer_config(text)
    assert config == read_kv_transfer_config(text.encode())
    assert (config.method, config.kv_connector_extra_config, config.unread) == (method, extra, ())
    assert method in PARAMS


def test_numbers_written_as_texts() -> None:
    config = read_kv_transfer_config(NCCL_D)
    assert (config.kv_buffer_size, config.kv_port, config.method) == (8 * GB, 22_001, "p2p-nccl-get")
    assert read_kv_transfer_config(NCCL_P).kv_buffer_size == 10
    assert read_kv_transfer_config(MOONCAKE_V0).kv_buffer_size == 2 * GB
    extra = config.kv_connector_extra_config
    assert isinstance(extra, P2pNcclExtra)
    assert (extra.mem_pool_size_gb, extra.nccl_num_channels, extra.registers) == (33, 16, True)


def test_defaults_are_those_of_the_originals() -> None:
    """vLLM #18242, and vLLM 0.32.0's NIXL and Mooncake connectors."""
    nccl = P2pNcclExtra()
    assert (nccl.send_type, nccl.mem_pool_size_gb, nccl.nccl_num_channels) == ("PUT_ASYNC", 32, 8)
    assert not nccl.registers
    config = read_kv_transfer_config(NIXL)
    assert (config.kv_port, config.kv_buffer_size, config.kv_ip) == (14_579, GB, "127.0.0.1")
    assert (config.kv_load_failure_policy, config.kv_parallel_size, config.engine_id) == ("fail", 1, None)
    nixl = NixlExtra()
    assert (nixl.backends, nixl.num_threads, nixl.kv_lease_duration, nixl.engine_ttl) == (("UCX",), 4, 30, 3600)
    assert (nixl.watchdog_s, nixl.kv_recompute_threshold, nixl.enforce_handshake_compat) == (480, 64, True)
    mooncake = MooncakeV1Extra()
    assert (mooncake.num_workers, mooncake.mooncake_protocol, mooncake.device_name) == (10, "rdma", "")
    store = MooncakeStoreExtra()
    assert (store.load_async, store.lookup_async, store.enable_lookup, store.save_decode_cache) == (
        True,
        False,
        True,
        False,
    )


def test_what_is_derived() -> None:
    push = read_kv_transfer_config(PUSH)
    extra = push.kv_connector_extra_config
    assert isinstance(extra, NixlExtra)
    assert (push.method, extra.watchdog_s, extra.backends) == ("nixl-push", 100, ("UCX", "GDS"))
    assert P2pNcclExtra(mem_pool_size_gb=33).mem_pool_bytes == 64 << 30
    assert P2pNcclExtra(mem_pool_size_gb=32).mem_pool_bytes == 32 << 30
    assert CpuExtra(host="h", port=1, size=0.7).ring_bytes == int(0.7 * (1 << 30)) // 4096 * 4096


@pytest.mark.parametrize("send_type", ["PUT", "PUT_ASYNC", "GET"])
def test_the_send_type_is_the_method(send_type: str) -> None:
    config = read(NCCL_P, **{EXTRA: {"send_type": send_type}})
    assert config.method == "p2p-nccl-" + send_type.lower().replace("_", "-")


def test_a_method_for_every_connector() -> None:
    inner = {"CPUConnector": json.loads(CPU)[EXTRA]}
    for name in CONNECTORS:
        config = {"kv_connector": name, "kv_role": "kv_consumer", EXTRA: inner.get(name, {})}
        assert read_kv_transfer_config(config).method in PARAMS


def test_keys_that_nobody_reads_are_named() -> None:
    config = read(STORE, kv_connector_module_path="a.b", **{EXTRA: {"load_async": False, "lookup_rpc_port": 1}})
    assert config.unread == ("kv_connector_module_path", f"{EXTRA}.lookup_rpc_port")


@pytest.mark.parametrize(
    ("text", "changes", "field", "wrong"),
    [
        (NIXL, {"kv_connector": None}, "kv_connector", "is missing"),
        (NIXL, {"kv_connector": "LMCacheConnectorV1"}, "kv_connector", 'is "LMCacheConnectorV1"'),
        (NIXL, {"kv_role": "producer"}, "kv_role", 'is "producer"'),
        (NIXL, {"kv_buffer_size": 0}, "kv_buffer_size", "is 0"),
        (NIXL, {"kv_buffer_size": "many"}, "kv_buffer_size", 'is "many"'),
        (NIXL, {"kv_buffer_size": "1e999"}, "kv_buffer_size", "is inf"),
        (NIXL, {"kv_buffer_size": "4gb"}, "kv_buffer_size", 'is "4gb"'),
        (NIXL, {"kv_port": 1.5}, "kv_port", "is 1.5"),
        (NIXL, {"kv_port": True}, "kv_port", "is true"),
        (NIXL, {"kv_buffer_device": "npu"}, "kv_buffer_device", 'is "npu"'),
        (NIXL, {"kv_load_failure_policy": "retry"}, "kv_load_failure_policy", 'is "retry"'),
        (NIXL, {EXTRA: []}, EXTRA, "is an array"),
        (NIXL, {EXTRA: None}, EXTRA, "is null"),
        (NIXL, {EXTRA: {"backends": []}}, f"{EXTRA}.backends", "is an array"),
        (NIXL, {EXTRA: {"backends": "UCX"}}, f"{EXTRA}.backends", 'is "UCX"'),
        (NIXL, {EXTRA: {"backends": ["UCX", 1]}}, f"{EXTRA}.backends", "holds an entry that is 1"),
        (NIXL, {EXTRA: {"kv_lease_duration": 0}}, f"{EXTRA}.kv_lease_duration", "is 0"),
        (NIXL, {EXTRA: {"decoder_kv_blocks_ttl": float("nan")}}, f"{EXTRA}.decoder_kv_blocks_ttl", "is nan"),
        (PUSH, {EXTRA: {"bidirectional_kv_xfer": True}}, f"{EXTRA}.bidirectional_kv_xfer", "is true"),
        (CPU, {EXTRA: {"host": "h", "port": 1}}, f"{EXTRA}.size", "is missing"),
        (CPU, {EXTRA: {"host": "h", "port": 1, "size": 0}}, f"{EXTRA}.size", "is 0"),
        (CPU, {"kv_role": "kv_both"}, "kv_role", 'is "kv_both"'),
        (NCCL_P, {"kv_port": 0}, "kv_port", "is 0"),
        (NCCL_P, {"kv_port": "0"}, "kv_port", "is 0"),
        (NCCL_P, {EXTRA: {"send_type": "PULL"}}, f"{EXTRA}.send_type", 'is "PULL"'),
        (
            NCCL_P,
            {EXTRA: {"proxy_ip": "p", "proxy_port": "1"}},
            f"{EXTRA}.http_port",
            "is missing, and a proxy is named",
        ),
        (MOONCAKE_V0, {"kv_rank": 1}, "kv_rank", "is 1"),
        (MOONCAKE_V0, {"kv_rank": 2}, "kv_rank", "is 2"),
        (MOONCAKE_V0, {"kv_parallel_size": 3}, "kv_parallel_size", "is 3"),
        (MOONCAKE_V0, {"kv_buffer_device": "cpu"}, "kv_buffer_device", 'is "cpu"'),
        (MOONCAKE_V1, {EXTRA: {"num_workers": 0}}, f"{EXTRA}.num_workers", "is 0"),
    ],
)
def test_what_is_refused(text: str, changes: dict[str, Any], field: str, wrong: str) -> None:
    error = refused(json.loads(text) | changes)
    assert (error.field, error.wrong) == (field, wrong)


@pytest.mark.parametrize("empty", ["", None])
def test_half_a_proxy_is_none(empty: str | None) -> None:
    config = read(NCCL_P, **{EXTRA: {"proxy_ip": "10.0.0.1", "proxy_port": empty}})
    extra = config.kv_connector_extra_config
    assert isinstance(extra, P2pNcclExtra)
    assert not extra.registers


def test_an_extra_of_another_connector_is_refused() -> None:
    with pytest.raises(ParamsError, match="what CPUConnector reads"):
        KvTransferConfig(kv_connector="CPUConnector", kv_role="kv_producer", kv_connector_extra_config=NixlExtra())


@pytest.mark.parametrize(
    "source",
    [
        "",
        "[]",
        "1",
        "NaN",
        '{"kv_connector": NaN}',
        "{" * 50_000,
        '{"a":' * 10_000,
        "\ud800",
        b"\xff\xfe",
        None,
        [],
        7,
        {1: 2},
        NIXL + " " * MAX_FILE_CHARS,
        '{"kv_connector": 1' + "0" * 5_000 + "}",
    ],
    ids=repr_short,
)
def test_no_text_raises_anything_else(source: object) -> None:
    assert str(refused(source)).isprintable()


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["1e5", "9" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
OUTER = [field.name for field in attrs.fields(KvTransferConfig)]
INNER = sorted({field.name for kinds in CONNECTORS.values() for kind in kinds for field in attrs.fields(kind)})


@given(
    st.sampled_from(sorted(CONNECTORS)),
    st.dictionaries(st.sampled_from(OUTER), anything, max_size=3),
    st.dictionaries(st.sampled_from(INNER), anything, max_size=3),
)
def test_any_config_is_read_or_raises_params_error(name: str, outer: dict[str, Any], inner: dict[str, Any]) -> None:
    config = {"kv_role": "kv_producer", EXTRA: inner} | outer | {"kv_connector": name}
    try:
        read = read_kv_transfer_config(config)
    except ParamsError as error:
        read = error
    assert str(read).isprintable() if isinstance(read, ParamsError) else read.method in PARAMS
