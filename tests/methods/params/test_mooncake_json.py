"""mooncake.json as Mooncake's guides and users write it, and what of it is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.fields import plain
from pdflow.methods.params.mooncake_json import PipeFile, Ports, StoreFile, StoreV0File, read_mooncake_json

PIPE = """{
  "prefill_url": "192.168.0.137:13003",
  "decode_url": "192.168.0.139:13003",
  "metadata_server": "http://192.168.0.139:8080/metadata",
  "metadata_backend": "http",
  "protocol": "rdma",
  "device_name": "erdma_0, erdma_1"
}"""
"""Mooncake's guide for V0, with one of the metadata servers that it names."""

USERS = """{
  "prefill_url": "127.0.0.1:8144",
  "decode_url": "127.0.0.1:8149",
  "metadata_server": "127.0.0.1:2333",
  "metadata_backend": "etcd",
  "protocol": "rdma",
  "device_name": "mlx5_0,mlx5_1"
}"""
"""From the thread of vLLM #10884."""

STORE_V0 = """{
  "local_hostname": "192.168.0.137",
  "metadata_server": "http://192.168.0.137:8080/metadata",
  "protocol": "tcp",
  "device_name": "",
  "master_server_address": "192.168.0.137:50001"
}"""
STORE = """{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "127.0.0.1:50051",
  "global_segment_size": "1GB",
  "local_buffer_size": "64mb",
  "protocol": "rdma",
  "device_name": "mlx5_0"
}"""


def refused(text: str, **changes: Any) -> ParamsError:
    with pytest.raises(ParamsError) as caught:
        read_mooncake_json(json.loads(text) | changes)
    return caught.value


def pipe(**changes: Any) -> PipeFile:
    file = read_mooncake_json(json.loads(PIPE) | changes)
    assert isinstance(file, PipeFile)
    return file


def test_v0s_pipe() -> None:
    file = read_mooncake_json(PIPE)
    assert isinstance(file, PipeFile)
    assert file.metadata_url == "http://192.168.0.139:8080/metadata"
    assert (file.protocol, file.devices) == ("rdma", ("erdma_0", "erdma_1"))
    assert file.prefill_ports(0) == Ports(engine=13_003, data=13_012, ack=13_013)
    assert file.decode_ports(3) == Ports(engine=13_006, data=13_018, ack=13_019)


def test_defaults_of_each_kind() -> None:
    plain = PipeFile(prefill_url="a:1", decode_url="b:1", metadata_server="P2PHANDSHAKE")
    assert (plain.protocol, plain.device_name, plain.devices, plain.metadata_url) == ("tcp", "", (), None)
    landed = read_mooncake_json(STORE_V0)
    assert isinstance(landed, StoreV0File)
    assert (landed.global_segment_size, landed.local_buffer_size, landed.protocol) == (
        3_355_443_200,
        1_073_741_824,
        "tcp",
    )
    less = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "m:50051"}
    today = read_mooncake_json(less)
    assert isinstance(today, StoreFile)
    assert (today.global_segment_size, today.local_buffer_size) == (4 << 30, 4 << 30)
    assert (today.protocol, today.mode, today.enable_offload) == ("rdma", "embedded", False)


def test_sizes_with_units() -> None:
    file = read_mooncake_json(STORE)
    assert isinstance(file, StoreFile)
    assert (file.global_segment_size, file.local_buffer_size) == (1 << 30, 64 << 20)
    assert read_mooncake_json(json.loads(STORE) | {"local_buffer_size": "1.5gb"}) == attrs.evolve(
        file, local_buffer_size=3 << 29
    )
    assert read_mooncake_json(json.loads(STORE) | {"local_buffer_size": "2147483648"}) == attrs.evolve(
        file, local_buffer_size=2 << 30
    )


def test_equal_urls_put_d_a_hundred_ports_higher() -> None:
    file = pipe(decode_url="192.168.0.137:13003")
    assert file.decode_ports(0).engine == 13_103
    assert file.prefill_ports(0).engine == 13_003


@pytest.mark.parametrize(("apart", "room"), [(1, 0), (2, 1), (9, 0), (10, 0), (5, 2), (11, 1), (49, 20), (50, 20)])
def test_ports_on_one_host_have_room_for_ranks(apart: int, room: int) -> None:
    """A rank takes base + rank, and two ports from base + 9 on: the room is that before the first that both take."""
    text = f"192.168.0.137:{13_003 + apart}"
    if not room:
        error = refused(PIPE, decode_url=text)
        assert error.field == "decode_url"
        assert error.wrong.startswith(f"has a port {apart} from prefill_url's, on the same host: ports of 0 ranks fit")
        return
    file = pipe(decode_url=text)
    assert file.room == room
    both = [{port for rank in range(room) for port in of(rank)} for of in (file.prefill_ports, file.decode_ports)]
    assert both[0].isdisjoint(both[1])
    file.check_ranks(room)
    with pytest.raises(ParamsError, match=f"ports of {room} ranks fit between, and engines have {room + 1}"):
        file.check_ranks(room + 1)


@pytest.mark.parametrize("port", [12_953, 13_053])
def test_ports_on_one_host_may_be_50_apart(port: int) -> None:
    assert pipe(decode_url=f"192.168.0.137:{port}").decode_port == port


def test_a_users_file_with_etcd_is_read() -> None:
    file = read_mooncake_json(USERS)
    assert isinstance(file, PipeFile)
    assert (file.metadata_url, file.room, file.devices) == ("etcd://127.0.0.1:2333", 2, ("mlx5_0", "mlx5_1"))


def test_keys_that_are_not_read_are_named() -> None:
    file = read_mooncake_json(json.loads(STORE) | {"transfer_timeout": 60, "unread": [1]})
    assert file.unread == ("transfer_timeout", "unread")
    assert plain(file).keys().isdisjoint(("transfer_timeout", "unread"))
    assert read_mooncake_json(plain(file)) == attrs.evolve(file, unread=())


@pytest.mark.parametrize(
    ("server", "backend", "url"),
    [
        ("http://m:8080/metadata", None, "http://m:8080/metadata"),
        ("http://metadata/endpoint", None, "http://metadata/endpoint"),
        ("https://m/metadata", None, "https://m/metadata"),
        ("m:8080/metadata", "http", "http://m:8080/metadata"),
        ("http://m:8080/metadata", "HTTP", "http://m:8080/metadata"),
        ("P2PHANDSHAKE", None, None),
        ("etcd://m:2379", None, "etcd://m:2379"),
        ("m:2379", "etcd", "etcd://m:2379"),
        ("m:2379", "ETCD", "etcd://m:2379"),
        ("m:2379", None, "etcd://m:2379"),
        ("etcd://m:2379,n:2379", "etcd", "etcd://m:2379,n:2379"),
        ("etcd://m:12379;m:22379", None, "etcd://m:12379;m:22379"),
        ("redis://m:6379", None, "redis://m:6379"),
        ("redis://m:6379/0", "redis", "redis://m:6379/0"),
        ("m:6379", "redis", "redis://m:6379"),
    ],
)
def test_metadata_servers(server: str, backend: str | None, url: str | None) -> None:
    assert pipe(metadata_server=server, metadata_backend=backend).metadata_url == url


@pytest.mark.parametrize(
    ("server", "backend"),
    [
        ("http://m:2379", "etcd"),
        ("etcd://m:2379", "redis"),
        ("m:2379", "zookeeper"),
        ("P2PHANDSHAKE", "etcd"),
        ("etcd://", None),
        ("etcd://m", None),
        ("etcd://m:2379,", None),
        ("m:2379,n", "etcd"),
        ("redis://", None),
    ],
)
def test_metadata_servers_that_are_refused(server: str, backend: str | None) -> None:
    error = refused(PIPE, metadata_server=server, metadata_backend=backend)
    assert error.field == "metadata_server"
    assert "etcd://" in error.expected
    assert "P2PHANDSHAKE" in error.expected
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "server", ["", "http://", "http:///metadata", "ftp://m", "http://a b", "p2phandshake", 7, None]
)
def test_what_no_metadata_server_is(server: object) -> None:
    assert refused(STORE, metadata_server=server).field == "metadata_server"


@pytest.mark.parametrize(
    ("text", "changes", "field"),
    [
        (PIPE, {"prefill_url": "192.168.0.137"}, "prefill_url"),
        (PIPE, {"prefill_url": "http://192.168.0.137:1"}, "prefill_url"),
        (PIPE, {"decode_url": "192.168.0.139:0"}, "decode_url"),
        (PIPE, {"prefill_url": "h:65500", "decode_url": "h:65500"}, "decode_url"),
        (PIPE, {"protocol": "nvlink"}, "protocol"),
        (PIPE, {"device_name": ["erdma_0"]}, "device_name"),
        (STORE, {"master_server_address": "m"}, "master_server_address"),
        (STORE, {"global_segment_size": "1tb"}, "global_segment_size"),
        (STORE, {"global_segment_size": -1}, "global_segment_size"),
        (STORE, {"local_buffer_size": 0}, "local_buffer_size"),
        (STORE, {"mode": "standalone-store"}, "global_segment_size"),
        (STORE, {"mode": "both"}, "mode"),
        (STORE_V0, {"metadata_server": "etcd://m"}, "metadata_server"),
        ("{}", {"protocol": "tcp"}, "mooncake.json"),
    ],
)
def test_what_is_refused(text: str, changes: dict[str, Any], field: str) -> None:
    assert refused(text, **changes).field == field


def test_a_standalone_store_takes_nothing_from_ranks() -> None:
    file = read_mooncake_json(json.loads(STORE) | {"mode": "standalone-store", "global_segment_size": 0})
    assert isinstance(file, StoreFile)
    assert file.global_segment_size == 0


@pytest.mark.parametrize("key", ["prefill_url", "decode_url", "metadata_server"])
def test_what_a_pipe_needs(key: str) -> None:
    config = json.loads(PIPE)
    del config[key]
    with pytest.raises(ParamsError, match=f"^{key} is missing"):
        read_mooncake_json(config)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["h:1", "etcd://x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
KEYS = sorted({field.name for kind in (PipeFile, StoreV0File, StoreFile) for field in attrs.fields(kind)})


@given(st.sampled_from([PIPE, STORE_V0, STORE]), st.dictionaries(st.sampled_from(KEYS), anything, max_size=3))
def test_any_file_is_read_or_raises_params_error(text: str, changes: dict[str, Any]) -> None:
    try:
        read = read_mooncake_json(json.loads(text) | changes)
    except ParamsError as error:
        read = error
    if isinstance(read, ParamsError):
        assert str(read).isprintable()
    else:
        assert read_mooncake_json(plain(read)) == attrs.evolve(read, unread=())
