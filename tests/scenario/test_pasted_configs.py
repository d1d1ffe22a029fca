"""The configuration files pasted in the five PRs and in the guides that they are documented by, as they stand there.

Each one, named by `[transfer] config`, gives a scenario that `pdflow validate` accepts; what a scenario does not
honour of it is listed or noted with its line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario

SCENARIO = """
[workload]
requests = 10
arrival = { process = "poisson", rate_rps = 1.0 }
input_tokens = 100
output_tokens = 10
[model]
preset = "llama-3.1-8b"
[[pool]]
name = "p"
role = "prefill"
gpu = "h100-sxm"
tp = TP
[[pool]]
name = "d"
role = "decode"
gpu = "h100-sxm"
tp = TP
gpu_memory_utilization = 0.7
[transfer]
config = "pasted.json"
"""

CONTACTS_NONE = "and no engine contacts it: engines exchange their addresses in the handshake (network.handshake_s)"


def loaded(folder: Path, text: str, tp: int = 1) -> ResolvedScenario:
    (folder / "pasted.json").write_text(text)
    (folder / "s.toml").write_text(SCENARIO.replace("TP", str(tp)))
    return load(folder / "s.toml")


def given(scenario: ResolvedScenario, *keys: str) -> dict[str, Any]:
    transfer, network = scenario.transfer, scenario.network
    return {key: getattr(transfer, key) if hasattr(transfer, key) else getattr(network, key) for key in keys}


def notes(scenario: ResolvedScenario) -> list[str]:
    """The notes on the file, each from its line on."""
    return [note.partition("pasted.json:")[2] for note in scenario.notes if "pasted.json" in note]


def without_effect(scenario: ResolvedScenario) -> str:
    return "".join(text.removeprefix("no effect: ") for text in scenario.from_config if text.startswith("no effect: "))


def test_pr_10884_the_users_mooncake_json_with_etcd(tmp_path: Path) -> None:
    """From the thread: one host, the ports 5 apart, which serves with one NIC."""
    scenario = loaded(
        tmp_path,
        """{
"prefill_url": "127.0.0.1:8144",
"decode_url": "127.0.0.1:8149",
"metadata_server": "127.0.0.1:2333",
"metadata_backend": "etcd",
"protocol": "rdma",
"device_name": "mlx5_0,mlx5_1"
}""",
    )
    assert given(scenario, "method", "nics_per_rank") == {"method": "mooncake-v0", "nics_per_rank": 2}
    assert without_effect(scenario) == "decode_url, metadata_server, metadata_backend"
    assert notes(scenario) == [
        f"4: metadata_server names etcd, {CONTACTS_NONE}",
        "3: decode_url has a port 5 from prefill_url's, on the same host: enough for tp = 2; Mooncake asks for 50",
    ]


def test_pr_10884_ports_that_v0_cannot_bind(tmp_path: Path) -> None:
    text = '{"prefill_url": "h:8144", "decode_url": "h:8149",\n"metadata_server": "h:2333"}'
    assert loaded(tmp_path, text, tp=2).transfer.method == "mooncake-v0"
    with pytest.raises(ScenarioError, match=r"line 1: decode_url has a port 5 .*: ports of 2 ranks fit .* have 4"):
        loaded(tmp_path, text, tp=4)


GUIDE = """{
  "prefill_url": "192.168.0.137:13003",
  "decode_url": "192.168.0.139:13003",
  "metadata_server": "192.168.0.139:2379",
  "metadata_backend": "etcd",
  "protocol": "PROTOCOL",
  "device_name": "DEVICE"
}"""
"""Mooncake's guide vllm-integration-v0.2, of #10884."""


@pytest.mark.parametrize(
    "server", ["192.168.0.137:2379", "etcd://192.168.0.137:2379", "etcd://192.168.0.137:2379,192.168.0.138:2379"]
)
def test_pr_10884_the_guides_mooncake_json_over_rdma(tmp_path: Path, server: str) -> None:
    text = GUIDE.replace("PROTOCOL", "rdma").replace("DEVICE", "erdma_0").replace("192.168.0.139:2379", server)
    scenario = loaded(tmp_path, text, tp=4)
    assert given(scenario, "method", "nics_per_rank") == {"method": "mooncake-v0", "nics_per_rank": 1}
    assert notes(scenario) == [f"4: metadata_server names etcd, {CONTACTS_NONE}"]


def test_pr_10884_the_guides_mooncake_json_over_tcp(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, GUIDE.replace("PROTOCOL", "tcp").replace("DEVICE", ""))
    assert given(scenario, "method", "preset") == {"method": "mooncake-v0", "preset": "tcp-25g"}


@pytest.mark.parametrize(
    ("server", "kind"), [("redis://192.168.0.137:6379", "redis"), ("http://192.168.0.137:8080/metadata", "http")]
)
def test_pr_10884_the_guides_other_metadata_servers(tmp_path: Path, server: str, kind: str) -> None:
    text = GUIDE.replace("PROTOCOL", "tcp").replace("DEVICE", "").replace('  "metadata_backend": "etcd",\n', "")
    scenario = loaded(tmp_path, text.replace("192.168.0.139:2379", server))
    assert notes(scenario) == [f"4: metadata_server names {kind}, {CONTACTS_NONE}"]
    bare = loaded(tmp_path, text)
    assert notes(bare) == [
        f"4: metadata_server names etcd, which Mooncake assumes without a scheme, {CONTACTS_NONE}",
    ]


@pytest.mark.parametrize(("role", "rank", "size"), [("kv_producer", 0, 2_000_000_000), ("kv_consumer", 1, 10**9)])
def test_pr_10884_the_guides_kv_transfer_config(tmp_path: Path, role: str, rank: int, size: int) -> None:
    text = (
        f'{{"kv_connector":"MooncakeConnector","kv_role":"{role}","kv_rank":{rank},"kv_parallel_size":2,'
        f'"kv_buffer_size":2e9}}'
    )
    scenario = loaded(tmp_path, text)
    assert given(scenario, "method", "kv_buffer_size") == {"method": "mooncake-v0", "kv_buffer_size": size}
    assert notes(scenario) == []


@pytest.mark.parametrize(("protocol", "device"), [("rdma", "erdma_0"), ("tcp", "")])
def test_pr_12957_the_guides_mooncake_json_with_etcd(tmp_path: Path, protocol: str, device: str) -> None:
    """Mooncake's guide vllm-integration-v1, of the store connector that #12957 prepares."""
    scenario = loaded(
        tmp_path,
        f"""{{
    "local_hostname": "192.168.0.137",
    "metadata_server": "etcd://192.168.0.137:2379",
    "protocol": "{protocol}",
    "device_name": "{device}",
    "master_server_address": "192.168.0.137:50001"
}}""",
    )
    assert given(scenario, "method", "store_bytes") == {"method": "kv-store", "store_bytes": 3_355_443_200}
    assert scenario.network.preset == {"rdma": "rdma-400g", "tcp": "tcp-25g"}[protocol]
    assert notes(scenario) == [f"3: metadata_server names etcd, {CONTACTS_NONE}"]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_pr_12957_the_guides_kv_transfer_config(tmp_path: Path, role: str) -> None:
    scenario = loaded(tmp_path, f'{{"kv_connector":"MooncakeStoreConnector","kv_role":"{role}"}}')
    assert (scenario.transfer.method, notes(scenario)) == ("kv-store", [])


@pytest.mark.parametrize(
    ("role", "buffer", "port", "http", "kept"),
    [
        ("kv_producer", "1e1", "21001", "20001", 1_000_000_000),
        ("kv_consumer", "8e9", "22001", "20002", 8_000_000_000),
        ("kv_consumer", "8e9", "24001", "20004", 8_000_000_000),
    ],
)
def test_pr_18242_1p3d_and_3p1d(tmp_path: Path, role: str, buffer: str, port: str, http: str, kept: int) -> None:
    """The commands of the design document of P2P NCCL in vLLM, which the PR pastes."""
    scenario = loaded(
        tmp_path,
        f'{{"kv_connector":"P2pNcclConnector","kv_role":"{role}","kv_buffer_size":"{buffer}","kv_port":"{port}",'
        f'"kv_connector_extra_config":{{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"{http}"}}}}',
    )
    assert given(scenario, "method", "kv_buffer_size") == {"method": "p2p-nccl-put-async", "kv_buffer_size": kept}
    inside = ", ".join(f"kv_connector_extra_config.{key}" for key in ("proxy_ip", "proxy_port", "http_port"))
    unused = "kv_buffer_size, " if role == "kv_producer" else ""
    assert (without_effect(scenario), notes(scenario)) == (f"{unused}kv_port, {inside}", [])


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_pr_18332_the_justfile(tmp_path: Path, role: str) -> None:
    scenario = loaded(
        tmp_path,
        f'{{"kv_connector":"CPUConnector","kv_role":"{role}",'
        f'"kv_connector_extra_config": {{"host": "localhost", "port": "54321", "size": 8}}}}',
    )
    assert given(scenario, "method", "host_buffer_bytes") == {"method": "cpu-staged", "host_buffer_bytes": 8 << 30}
    assert without_effect(scenario) == "kv_connector_extra_config.host, kv_connector_extra_config.port"


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_pr_35264_push(tmp_path: Path, role: str) -> None:
    """The PR pastes none; this is what its integration test and Dynamo's guide start engines with."""
    scenario = loaded(tmp_path, f'{{"kv_connector":"NixlPushConnector","kv_role":"{role}"}}')
    assert given(scenario, "method", "push_registration_timeout_s") == {
        "method": "nixl-push",
        "push_registration_timeout_s": 480,
    }
    assert (without_effect(scenario), notes(scenario)) == ("", [])


def test_pr_35264_the_benchmark_of_pull_and_push(tmp_path: Path) -> None:
    """The command of the benchmark that followed the PR (vLLM #57567), over EFA."""
    scenario = loaded(
        tmp_path,
        """{"kv_connector":"NixlPushConnector","kv_buffer_device":"cuda","kv_role":"kv_producer",
"engine_id":"prefill-engine-001","kv_rank":0,"kv_parallel_size":2,"kv_load_failure_policy":"recompute",
"kv_connector_extra_config":{"backends":["LIBFABRIC"],
"bidirectional_kv_xfer":false,"enable_cross_layers_blocks":"True"}}""",
    )
    assert given(scenario, "method", "kv_buffer_device") == {"method": "nixl-push", "kv_buffer_device": "cuda"}
    assert notes(scenario) == [
        "2: kv_load_failure_policy has no effect: router.on_failure decides what follows a failed load",
        "3: backends has no effect: NIXL's backend is known by its speed and latency; set those in [network]",
    ]
    assert scenario.from_config[-1] == "not read: kv_connector_extra_config.enable_cross_layers_blocks"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both",\n"kv_connector_extra_config":'
            '{"save_decode_cache": true, "load_async": true}}',
            "2: save_decode_cache has no effect: KV of generated tokens is not stored",
        ),
        (
            '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer",\n"kv_buffer_device":"cpu"}',
            "2: kv_buffer_device has no effect: this connector transfers KV from one kind of memory only",
        ),
        (
            '{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_connector_extra_config":\n'
            '{"mooncake_protocol": "efa"}}',
            "2: mooncake_protocol efa has no preset of its own; set [network]",
        ),
        (
            '{"metadata_server": "P2PHANDSHAKE", "master_server_address": "m:50051",\n"mode": "standalone-store",'
            '"global_segment_size": 0}',
            "2: mode has no effect: the file does not give the memory of a standalone store; set transfer.store_bytes",
        ),
    ],
)
def test_what_is_not_honoured_is_noted_with_its_line(tmp_path: Path, text: str, note: str) -> None:
    assert notes(loaded(tmp_path, text)) == [note]


def test_keys_of_mooncake_json_that_nothing_reads_are_named(tmp_path: Path) -> None:
    text = GUIDE.replace("PROTOCOL", "tcp").replace("DEVICE", "").replace("{", '{"transfer_timeout": 60, "unread": 1,')
    assert loaded(tmp_path, text).from_config[-1] == "not read: transfer_timeout, unread"
