"""The GPU of each process, its environment, and what a host must have. No GPU is needed: their number is given."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import EXIT_BAD_INPUT, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import engines_of, refuse_what_is_not_served
from pdflow_runtime.gpu import torch_build
from pdflow_runtime.gpu.driver import gpus as gpus_here
from pdflow_runtime.gpu.torch_build import torch_problem
from pdflow_runtime.process import component, devices
from pdflow_runtime.process.devices import (
    ORDER,
    VISIBLE,
    count_gpus,
    environment_of,
    gpu_environments,
    gpu_of_each,
    gpu_users,
)
from pdflow_runtime.router.routing import seats_of
from tests.runtime.support.live_pair import cluster

ON_GPUS = ("pool.prefill.device=cuda", "pool.decode.device=cuda", "transfer.kv_buffer_device=cpu")
NCCL = "serve.transport=nccl"
CPU_BUILD = "torch 2.11.0+cpu is built without CUDA: pip install torch, without the index of CPU builds"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with two GPUs and a torch for them."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv(ORDER, raising=False)
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    monkeypatch.setattr(devices, "torch_problem", lambda: None)
    return monkeypatch


def refused(scenario: ResolvedScenario, names: list[str] | None = None) -> dict[str, str]:
    with pytest.raises(ScenarioError) as caught:
        gpu_environments(scenario, names)
    return {problem.path: problem.message for problem in caught.value.problems}


@given(
    gpus=st.integers(1, 9),
    p=st.integers(1, 4),
    d=st.integers(1, 4),
    spares=st.integers(0, 3),
    cpu=st.booleans(),
    listed=st.data(),
)
def test_every_engine_has_one_gpu_whoever_else_runs(
    gpus: int, p: int, d: int, spares: int, cpu: bool, listed: st.DataObject
) -> None:
    overrides = [f"pool.prefill.replicas={p}", f"pool.decode.replicas={d}", f"serve.spare_engines={spares}"]
    overrides += [*ON_GPUS, "pool.prefill.device=cpu"] if cpu else ON_GPUS
    own = listed.draw(st.none() | st.lists(st.integers(0, gpus - 1), min_size=d, max_size=d))
    if own is not None:
        overrides += ["pool.decode.tp=2", f"pool.decode.devices={[gpu for gpu in own for _ in range(2)]}"]
    scenario = cluster(*overrides)
    refuse_what_is_not_served(scenario)
    at = gpu_of_each(gpu_users(scenario), gpus)
    on_gpus = ["decode"] if cpu else ["prefill", "decode"]
    assert set(at) == {name for role in on_gpus for name in seats_of(scenario, role)}
    assert all(0 <= gpu < gpus for gpu in at.values())
    if own is not None:
        assert [at[f"decode-{number}"] for number in range(d)] == own
    else:
        started = [at[name] for name in engines_of(scenario.pools) if name in at]
        assert started == [turn % gpus for turn in range(len(started))]


@given(gpus=st.integers(1, 9), listed=st.none() | st.permutations("abcdefghi"), own=st.data())
def test_a_process_has_its_own_gpu_first_and_sees_the_others(
    gpus: int, listed: list[str] | None, own: st.DataObject
) -> None:
    gpu = own.draw(st.integers(0, gpus - 1))
    inherited = {} if listed is None else {VISIBLE: ", ".join(listed[:gpus])}
    names = [str(number) for number in range(gpus)] if listed is None else listed[:gpus]
    visible = environment_of(gpu, gpus, inherited)[VISIBLE].split(",")
    assert visible[0] == names[gpu]
    assert sorted(visible) == sorted(names)


def test_gpus_are_counted_as_nvidia_smi_does_unless_the_operator_says_otherwise() -> None:
    assert environment_of(0, 1, {})[ORDER] == "PCI_BUS_ID"
    assert environment_of(0, 1, {ORDER: "FASTEST_FIRST"})[ORDER] == "FASTEST_FIRST"


def test_names_that_cuda_does_not_count_are_left_out() -> None:
    """CUDA ends at the first invalid name: `-1` hides all GPUs after it."""
    assert environment_of(1, 2, {VISIBLE: "3,1,-1,0"})[VISIBLE] == "1,3"


def test_the_gpus_of_this_machine_are_counted_in_a_process_of_their_own() -> None:
    assert count_gpus() == gpus_here()


def test_without_gpus_in_the_scenario_none_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise AssertionError("GPUs were counted")

    monkeypatch.setattr(devices, "count_gpus", count)
    assert not gpu_environments(cluster())
    assert not gpu_environments(cluster(*ON_GPUS), ["router"])
    with pytest.raises(AssertionError, match="were counted"):
        gpu_environments(cluster(*ON_GPUS))


def test_each_process_on_a_gpu_gets_an_environment(host: pytest.MonkeyPatch) -> None:
    environments = gpu_environments(cluster(*ON_GPUS, "serve.spare_engines=1"))
    assert {name: environment[VISIBLE] for name, environment in environments.items()} == {
        "prefill-0": "0,1",
        "decode-0": "1,0",
        "decode-1": "0,1",
        "prefill-1": "1,0",
        "decode-2": "0,1",
    }
    host.setenv(VISIBLE, "GPU-b,GPU-a")
    assert gpu_environments(cluster(*ON_GPUS))["decode-0"][VISIBLE] == "GPU-a,GPU-b"


def test_a_host_without_gpus_is_refused_once(host: pytest.MonkeyPatch) -> None:
    host.setattr(devices, "count_gpus", lambda: 0)
    assert refused(cluster(*ON_GPUS)) == {
        "pool.0.device": ('is cuda, but this host has no GPU: install NVIDIA\'s driver, or set device = "cpu"')
    }
    host.setenv(VISIBLE, "")
    assert refused(cluster(*ON_GPUS))["pool.0.device"] == (
        "is cuda, but this host has no GPU (CUDA_VISIBLE_DEVICES is ''): see nvidia-smi and CUDA_VISIBLE_DEVICES, or "
        'set device = "cpu"'
    )


def test_a_torch_without_cuda_is_refused_at_start(host: pytest.MonkeyPatch) -> None:
    host.setattr(devices, "torch_problem", lambda: CPU_BUILD)
    assert refused(cluster(*ON_GPUS)) == {"pool.0.device": f"is cuda, but {CPU_BUILD}"}
    on_cpu = cluster(NCCL, "pool.decode.replicas=1")
    assert refused(on_cpu) == {
        "serve.transport": f"is nccl, which copies by torch where there are GPUs, but {CPU_BUILD}"
    }
    host.setattr(devices, "count_gpus", lambda: 0)
    assert not gpu_environments(on_cpu)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: str | None = '13.0'\n", None),
        ("__version__ = '2.11.0+cpu'\ncuda: str | None = None\n", CPU_BUILD),
    ],
)
def test_torch_says_without_an_import_what_it_was_built_for(
    text: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_problem() == problem


def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "find_spec", lambda name: None)
    assert torch_problem() == "torch is not installed: pip install torch, without the index of CPU builds"


def test_the_torch_that_is_installed_is_judged_as_it_judges_itself() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    assert (torch_problem() is None) is (torch.version.cuda is not None)


def test_a_gpu_that_the_host_does_not_have_is_refused(host: pytest.MonkeyPatch) -> None:
    wanting = cluster(*ON_GPUS, "pool.decode.devices=[1, 2]")
    assert refused(wanting) == {"pool.1.devices": "names GPU 2, but this host has GPUs 0 to 1"}
    assert gpu_environments(wanting, ["decode-0"])["decode-0"][VISIBLE] == "1,0"
    host.setattr(devices, "count_gpus", lambda: 1)
    host.setenv(VISIBLE, "3")
    wanting = cluster(*ON_GPUS, "pool.decode.devices=[0, -1]")
    assert refused(wanting) == {
        "pool.1.devices": "names GPU -1, but this host has GPU 0 only (CUDA_VISIBLE_DEVICES is '3')"
    }


@pytest.mark.parametrize("on_gpus", [True, False])
def test_two_processes_that_exchange_kv_over_nccl_do_not_share_a_gpu(on_gpus: bool, host: pytest.MonkeyPatch) -> None:
    """Even if the KV is in host memory: it goes through the GPU."""
    on = ON_GPUS[:2] if on_gpus else ()
    set_them = "set devices in their pools, or " if on_gpus else ""
    assert refused(cluster(*on, NCCL)) == {
        "serve.transport": (
            "is nccl, which needs a GPU for each process, but prefill-0 and decode-1 exchange KV and are both on "
            f"GPU 0: {set_them}choose another transport"
        )
    }
    one_each = cluster(*on, NCCL, "pool.decode.replicas=1")
    assert {name: at[VISIBLE][0] for name, at in gpu_environments(one_each).items()} == {
        "prefill-0": "0",
        "decode-0": "1",
    }


def test_an_engine_that_may_be_added_over_nccl_needs_a_gpu_too(host: pytest.MonkeyPatch) -> None:
    host.setattr(devices, "count_gpus", lambda: 4)
    scenario = cluster(*ON_GPUS[:2], NCCL, "serve.spare_engines=1")
    assert "prefill-0 and decode-2 exchange KV" in refused(scenario)["serve.transport"]


def test_decode_engines_may_share_a_gpu_over_nccl(host: pytest.MonkeyPatch) -> None:
    scenario = cluster(*ON_GPUS[:2], NCCL, "pool.prefill.devices=[0]", "pool.decode.devices=[1, 1]")
    refuse_what_is_not_served(scenario)
    assert set(gpu_environments(scenario)) == {"prefill-0", "decode-0", "decode-1"}


def test_nodes_of_a_store_exchange_kv_with_all_engines_and_these_not_with_each_other(
    host: pytest.MonkeyPatch,
) -> None:
    stored = cluster(NCCL, "transfer.method=kv-store")
    assert "prefill-0 and decode-1" not in refused(stored)["serve.transport"]
    assert "decode-0 and store-0 exchange KV" in refused(stored)["serve.transport"]
    host.setattr(devices, "count_gpus", lambda: 4)
    assert set(gpu_environments(stored)) == {"prefill-0", "decode-0", "decode-1", "store-0"}


@pytest.mark.parametrize("engine_host", ["127.0.0.1", "10.0.0.1"])
def test_a_component_of_its_own_checks_what_is_on_its_host(engine_host: str, host: pytest.MonkeyPatch) -> None:
    scenario = cluster(*ON_GPUS[:2], NCCL, f"serve.engine_host={engine_host}")
    if engine_host == "127.0.0.1":
        with pytest.raises(ScenarioError, match="prefill-0 and decode-1 exchange KV"):
            component.own_environment(scenario, "decode-0")
    else:
        assert component.own_environment(scenario, "decode-0")[VISIBLE] == "1,0"


@pytest.mark.parametrize(("who", "child"), [("decode-0", False), ("decode-0", True), ("router", False)])
def test_a_component_sets_its_environment_before_it_serves(
    who: str, child: bool, host: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The supervisor has set that of its children, and the router has none."""
    host.setattr(component, "load", lambda file, overrides: cluster(*ON_GPUS))
    host.setattr(component, "log_to_stderr", lambda who: None)
    seen = []

    async def serve(scenario: ResolvedScenario) -> None:
        seen.append(os.environ.get(VISIBLE))

    host.setattr(os, "environ", dict(os.environ))
    assert component.run_component(Namespace(scenario="", overrides=[], child=child), who, serve) == 0
    assert seen == ["1,0" if who == "decode-0" and not child else None]


def test_serve_refuses_a_host_without_gpus_in_one_sentence(tmp_path: Path) -> None:
    if gpus_here():
        pytest.skip("this host has a GPU")
    file = Path(__file__).resolve().parents[3] / "examples/serve-gpu.toml"
    for role in ((), ("--role", "decode", "--name", "decode-0")):
        command = [sys.executable, "-m", "pdflow", "serve", str(file), *role]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert ended.returncode == EXIT_BAD_INPUT
        assert "pool.0.device: is cuda, but this host has no GPU" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not ended.stdout
