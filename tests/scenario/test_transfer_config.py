"""vLLM's --kv-transfer-config and mooncake.json in a scenario: what they say of it, what they don't, and what is wrong.

Which texts are taken at all is tests/methods/params; here they are the originals' own examples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.load import load
from pdflow.scenario.reading.locate_json import json_key_lines
from pdflow.scenario.show import scenario_view
from pdflow.scenario.transfer_config import TransferConfigError, read_transfer_config

CPU = (
    '{"kv_connector":"CPUConnector","kv_role":"kv_producer","kv_connector_extra_config": '
    '{"host": "localhost", "port": "54321", "size": 8}}'
)
"""From the review of vLLM #18332."""

USERS = """{
"prefill_url": "127.0.0.1:8144",
"decode_url": "127.0.0.1:8149",
"metadata_server": "127.0.0.1:2333",
"metadata_backend": "etcd",
"protocol": "rdma",
"device_name": "mlx5_0,mlx5_1"
}"""
"""From the thread of vLLM #10884."""
PIPE = USERS.replace('"127.0.0.1:2333"', '"http://127.0.0.1:8080/metadata"').replace("etcd", "http").replace("49", "99")
"""The same with a metadata server over HTTP, and ports apart."""

NCCL_P = """{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":"1e1","kv_port":"21001",
    "kv_connector_extra_config":{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20001"}}"""
NCCL_D = NCCL_P.replace("producer", "consumer").replace("1e1", "8e9")
"""From the design document of vLLM #18242."""

MOONCAKE_V0 = """{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,
    "kv_buffer_size":2e9}"""
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
  "device_name": "mlx5_0"
}"""
"""From Mooncake's guides."""

NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'

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
tp = 2
[[pool]]
name = "d"
role = "decode"
gpu = "h100-sxm"
tp = 2
gpu_memory_utilization = 0.8
[transfer]
config = "conf/engine.json"
"""


def scenario(folder: Path, text: str | bytes, more: str = "") -> Path:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf/engine.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    file = folder / "s.toml"
    file.write_text(SCENARIO + more)
    return file


def changed(text: str, extra: dict[str, Any] | None = None, **changes: Any) -> str:
    """The same text but for some keys."""
    config = json.loads(text) | changes
    if extra is not None:
        config["kv_connector_extra_config"] = config.get("kv_connector_extra_config", {}) | extra
    return json.dumps(config)


def values(text: str, tp: int = 1) -> dict[str, Any]:
    config = read_transfer_config(text, {"pool": [{"role": "prefill", "tp": 8}, {"role": "decode", "tp": tp}]})
    return {".".join(map(str, value.key)): value.value for value in config.values}


def test_a_config_of_the_cpu_connector() -> None:
    assert values(CPU) == {"transfer.method": "cpu-staged", "transfer.host_buffer_bytes": 8 << 30}


def test_configs_of_p2p_nccl_set_the_memory_of_their_own_side() -> None:
    both = {"transfer.nccl_num_channels": 8}
    assert values(NCCL_P) == {"transfer.method": "p2p-nccl-put-async", **both}
    ours = {"transfer.kv_buffer_size": 8_000_000_000, "transfer.mem_pool_size_gb": 32}
    assert values(NCCL_D) == {"transfer.method": "p2p-nccl-put-async", **ours, **both}
    assert values(changed(NCCL_D, {"send_type": "PUT", "mem_pool_size_gb": 2.5}))["transfer.mem_pool_size_gb"] == 3
    gets = {"transfer.method": "p2p-nccl-get", "transfer.nccl_num_channels": 16}
    extra = {"send_type": "GET", "nccl_num_channels": "16"}
    assert values(changed(NCCL_D, extra)) == gets
    assert values(changed(NCCL_P, extra, kv_buffer_size="4e9")) == {**gets, "transfer.kv_buffer_size": 4_000_000_000}


def test_configs_of_nixl() -> None:
    defaults = {"transfer.kv_lease_duration_s": 30, "transfer.push_registration_timeout_s": 480}
    assert values(NIXL) == {"transfer.method": "nixl-pull", **defaults}
    extra = {"kv_lease_duration": 60, "decoder_kv_blocks_ttl": 100}
    assert values(changed(NIXL, extra, kv_connector="NixlPushConnector", kv_buffer_device="cpu")) == {
        "transfer.method": "nixl-push",
        "transfer.kv_lease_duration_s": 60,
        "transfer.push_registration_timeout_s": 100,
        "transfer.kv_buffer_device": "cpu",
    }


def test_configs_of_mooncake() -> None:
    assert values(MOONCAKE_V0) == {"transfer.method": "mooncake-v0", "transfer.kv_buffer_size": 2_000_000_000}
    assert values(changed(MOONCAKE_V0, kv_role="kv_consumer", kv_rank=1)) == {"transfer.method": "mooncake-v0"}
    v1 = '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu"}'
    method = {"transfer.method": "mooncake-v1", "transfer.kv_buffer_device": "cpu"}
    assert values(v1) == method
    assert values(changed(v1, {"device_name": "mlx5_0, mlx5_1"})) == {**method, "network.nics_per_rank": 2}
    assert values(changed(v1, {"mooncake_protocol": "tcp"})) == {**method, "network.preset": "tcp-25g"}
    p = {"transfer.method": "mooncake-v1", "transfer.kv_buffer_device": "cpu"}
    assert values(changed(v1, kv_role="kv_producer")) == {**p, "transfer.num_workers": 10}
    assert values(changed(v1, {"num_workers": 2}, kv_role="kv_both")) == {**p, "transfer.num_workers": 2}
    assert values('{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}') == {"transfer.method": "kv-store"}


def test_mooncake_json() -> None:
    assert values(PIPE) == {"transfer.method": "mooncake-v0", "network.nics_per_rank": 2}
    method = {"transfer.method": "kv-store"}
    tcp = {"network.preset": "tcp-25g"}
    assert values(STORE_V0, tp=4) == {**method, "transfer.store_bytes": 3_355_443_200, **tcp}
    nics = {"network.nics_per_rank": 1}
    assert values(STORE, tp=4) == {**method, "transfer.store_bytes": 4 << 30, **nics}
    assert values(changed(STORE, mode="standalone-store", global_segment_size=0)) == {**method, **nics}


@pytest.mark.parametrize("pools", [None, [], [3], [{"role": "decode", "tp": "2"}], [{"role": "decode", "tp": 0}]])
def test_pools_that_are_not_sound_yet_do_no_harm(pools: Any) -> None:
    config = read_transfer_config(STORE, {"pool": pools})
    assert [value.value for value in config.values if value.key[1] == "store_bytes"] == [1 << 30]


def test_a_scenario_takes_missing_values_from_the_transfer_config(tmp_path: Path) -> None:
    found = load(scenario(tmp_path, PIPE))
    assert (found.transfer.method, found.network.nics_per_rank, found.network.preset) == ("mooncake-v0", 2, "rdma-400g")
    idle = "no effect: decode_url, metadata_server, metadata_backend"
    assert found.from_config == ("transfer.method = mooncake-v0 (line 2)", "network.nics_per_rank = 2 (line 7)", idle)
    slow = load(scenario(tmp_path, "\ufeff" + STORE_V0))
    assert (slow.network.preset, slow.transfer.store_bytes) == ("tcp-25g", 3_355_443_200)
    assert (slow.network.bandwidth_bytes_per_s or 0) < 3_000_000_000
    assert "transfer.store_bytes = 3355443200 (no global_segment_size)" in slow.from_config


def test_values_of_the_scenario_win(tmp_path: Path) -> None:
    resolved = load(scenario(tmp_path, PIPE, 'method = "nixl-pull"\n[network]\nnics_per_rank = 4\n'))
    assert (resolved.transfer.method, resolved.network.nics_per_rank) == ("nixl-pull", 4)
    assert not any(" = " in text for text in resolved.from_config)
    faster = load(scenario(tmp_path, STORE_V0, '[network]\npreset = "tcp-100g"\n'))
    assert (faster.network.preset, faster.transfer.method) == ("tcp-100g", "kv-store")
    ours = load(scenario(tmp_path, STORE_V0, "[network]\nbandwidth_bytes_per_s = 1e9\n"))
    assert (ours.network.preset, ours.network.bandwidth_bytes_per_s) == ("tcp-25g", 1_000_000_000)
    # The command line says it too, and may name another file.
    there = scenario(tmp_path, PIPE)
    assert load(there, overrides=["transfer.method=kv-store"]).transfer.method == "kv-store"
    (tmp_path / "cpu.json").write_text(CPU)
    assert load(there, overrides=["transfer.config=cpu.json"]).transfer.method == "cpu-staged"


def test_swapping_the_method_is_the_only_edit(tmp_path: Path) -> None:
    file = scenario(tmp_path, NCCL_D)
    for method in ("p2p-nccl-get", "cpu-staged", "mooncake-v0", "nixl-push"):
        found = load(file, overrides=[f"transfer.method={method}"])
        assert (found.transfer.method, found.transfer.kv_buffer_size) == (method, 8_000_000_000)


def test_validate_shows_where_values_came_from(tmp_path: Path) -> None:
    text = changed(CPU, {"sise": 1}, kv_port=1, kv_module="a.b")
    console = Console(width=500)
    with console.capture() as shown:
        console.print(scenario_view(load(scenario(tmp_path, text))))
    (row,) = (line for line in shown.get().splitlines() if line.startswith("config"))
    assert row.split(maxsplit=1)[1].rstrip() == (
        "conf/engine.json: transfer.method = cpu-staged (line 1), transfer.host_buffer_bytes = 8589934592 (line 1), "
        "no effect: kv_port, kv_connector_extra_config.host, kv_connector_extra_config.port, "
        "not read: kv_module, kv_connector_extra_config.sise"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (USERS.replace(":2333", ""), 'line 4: metadata_server is "127.0.0.1", for etcd: it is not HOST:PORT, expected'),
        (USERS.replace("etcd", "zookeeper"), 'line 4: metadata_server is "127.0.0.1:2333" with the metadata_backend'),
        (
            PIPE.replace("8199", "8145"),
            "line 3: decode_url has a port 1 from prefill_url's, on the same host: ports of 0 ranks fit between, and "
            "engines have 1, expected at least 50",
        ),
        (PIPE.replace("8199", "99999"), 'line 3: decode_url is "127.0.0.1:99999"'),
        (PIPE.replace("rdma", "nvlink"), 'line 6: protocol is "nvlink", expected one of "tcp", "rdma"'),
        (PIPE.replace('"metadata_server"', '"metadata_servers"'), "line 1: metadata_server is missing"),
        (NCCL_P.replace('"30001"', "true"), "line 2: kv_connector_extra_config.proxy_port is true, expected"),
        (CPU.replace('"size": 8', '\n"sise": 8'), "line 1: kv_connector_extra_config.size is missing"),
        (CPU.replace("CPU", "\n\nLMCache"), "is not JSON"),
        (
            CPU.replace('"kv_connector":"CPU', '\n\n"kv_connector":"LMCache'),
            'line 3: kv_connector is "LMCacheConnector", expected one of P2pNccl',
        ),
        ('{"kv_role": "kv_both"}', "line 1: kv_connector is missing"),
        ("{}", "line 1: the file is not a known format, expected kv_connector"),
        ("[]", "line 1: the file is an array, expected a JSON object"),
        ('{"a": 1,\n\n "b" 2}', "line 3: the file is not JSON"),
        ('{"a": 1,\n', "line 1: the file is not JSON"),
        ("[" * 100_000, "line 1: the file has 100,000 characters"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_an_error_is_reported_once_with_its_location(tmp_path: Path, text: str | bytes, message: str) -> None:
    # What depends on the method is not judged by another one.
    file = scenario(tmp_path, text, 'dialect = "as-published"\nprogressive = true\n')
    with pytest.raises(ScenarioError) as caught:
        load(file)
    assert str(caught.value).count("\n") == 0, str(caught.value)
    assert str(caught.value).startswith(f'{file}:21: transfer.config: "conf/engine.json" '), str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ('"nowhere.json"', '"nowhere.json" cannot be read: No such file or directory; looked for'),
        ('"conf"', '"conf" cannot be read: Is a directory'),
        ('"a\\u0000b"', "cannot be read: embedded null byte"),
        ("3", "is 3, expected a string"),
        ('""', 'is "", expected a value that is not empty'),
    ],
)
def test_a_file_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    file = scenario(tmp_path, PIPE)
    file.write_text(file.read_text().replace('"conf/engine.json"', name))
    with pytest.raises(ScenarioError) as caught:
        load(file)
    assert len(caught.value.problems) == 1
    assert f"{file}:21: transfer.config: " in str(caught.value)
    assert message in str(caught.value)


def test_a_value_that_no_scenario_can_hold_is_reported_at_its_line_of_the_config(tmp_path: Path) -> None:
    many = ",".join(f"n{index}" for index in range(65))
    with pytest.raises(ScenarioError) as caught:
        load(scenario(tmp_path, PIPE.replace("mlx5_0,mlx5_1", many)))
    where = tmp_path / "conf/engine.json"
    assert (
        str(caught.value) == f"{where}:7: network.nics_per_rank: is 65, expected a number of at least 1 and at most 64"
    )


@pytest.mark.parametrize("more", ["transfer = 3\nnetwork = 3", 'network = 3\n[transfer]\nconfig = "conf/engine.json"'])
def test_tables_that_are_none(tmp_path: Path, more: str) -> None:
    file = scenario(tmp_path, PIPE)
    file.write_text(more.partition("[")[0] + SCENARIO.partition("[transfer]")[0] + "".join(more.partition("[")[1:]))
    with pytest.raises(ScenarioError) as caught:
        load(file)
    assert {problem.path for problem in caught.value.problems} == set(re.findall(r"(\w+) = 3", more))


def test_a_scenario_that_moves_takes_the_path_along(tmp_path: Path) -> None:
    here = Scenario.load(scenario(tmp_path, PIPE))
    here.save(tmp_path / "deep/er/s.toml")
    assert 'config = "../../conf/engine.json"' in (tmp_path / "deep/er/s.toml").read_text()
    assert Scenario.load(tmp_path / "deep/er/s.toml").resolved.transfer.method == "mooncake-v0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_lines_of_keys(value: Any) -> None:
    text = json.dumps(value, indent=1)
    lines = json_key_lines(text)
    assert set(lines) == set(_keys(value, ()))
    written = text.splitlines()
    for path, line in lines.items():
        assert written[line - 1].startswith(" " * len(path) + json.dumps(path[-1]) + ":")


def _keys(value: Any, around: tuple[str, ...]) -> Any:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*around, key)
        yield from _keys(inner, (*around, key))


def test_the_last_of_duplicate_keys_wins() -> None:
    assert json_key_lines('{"a": "}\\"a\\":",\n"b": [{"c": 1}],\n"a": 2}') == {("a",): 3, ("b",): 2}


@given(st.sampled_from([CPU, PIPE, NCCL_D, STORE, NIXL]), st.integers(0, 400), st.text(max_size=3), st.integers(0, 6))
def test_any_text_is_read_or_refused_with_its_line(text: str, at: int, new: str, gone: int) -> None:
    broken = text[:at] + new + text[at + gone :]
    try:
        read_transfer_config(broken, {})
    except TransferConfigError as error:
        line = re.match(r"line (\d+): ", str(error))
        assert line is not None
        assert 1 <= int(line[1]) <= broken.count("\n") + 1
