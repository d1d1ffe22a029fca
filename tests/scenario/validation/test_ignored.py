"""Keys without effect are noted with their line and the reason; those with an effect are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.methods.catalogue import METHODS
from pdflow.scenario.reading.load import load, parse, resolve

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = """[workload]
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
gpu_memory_utilization = 0.7
[[pool]]
name = "d"
role = "decode"
gpu = "h100-sxm"
gpu_memory_utilization = 0.7
"""
NEXT_LINE = SCENARIO.count("\n") + 2
"""The line behind the header of a table that is appended."""
METHOD_AND_DIALECT = [(name, dialect) for name, method in METHODS.items() for dialect in method.dialects]


def notes(text: str, *overrides: str) -> list[str]:
    draft = parse("s.toml", SCENARIO + text)
    draft.override(overrides, None)
    return [note for note in resolve(draft).notes if "has no effect" in note]


@pytest.mark.parametrize(
    ("method", "key", "reason"),
    [
        ("nixl-push", 'reads_on = "engine"', "nixl-push posts no READs at D"),
        ("nixl-push", "load_by_layer = true", "nixl-push does not load KV from host memory at D; it is for cpu-staged"),
        ("kv-store", "load_by_layer = false", "kv-store does not load KV from host memory at D; it is for cpu-staged"),
        (
            "p2p-nccl-put",
            'connector = "vllm-nixl"',
            "p2p-nccl-put posts whole ranges of staging memory, whatever the connector",
        ),
        (
            "cpu-staged",
            'connector = "sglang"',
            "cpu-staged posts whole ranges of staging memory, whatever the connector",
        ),
        (
            "nixl-pull",
            "progressive = true",
            "nixl-pull does not write from P's blocks; it is for nixl-push, mooncake-v1",
        ),
        (
            "cpu-staged",
            'kv_buffer_device = "cpu"',
            "cpu-staged does not move KV from blocks to blocks, and no pool is on a GPU",
        ),
        ("nixl-push", "host_buffer_bytes = 9", "nixl-push has no ring in host memory; it is for cpu-staged"),
        (
            "nixl-push",
            "kv_buffer_size = 9",
            "nixl-push has no buffer for KV in GPU memory; it is for p2p-nccl-put, p2p-nccl-put-async, p2p-nccl-get, "
            "mooncake-v0",
        ),
        (
            "p2p-nccl-get",
            "mem_pool_size_gb = 9",
            "p2p-nccl-get has no buffer that spills to host memory; it is for p2p-nccl-put, p2p-nccl-put-async",
        ),
        (
            "nixl-pull",
            "nccl_max_groups = 9",
            "nixl-pull has no NCCL groups; it is for p2p-nccl-put, p2p-nccl-put-async, p2p-nccl-get",
        ),
        ("nixl-push", "num_workers = 9", "nixl-push has no writer threads at P; it is for mooncake-v1"),
        ("mooncake-v0", "pickle_bytes_per_s = 9", "only mooncake-v0 as-published pickles KV"),
        ("mooncake-v1", "store_nodes = 9", "mooncake-v1 has no store; it is for kv-store"),
        ("mooncake-v1", "store_lease_s = 9", "mooncake-v1 has no store; it is for kv-store"),
        (
            "nixl-pull",
            "push_registration_timeout_s = 9",
            "D has a watchdog for registrations with vllm-compat pushes only",
        ),
        ("nixl-push", "writer_poll_s = 9", "P has a thread that polls with vllm-compat pushes only"),
        ("nixl-push", "join_s = 9", "nixl-push with dialect strict waits for the registrations of all ranks of D"),
        ("nixl-push", "handshake_timeout_s = 9", "without [[fault]] every handshake succeeds"),
    ],
)
def test_keys_of_other_methods(method: str, key: str, reason: str) -> None:
    name = key.partition(" ")[0]
    expected = f"s.toml:{NEXT_LINE + 1}: transfer.{name}: has no effect: {reason}"
    assert notes(f'[transfer]\nmethod = "{method}"\n{key}\n') == [expected]


@pytest.mark.parametrize(
    ("dialect", "key", "reason"),
    [
        ("vllm-compat", "sync_s = 9", "has neither SYNC nor CANCEL messages"),
        ("vllm-compat", "dead_s = 99", "has neither SYNC nor CANCEL messages"),
        ("vllm-stock", "registration_ttl_s = 9", "keeps registrations forever"),
        ("as-published", "quarantine_fraction = 0.5", "limits no peer's share of D's blocks"),
        ("vllm-stock", "backoff_first_s = 9", "repeats a failed handshake with the next request"),
    ],
)
def test_keys_of_other_dialects(dialect: str, key: str, reason: str) -> None:
    name = key.partition(" ")[0]
    expected = f"s.toml:{NEXT_LINE + 1}: transfer.{name}: has no effect: nixl-push with dialect {dialect} {reason}"
    assert notes(f'[transfer]\ndialect = "{dialect}"\n{key}\n') == [expected]


@pytest.mark.parametrize("method", ["p2p-nccl-get", "kv-store", "mooncake-v0"])
def test_an_engine_that_waits_for_its_reads_has_no_choice_of_their_thread(method: str) -> None:
    text = f'[transfer]\nmethod = "{method}"\nreads_on = "engine"\n'
    assert notes(text) == []
    [note] = notes(text + 'dialect = "as-published"\n')
    assert note.endswith(f"{method} as published lets D's next step wait for its READs anyway")


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("nixl-pull", 'reads_on = "engine"'),
        ("nixl-pull", 'connector = "sglang"'),
        ("p2p-nccl-get", 'connector = "sglang"'),
        ("cpu-staged", "load_by_layer = true"),
        ("cpu-staged", "host_buffer_bytes = 2_000_000_000"),
        ("mooncake-v1", "progressive = true"),
        ("mooncake-v1", "num_workers = 1"),
        ("kv-store", 'kv_buffer_device = "cpu"'),
        ("kv-store", "store_nodes = 2"),
        ("p2p-nccl-put", "mem_pool_size_gb = 1"),
    ],
)
def test_keys_of_the_method_itself_are_not_noted(method: str, key: str) -> None:
    assert notes(f'[transfer]\nmethod = "{method}"\n{key}\n') == []


@pytest.mark.parametrize(("method", "dialect"), METHOD_AND_DIALECT)
def test_a_scenario_that_sets_none_of_them_has_no_note(method: str, dialect: str) -> None:
    assert notes(f'[transfer]\nmethod = "{method}"\ndialect = "{dialect}"\n') == []


def test_a_key_with_its_default_is_not_noted() -> None:
    assert notes('[transfer]\nprogressive = false\nnum_workers = 10\nkv_buffer_device = "cuda"\n') == []


def test_the_location_of_an_override_is_its_option() -> None:
    [note] = notes("", "transfer.num_workers=9")
    assert note.startswith("--set transfer.num_workers=9: transfer.num_workers: has no effect: nixl-push has no ")


def test_a_router_that_weighs_transfers_counts_descriptors_with_any_method() -> None:
    text = '[transfer]\nmethod = "cpu-staged"\nconnector = "trtllm"\n[network]\nper_descriptor_s = 1e-6\n'
    assert [note.partition(": ")[2].partition(":")[0] for note in notes(text)] == [
        "transfer.connector",
        "network.per_descriptor_s",
    ]
    assert notes(text + '[router]\ndispatch = "sequential"\ndisaggregate_above_tokens = "auto"\n') == []


def test_kv_through_host_memory_has_an_effect_on_gpus() -> None:
    text = '[transfer]\nmethod = "cpu-staged"\nkv_buffer_device = "cpu"\n'
    on_gpu = (f"pool.{pool}.{key}" for pool in "pd" for key in ('engine="torch"', 'device="cuda"'))
    assert len(notes(text)) == 1
    assert notes(text, *on_gpu) == []


@pytest.mark.parametrize(
    ("keys", "path", "reason"),
    [
        ("coalesce = true\nper_descriptor_s = 0", "coalesce", "a descriptor costs nothing (per_descriptor_s is 0)"),
        ("per_slice_s = 1e-3", "per_slice_s", "transfers are not sliced (slice_bytes is 0)"),
        (
            "slice_bytes = 65536",
            "slice_bytes",
            "there is one NIC, and a slice costs nothing (per_slice_s is 0)",
        ),
        ("poll = false", "poll", "nixl-push with dialect strict does not poll"),
        (
            'links = [{ name = "up", bandwidth_bytes_per_s = 1e9 }]',
            "links[0]",
            "no path of network.paths crosses link up",
        ),
    ],
)
def test_keys_of_the_network(keys: str, path: str, reason: str) -> None:
    assert notes(f"[network]\n{keys}\n") == [f"s.toml:{NEXT_LINE}: network.{path}: has no effect: {reason}"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[transfer]\nmethod = "mooncake-v1"\n[network]\ncoalesce = true\n', "network.coalesce"),
        ('[transfer]\nconnector = "trtllm"\n[network]\ncoalesce = true\n', "network.coalesce"),
        ('[transfer]\nconnector = "sglang"\n[network]\nper_descriptor_s = 0\n', "transfer.connector"),
    ],
)
def test_keys_that_another_one_disables(text: str, path: str) -> None:
    [note] = notes(text)
    assert f": {path}: has no effect: " in note


def test_slices_have_an_effect_with_several_nics_or_a_time_of_their_own() -> None:
    assert notes("[network]\nslice_bytes = 65536\nnics_per_rank = 2\n") == []
    assert notes("[network]\nslice_bytes = 65536\nper_slice_s = 1e-6\n") == []


def test_noise_of_nothing() -> None:
    times = ("pool.p.api_server_s=0", "pool.d.api_server_s=0")
    text = '[noise]\napi_server = 0.2\nlinks = 0.2\n[network]\npreset = "ideal"\n'
    no_time = "requests take no time in API servers (api_server_s is 0)"
    assert notes(text, *times) == [
        f"s.toml:{NEXT_LINE}: noise.api_server: has no effect: {no_time}",
        f"s.toml:{NEXT_LINE + 1}: noise.links: has no effect: transfers have no latency (network.latency_s is 0)",
    ]
    assert notes(text, *times, "pool.d.api_server_s_per_token=1e-6", "network.latency_s=1e-6") == []
    assert notes(text, *times, "noise.api_server=0", "noise.links=0") == []


def test_a_pool_with_its_kv_capacity_needs_no_share_of_memory() -> None:
    line = SCENARIO.splitlines().index("gpu_memory_utilization = 0.7") + 1
    expected = f"s.toml:{line}: pool.p.gpu_memory_utilization: has no effect: kv_tokens is the pool's KV capacity"
    assert notes("", "pool.p.kv_tokens=4096") == [expected]


def test_asynchronous_scheduling_is_not_v0s() -> None:
    [note] = notes("", "pool.d.scheduling=v0", "pool.d.async_scheduling=true")
    assert note.endswith("pool.d.async_scheduling: has no effect: vLLM V0 has no asynchronous scheduling")
    assert notes("", "pool.d.scheduling=v0") == []
    assert notes("", "pool.d.scheduling=v0", "pool.d.async_scheduling=false") == []
    assert notes("", "pool.d.scheduling=v1", "pool.d.async_scheduling=true") == []


def test_asynchronous_scheduling_with_a_method_whose_engines_are_v0s() -> None:
    published = ("transfer.method=kv-store", "transfer.dialect=as-published", "pool.d.async_scheduling=true")
    [note] = notes("", *published)
    assert note.endswith('kv-store as published has its engines; set scheduling = "v1"')
    assert notes("", *published, "pool.d.scheduling=v1") == []


def test_experts_in_slices_are_as_busy_as_each_other() -> None:
    whole = ("model.preset=qwen3-30b-a3b", "pool.d.tp=4", "pool.d.expert_balancedness=0.9", "pool.d.ep=4")
    assert notes("", "pool.p.tp=4", *whole) == []
    [note] = notes("", "pool.p.tp=4", *whole[:-1])
    assert note.endswith("every GPU has a slice of each expert (ep is 1)")


def test_examples_set_no_key_without_effect() -> None:
    files = [*ROOT.glob("examples/*.toml"), *ROOT.glob("examples/*/*.toml")]
    files = [file for file in files if file.name != "mooncake-conversation.toml"]  # its trace may be absent
    assert len(files) > 20
    assert [note for file in files for note in load(file).notes if "has no effect" in note] == []
