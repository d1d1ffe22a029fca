"""All simulators are given the same: one trace, one cost. Without a peer's environment, ours is shown alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from benchmarks import peer_own_times
from benchmarks.peer_aisimulate import AISIMULATE, configured, fixed_times, prediction
from benchmarks.peer_figures import apart, delivered, overloaded, tenths, under_way
from benchmarks.peer_runs import (
    COST,
    FIXED_COST,
    KV_BYTES_PER_TOKEN,
    Case,
    Floats,
    Peer,
    Run,
    measured,
    mooncake,
    offered,
    profile,
    replay,
    scenario,
    simulated,
    traffic,
    usable,
    written_to,
)
from benchmarks.peers import main, markdown
from pdflow.scenario import load
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.workload.build import requests
from pdflow.workload.request import PREFIX_BLOCK_TOKENS

SMALL = Case(title="small", requests=40)


def test_pdflow_reads_back_the_traffic_that_it_drew(tmp_path: Path) -> None:
    written_to(tmp_path, SMALL)
    resolved = load(str(tmp_path / "scenario.toml"))
    read = list(requests(resolved.workload, resolved.seed, resolved.base_dir))
    drawn = traffic(SMALL)
    start = drawn[0].arrival_ns
    assert [(r.arrival_ns, r.input_tokens, r.output_tokens) for r in read] == [
        (r.arrival_ns - start, r.input_tokens, r.output_tokens) for r in drawn
    ]
    names = [name for r in read for name in r.prefix]
    assert len(set(names)) == len(names), "a prompt begins like another"
    assert all(len(r.prefix) == -(-r.input_tokens // PREFIX_BLOCK_TOKENS) for r in read)


def test_the_trace_is_mooncake() -> None:
    lines = [json.loads(line) for line in mooncake(traffic(SMALL)).splitlines()]
    assert [set(line) for line in lines] == [{"timestamp", "input_length", "output_length", "hash_ids"}] * 40
    assert lines[0]["timestamp"] == 0
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)


def test_the_profile_has_the_times_of_the_cost() -> None:
    points = profile(COST)

    def prefill_ms(new: int) -> float:
        (x0, x1), (y0, y1) = points["prefill_isl"], points["prefill_ttft_ms"]
        return float(y0 + (y1 - y0) * (new - x0) / (x1 - x0))

    def decode_ms(context: int) -> float:
        (x0, x1), (y0, y1) = points["decode_active_kv_tokens"], points["decode_itl"][:, 0]
        return float(y0 + (y1 - y0) * (context - x0) / (x1 - x0))

    assert (points["decode_itl"][:, 0] == points["decode_itl"][:, 1]).all(), "the mean context must not matter"
    for prompts in ([512], [1536, 700], [1000] * 8):
        step = [(new, 0) for new in prompts]
        assert prefill_ms(sum(prompts)) == pytest.approx(COST.step_ps(step, []) / 1e9, rel=1e-12)
    for contexts in ([600], [1000, 1400], [900] * 100):
        assert decode_ms(sum(contexts)) == pytest.approx(COST.step_ps([], contexts) / 1e9, rel=1e-12)


@pytest.mark.parametrize("bare", [True, False])
def test_both_are_given_the_same_engines_and_bandwidth(tmp_path: Path, bare: bool) -> None:
    case = Case(title="", requests=20, prefills=2, decodes=3, bandwidth=123_456_789, bare=bare)
    written_to(tmp_path, case)
    (tmp_path / "scenario.toml").write_text(scenario(case))
    ours, theirs = load(str(tmp_path / "scenario.toml")), replay(case, tmp_path)
    for pool in ours.pools:
        engine = theirs[f"{pool.name}_engine_args"]["engine"]
        assert pool.replicas == theirs[f"num_{pool.name}_workers"]
        assert pool.kv_tokens == engine["num_gpu_blocks"] * engine["block_size"]
        for key in ("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"):
            assert getattr(pool, key) == engine[key]
        assert ours.model.kv_bytes_per_token == engine["kv_transfer_bytes_per_token"]
        assert ours.network.bandwidth_bytes_per_s == round(engine["kv_transfer_bandwidth"] * 1e9)


def test_overload_is_the_load_that_was_asked_for() -> None:
    case = overloaded(Case(title="", requests=200, prefills=1), 1.3)
    nbytes, seconds = offered(traffic(case))
    assert nbytes / seconds / case.bandwidth == pytest.approx(1.3, rel=1e-6)


def test_a_queue_that_grows_is_seen_to_grow() -> None:
    at = np.arange(100.0)
    rows = np.stack([at, at, at, at, 2 * at + 0.5, 2 * at + 1, 2 * at + 2], axis=1)
    assert under_way(rows) == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    assert tenths(at) == [10 * i + 4.5 for i in range(10)]


def test_aisimulate_is_given_the_same_engines_bandwidth_and_step_times(tmp_path: Path) -> None:
    case = Case(title="", cost=FIXED_COST, requests=20, prefills=2, decodes=3, bandwidth=123_456_789)
    written_to(tmp_path, case)
    ours = load(str(tmp_path / "scenario.toml"))
    theirs = json.loads(Path(configured(case, tmp_path)).read_text("utf-8"))
    for pool in ours.pools:
        workers = theirs["engine"]["workers"][pool.name]
        cache = workers["kv_cache"]
        assert pool.replicas == workers["parallelism"]["replicas"]
        assert pool.max_num_seqs == workers["scheduler"]["max_sequences"]
        assert pool.max_num_batched_tokens == workers["scheduler"]["max_batched_tokens"]
        assert pool.block_size == cache["block_size"]
        assert pool.kv_tokens == cache["capacity"]["blocks"] * cache["block_size"]
        assert pool.enable_prefix_caching is cache["prefix_caching"] is False
        assert ours.model.kv_bytes_per_token == cache["bytes_per_token"]
        cost = step_cost(ours.model, pool, tmp_path)
        assert cost.step_ps([(700, 0), (300, 0)], []) == workers["timing"]["prefill_ms"] * 1e9
        assert cost.step_ps([], [900] * 40) == workers["timing"]["decode_ms"] * 1e9
    transfer = theirs["engine"]["kv_transfer"]
    assert ours.model.kv_bytes_per_token == transfer["bytes_per_token"]
    assert ours.network.bandwidth_bytes_per_s == round(transfer["bandwidth_gb_per_second"] * 1e9)
    assert theirs["traffic"]["source"]["paths"] == [str(tmp_path / "trace.jsonl")]


def test_a_cost_that_aisimulate_cannot_be_given_is_refused(tmp_path: Path) -> None:
    assert fixed_times(Case(title="", cost=FIXED_COST, requests=1)) == {
        "type": "fixed",
        "prefill_ms": 22.0,
        "decode_ms": 7.0,
    }
    with pytest.raises(ValueError, match="one time for each phase"):
        prediction(Case(title="long", cost=COST, requests=1), tmp_path)


def test_what_aisimulate_writes_is_read(tmp_path: Path) -> None:
    """The program that runs in its environment, with a stand-in for the module that it runs and its metadata."""
    request = {
        "arrival_time_ms": 1.0,
        "prefill_admit_ms": 2.0,
        "source_held_ms": 24.0,
        "destination_reserved_ms": 25.0,
        "destination_activated_ms": 32.0,
        "first_token_ms": 39.0,
        "last_token_ms": 60.0,
    }
    report = {"completed_requests": 1, "per_request": [request]}
    report |= {"mean_itl_ms": 7.0, "median_itl_ms": 7.1, "p90_itl_ms": 7.2, "p99_itl_ms": 7.3}
    (tmp_path / "aisimulate.py").write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1])\n"
        "assert json.loads(pathlib.Path(sys.argv[sys.argv.index('-c') + 1]).read_text())['engine']\n"
        f"report = {report!r}\n"
        "report = report if '--capture-per-request' in sys.argv else report | {'per_request': None}\n"
        "(folder / 'prediction.json').write_text(json.dumps(report))\n"
        "print('not what is read')\n"
    )
    (tmp_path / "aisimulate-1.2.dist-info").mkdir()
    (tmp_path / "aisimulate-1.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: aisimulate\nVersion: 1.2\n"
    )
    environment = f"import os, sys; sys.path.append({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
    path = configured(Case(title="", cost=FIXED_COST, requests=1), tmp_path)
    run = measured([sys.executable, "-c", environment + AISIMULATE, path, "rows"])
    assert (run.version, run.completed, list(run.itl)) == ("1.2", 1, [7.0, 7.1, 7.2, 7.3])
    assert run.rows.tolist() == [[1.0, 2.0, 24.0, 25.0, 32.0, 39.0, 60.0]]
    assert run.ttft.tolist() == [38.0]
    assert not len(measured([sys.executable, "-c", environment + AISIMULATE, path]).rows)


def run_of(rows: Floats) -> Run:
    return Run("1", len(rows), 1.0, 1, rows)


def test_more_than_a_nic_carries_is_shown_as_more_than_one() -> None:
    """All KV is there when the last request arrives; the NIC carries half of it, or twice, in that time."""
    case = Case(title="", requests=50, decodes=1)
    drawn = traffic(case)
    nbytes, seconds = offered(drawn)
    at = np.array([request.arrival_ns - drawn[0].arrival_ns for request in drawn]) / 1e6
    everything = np.stack([at, at, at, at, np.minimum(at + 5, at[-1]), at + 10, at + 20], axis=1)
    for multiple in (2.0, 0.5):
        narrow = attrs.evolve(case, bandwidth=round(nbytes / seconds / multiple))
        assert delivered(narrow, run_of(everything))["of_nic"] == pytest.approx(multiple, rel=1e-6)
    chosen = everything[[3, 40]]
    had = delivered(attrs.evolve(case, bandwidth=1000), run_of(chosen))
    tokens = drawn[3].input_tokens + drawn[40].input_tokens
    assert had["of_nic"] == pytest.approx(tokens * KV_BYTES_PER_TOKEN / (1000 * seconds), rel=1e-6)
    assert (had["completed"], had["in_time"]) == (2, int((chosen[:, -1] <= at[-1]).sum()))
    assert had["TTFT ms"] == pytest.approx([10.0] * 4)
    nothing = delivered(case, run_of(np.empty((0, 7))))
    assert nothing == {"completed": 0, "in_time": 0, "requests/s": 0.0, "TTFT ms": None, "of_nic": 0.0}


def test_only_the_same_arrivals_are_compared() -> None:
    rows = np.arange(21.0).reshape(3, 7)
    found = apart({"pdflow": run_of(rows), "peer": run_of(rows)})
    assert found is not None
    assert found["same"] == 1.0
    assert apart({"pdflow": run_of(rows)}) is None
    with pytest.raises(SystemExit, match="same arrivals"):
        apart({"pdflow": run_of(rows), "peer": run_of(rows + 1)})


@pytest.mark.slow
def test_a_peer_that_loses_requests_is_not_compared() -> None:
    """A saturated case may lose some; in any other, figures of those that are left would be no comparison."""
    program = "import json; print(json.dumps({'version': '1', 'completed': 3, 'rows': []}))"
    peer = Peer("lossy", sys.executable, program, lambda case, folder: case.title)
    case = Case(title="four", requests=4)
    with pytest.raises(SystemExit, match="four: lossy completed 3 of 4 requests"):
        simulated(case, peer)
    assert simulated(attrs.evolve(case, saturated=True), peer)["lossy"].completed == 3


def test_why_a_peer_cannot_be_run() -> None:
    assert usable("aisimulate", None, "aisimulate") == "no --aisimulate was given"
    assert usable("aisimulate", "/nowhere/python", "aisimulate") == (
        "/nowhere/python does not run: No such file or directory"
    )
    why_not = usable("aisimulate", sys.executable, "no_such_module")
    assert why_not == f"{sys.executable} has no no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    assert usable("aisimulate", sys.executable, "json") is None


@pytest.mark.parametrize("name", peer_own_times.DESIGNS)
def test_with_own_times_both_have_the_same_engines_and_links(tmp_path: Path, name: str) -> None:
    design = peer_own_times.DESIGNS[name]
    (tmp_path / "trace.jsonl").write_text(peer_own_times.trace(20))
    (tmp_path / "scenario.toml").write_text(peer_own_times.scenario(design, '{ model = "roofline" }'))
    ours = load(str(tmp_path / "scenario.toml"))
    theirs = peer_own_times.prediction(design, tmp_path)["engine"]
    assert {pool.name for pool in ours.pools} == set(theirs["workers"])
    for pool in ours.pools:
        workers = theirs["workers"][pool.name]
        assert (pool.replicas, pool.tp) == (workers["parallelism"]["replicas"], workers["parallelism"]["tensor"])
        assert pool.max_num_seqs == workers["scheduler"]["max_sequences"]
        assert pool.max_num_batched_tokens == workers["scheduler"]["max_batched_tokens"]
        assert pool.block_size == workers["kv_cache"]["block_size"]
        assert pool.kv_tokens == workers["kv_cache"]["capacity"]["blocks"] * workers["kv_cache"]["block_size"]
        assert ours.model.kv_bytes_per_token == workers["kv_cache"]["bytes_per_token"]
        assert pool.enable_prefix_caching is workers["kv_cache"]["prefix_caching"] is False
    assert sum(pool.replicas * pool.tp for pool in ours.pools) == 8
    assert (theirs["mode"] == "disaggregated") == ("kv_transfer" in theirs) == (len(ours.pools) == 2)
    if "kv_transfer" in theirs:
        assert ours.network.bandwidth_bytes_per_s is not None
        of_engine = ours.network.bandwidth_bytes_per_s * peer_own_times.TP
        assert of_engine == theirs["kv_transfer"]["bandwidth_gb_per_second"] * 1e9
    lengths = {(r.input_tokens, r.output_tokens) for r in requests(ours.workload, ours.seed, ours.base_dir)}
    assert lengths == {(1200, 200)}


@pytest.mark.slow
def test_own_times_without_the_peer_are_ours() -> None:
    found = peer_own_times.own_times(8, None)
    assert list(found) == list(peer_own_times.DESIGNS)
    for sources in found.values():
        assert list(sources) == list(peer_own_times.COSTS)
        without_host, tables = sources["pdflow, tables, no host time"], sources["pdflow, tables"]
        assert 0 < without_host["ITL"] < tables["ITL"]


@pytest.mark.nightly
def test_without_the_peers_ours_is_shown_and_how_to_have_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    asked = ["--dynamo", "/nowhere/bin/python", "--requests", "12", "--speed", "--markdown", str(page)]
    with pytest.raises(SystemExit) as ended:
        main(asked)
    assert ended.value.code == 1
    shown, complaint = capsys.readouterr()
    assert shown.startswith("skipped Dynamo: /nowhere/bin/python does not run: No such file or directory\n")
    assert "pip install --no-deps ai-dynamo==" in shown
    assert "\nskipped aisimulate: no --aisimulate was given\n" in shown
    assert "pip install --only-binary :all: aisimulate==" in shown
    assert shown.count("TTFT ms   pdflow") == 2
    assert "TTFT ms   Dynamo" not in shown
    assert "TTFT ms   aisimulate" not in shown
    assert complaint == f"{page} is not written: skipped Dynamo, aisimulate\n"
    assert not page.exists()


def test_the_page_has_each_peer_with_what_it_says_before_its_tables() -> None:
    found = {
        name: {"reading": [f"{name} says.", "More."], "tables": [f"{name} 1", "", "2"]} for name in ("Dynamo", "other")
    }
    page = markdown(found)
    assert "\n\n### Dynamo\n\n- Dynamo says.\n- More.\n\n```text\nDynamo 1\n\n2\n```\n\n### other\n\n- other" in page
    assert page.endswith("2\n```\n")
