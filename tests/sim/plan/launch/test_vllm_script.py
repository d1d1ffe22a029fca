"""The script that starts a planned cluster with vLLM: its commands, for clusters of all kinds."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdflow.scenario.presets import presets
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.plan.launch.hosts import placed_engines
from pdflow_sim.plan.launch.notes import launch_notes, model_id
from pdflow_sim.plan.launch.script import vllm_script

TOML = """
[workload]
requests = 10
arrival = { process = "constant", rate_rps = 1.0 }
input_tokens = 100
output_tokens = 16

[model]
preset = "llama-3.1-8b"

[[pool]]
name = "prefill"
role = "prefill"
gpu = "h100-sxm"
replicas = 2

[[pool]]
name = "decode"
role = "decode"
gpu = "h100-sxm"
tp = 2
max_num_seqs = 64
enable_prefix_caching = false
async_scheduling = false
"""
PAIR = Scenario.from_toml(TOML)
ALONE = Scenario.from_toml(TOML[: TOML.rindex("[[pool]]")].replace('role = "prefill"', 'role = "aggregated"'))
EXPERTS = PAIR.with_(
    {
        "model.preset": "deepseek-v3",
        "pool.prefill.tp": 8,
        "pool.prefill.gpu": "h200",
        "pool.prefill.ep": 8,
        "pool.decode.gpu": "h200",
        "pool.decode.tp": 1,
        "pool.decode.dp_attention": 8,
        "pool.decode.ep": 8,
        "pool.decode.max_num_batched_tokens": 32,
    }
)
SCRIPTS = {
    "pair": PAIR,
    "alone": ALONE,
    "experts": EXPERTS,
    "pulled": PAIR.with_({"transfer.method": "nixl-pull"}),
    "mooncake": PAIR.with_({"transfer.method": "mooncake-v1"}),
    "stages": PAIR.with_({"pool.prefill.pp": 2}),
}


def dry_run(scenario: Scenario, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "vllm.sh"
    path.write_text(vllm_script(scenario), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    return subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, timeout=60)


def commands(scenario: Scenario, tmp_path: Path, **variables: str) -> list[list[str]]:
    """Return the words of each command that a dry run prints."""
    ended = dry_run(scenario, tmp_path, **variables)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [shlex.split(line) for line in ended.stdout.splitlines() if not line.startswith("#")]


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def config_of(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(after(command, "--kv-transfer-config"))
    return found


def notes(scenario: Scenario) -> Iterator[str]:
    return launch_notes(scenario.resolved, scenario.document())


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_sound_bash(name: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm.sh"
    path.write_text(vllm_script(SCRIPTS[name]), encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


def test_each_engine_has_its_own_gpus_and_port(tmp_path: Path) -> None:
    *engines, proxy = commands(PAIR, tmp_path)
    assert [engine[1] for engine in engines] == [f"CUDA_VISIBLE_DEVICES={gpus}" for gpus in ("0", "1", "2,3")]
    assert [after(engine, "--port") for engine in engines] == ["8100", "8101", "8102"]
    assert [engine[2:5] for engine in engines] == [["vllm", "serve", "meta-llama/Llama-3.1-8B"]] * 3
    assert proxy[1:] == [
        *("-m", "pdflow_runtime.vllm.proxy"),
        *("--prefill", "http://127.0.0.1:8100", "http://127.0.0.1:8101"),
        *("--decode", "http://127.0.0.1:8102"),
        *("--host", "127.0.0.1", "--port", "8000"),
    ]


def test_engines_have_the_options_of_their_pool(tmp_path: Path) -> None:
    prefill, _, decode, _ = commands(PAIR, tmp_path, ENGINE_ARGS="--max-model-len 2048")
    for command, tp, seqs in ((prefill, "1", "256"), (decode, "2", "64")):
        assert after(command, "--tensor-parallel-size") == tp
        assert after(command, "--max-num-seqs") == seqs
        assert after(command, "--max-num-batched-tokens") == "8192"
        assert after(command, "--block-size") == "16"
        assert after(command, "--gpu-memory-utilization") == "0.9"
        assert command[-2:] == ["--max-model-len", "2048"]
    assert {"--enable-prefix-caching", "--async-scheduling"} <= set(prefill)
    assert {"--no-enable-prefix-caching", "--no-async-scheduling"} <= set(decode)


def test_experts_have_data_parallel_attention(tmp_path: Path) -> None:
    prefill, _, decode, _ = commands(EXPERTS, tmp_path, CONNECTOR="nixl")
    assert after(prefill, "--tensor-parallel-size") == "8"
    assert "--data-parallel-size" not in prefill
    assert (after(decode, "--tensor-parallel-size"), after(decode, "--data-parallel-size")) == ("1", "8")
    assert {"--enable-expert-parallel"} <= set(prefill) & set(decode)
    assert after(decode, "--max-num-batched-tokens") == "64"  # vLLM refuses fewer than --max-num-seqs.


def test_the_connector_follows_the_method(tmp_path: Path) -> None:
    prefill, _, decode, _ = commands(PAIR, tmp_path)
    assert config_of(prefill) == {
        "kv_connector": "PdflowConnector",
        "kv_connector_module_path": "pdflow_runtime.vllm.connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"transfer_mode": "push", "transport": "nixl", "host": "127.0.0.1"},
    }
    assert config_of(decode)["kv_role"] == "kv_consumer"
    pulled = commands(SCRIPTS["pulled"], tmp_path, TRANSPORT="tcp")[0]
    extra = {"transfer_mode": "pull", "transport": "tcp", "host": "127.0.0.1"}
    assert config_of(pulled)["kv_connector_extra_config"] == extra
    for name, expected in (("pair", "NixlPushConnector"), ("pulled", "NixlConnector")):
        engine, second, *_ = commands(SCRIPTS[name], tmp_path, CONNECTOR="nixl")
        assert config_of(engine)["kv_connector"] == expected
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in engine
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5601" in second


def test_options_of_the_connector_are_valid() -> None:
    """They are read by the connector itself, so that a renamed key is noticed."""
    from pdflow_runtime.vllm.options import read_options
    from pdflow_sim.plan.launch.flags import transfer_config

    transfer = {"kv_lease_duration_s": 20.0, "dead_s": 9.0, "deadline_s": 100.0, "progressive": True}
    scenario = PAIR.with_({f"transfer.{key}": value for key, value in transfer.items()})
    config = json.loads(transfer_config("pdflow", scenario.resolved.transfer).replace("@TRANSPORT@", "tcp"))
    options = read_options(config["kv_connector_extra_config"])
    assert (options.lease_s, options.dead_s, options.deadline_s, options.progressive) == (20, 9, 100, True)
    stock = json.loads(transfer_config("nixl", scenario.resolved.transfer))
    assert stock["kv_connector_extra_config"] == {"kv_lease_duration": 20}


def test_mooncakes_bootstrap_servers_go_to_the_proxy(tmp_path: Path) -> None:
    first, second, _, proxy = commands(SCRIPTS["mooncake"], tmp_path)
    assert config_of(first)["kv_connector"] == "MooncakeConnector"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT=5601" in second
    at = proxy.index("--mooncake")
    assert proxy[at + 1 : at + 3] == ["http://127.0.0.1:5600", "http://127.0.0.1:5601"]


def test_an_aggregated_cluster_moves_no_kv(tmp_path: Path) -> None:
    *engines, proxy = commands(ALONE, tmp_path)
    assert len(engines) == 2
    assert not any("--kv-transfer-config" in engine for engine in engines)
    assert proxy[3:6] == ["--aggregated", "http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert "CONNECTOR" not in vllm_script(ALONE).partition("fail()")[0]


def test_a_cluster_of_several_hosts_is_printed_host_by_host(tmp_path: Path) -> None:
    ended = dry_run(EXPERTS, tmp_path)
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        *(f"# on {address}" for address in ("127.0.0.1", "ADDRESS_1", "ADDRESS_2")),
        "# on 127.0.0.1, when all are ready",
    ]
    *engines, proxy = commands(EXPERTS, tmp_path, HOSTS="10.0.0.1 10.0.0.2 10.0.0.3")
    assert [after(engine, "--host") for engine in engines] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert "VLLM_HOST_IP=10.0.0.2" in engines[1]
    assert config_of(engines[2])["kv_connector_extra_config"]["host"] == "10.0.0.3"
    assert "http://10.0.0.3:8102" in proxy


def test_hosts_have_gpus_of_one_type_and_whole_engines() -> None:
    mixed = PAIR.with_({"pool.decode.gpu": "h200", "pool.prefill.replicas": 9, "pool.decode.replicas": 5})
    found = placed_engines(mixed.resolved.pools)
    assert [(engine.host, engine.devices) for engine in found[7:]] == [
        *((0, "7"), (1, "0")),
        *((2, "0,1"), (2, "2,3"), (2, "4,5"), (2, "6,7"), (3, "0,1")),
    ]
    assert any("2 types (h100-sxm, h200)" in note for note in notes(mixed))


def test_ports_leave_one_for_each_data_parallel_rank() -> None:
    two = EXPERTS.with_({"pool.decode.replicas": 2})
    assert [engine.port_offset for engine in placed_engines(two.resolved.pools)] == [0, 1, 2, 10]


@pytest.mark.parametrize(
    ("scenario", "variables", "message"),
    [
        ("pair", {"CONNECTOR": "none"}, "CONNECTOR is none; it must be one of pdflow, nixl"),
        ("experts", {"DRY_RUN": ""}, "the cluster takes 3 hosts: set HOSTS and HOST_INDEX"),
        ("pair", {"DRY_RUN": "", "HOST_INDEX": "1"}, "HOST_INDEX is 1; it must be below 1"),
        ("pair", {"DRY_RUN": "", "HOSTS": "10.0.0.1"}, "set PDFLOW_SECRET to the same secret on all hosts"),
    ],
)
def test_what_cannot_be_started_is_refused(
    scenario: str, variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    ended = dry_run(SCRIPTS[scenario], tmp_path, **variables)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_an_engine_larger_than_a_host_is_refused(tmp_path: Path) -> None:
    wide = EXPERTS.with_({"pool.decode.dp_attention": 16, "pool.decode.ep": 16})
    ended = dry_run(wide, tmp_path)
    assert ended.returncode == 2
    assert "decode-0 has 16 GPUs, more than a host" in ended.stderr
    assert "--data-parallel-size 16" in ended.stderr


def test_every_published_model_of_a_preset_has_an_id_on_hugging_face() -> None:
    ids = {name: model_id(PAIR.resolved, {"model": {"preset": name}}) for name in presets("models")}
    assert [name for name, found in ids.items() if not found] == ["tiny"]
    assert ids["qwen3-8b"] == "Qwen/Qwen3-8B"


def test_a_model_that_no_checkpoint_is_known_for_must_be_set(tmp_path: Path) -> None:
    other = PAIR.with_({"model.weight_dtype": "fp8"})
    assert any("weight_dtype = fp8. Set MODEL to a checkpoint" in note for note in notes(other))
    ended = dry_run(other, tmp_path)
    assert ended.returncode == 2
    assert "set MODEL to a Hugging Face id or a folder" in ended.stderr
    assert commands(other, tmp_path, MODEL="/a folder/it's")[0][4] == "/a folder/it's"


def test_kv_in_8_bits_is_an_option_and_needs_no_other_checkpoint(tmp_path: Path) -> None:
    prefill = commands(PAIR.with_({"model.kv_dtype": "fp8"}), tmp_path)[0]
    assert after(prefill, "--kv-cache-dtype") == "fp8"


@pytest.mark.parametrize(
    ("method", "connector", "sentence"),
    [
        ("cpu-staged", "NixlPushConnector", "no ring in host memory"),
        ("p2p-nccl-put", "PdflowConnector", "no P2pNcclConnector"),
        ("p2p-nccl-get", "PdflowConnector", "no P2pNcclConnector"),
        ("kv-store", "MooncakeConnector", "MooncakeStoreConnector"),
    ],
)
def test_a_method_without_a_connector_has_the_nearest(
    method: str, connector: str, sentence: str, tmp_path: Path
) -> None:
    scenario = PAIR.with_({"transfer.method": method})
    assert any(note.startswith(f"Method {method}: ") and sentence in note for note in notes(scenario))
    config = config_of(commands(scenario, tmp_path)[0])
    assert config["kv_connector"] == connector
    assert config.get("kv_buffer_device") == ("cpu" if method == "cpu-staged" else None)
    if connector == "PdflowConnector":
        assert config["kv_connector_extra_config"]["transfer_mode"] == ("pull" if method == "p2p-nccl-get" else "push")


def test_engines_that_pdflows_connector_refuses_have_vllms(tmp_path: Path) -> None:
    prefill = commands(SCRIPTS["stages"], tmp_path)[0]
    assert after(prefill, "--pipeline-parallel-size") == "2"
    assert config_of(prefill)["kv_connector"] == "NixlPushConnector"
    assert "pdflow's connector refuses engines with pipeline stages." in notes(SCRIPTS["stages"])


def test_what_the_proxy_does_otherwise_is_a_comment() -> None:
    router = {"policy": "least-loaded", "dispatch": "concurrent", "disaggregate_above_tokens": "auto"}
    found = list(notes(PAIR.with_({f"router.{key}": value for key, value in router.items()})))
    assert [note for note in found if "The proxy" in note][:3] == [
        "The proxy takes instances in turn. The plan has least-loaded.",
        "The proxy starts the decode leg after the prefill leg's answer. The plan starts both together.",
        "The proxy sends every prompt to a prefill instance. The plan lets decode engines compute some.",
    ]
