"""`pdflow explain`: the explanation of planted causes of waits, and that requests are simulated again as they were.

The cluster is tests/sim/small.toml, with constant costs and even arrivals, so that each wait has one cause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.errors import PdflowError
from pdflow.results.explanation.request_view import RequestExplanation
from pdflow.results.explanation.simulated import SimulatedRequest, differences
from pdflow.results.explanation.slow_view import RunExplanation
from pdflow.results.files.read import read_recorded
from pdflow.results.records import STAGES
from pdflow.scenario.reading.editable import Scenario
from pdflow_sim.explain.changes import ScenarioChange, changes_of
from pdflow_sim.explain.command import explain
from pdflow_sim.explain.window import TargetRequest, simulate_window
from pdflow_sim.run import simulate

HERE = Path(__file__).parent
SMALL = HERE.parent / "small.toml"
ALONE = HERE.parent / "alone.toml"
SESSIONS = Path(__file__).resolve().parents[3] / "examples/sessions.toml"
CLOSED = {"workload.arrival": {"process": "closed", "concurrency": 6}}

Ran: TypeAlias = Callable[..., Path]
EVEN = {"workload.arrival": {"process": "constant", "rate_rps": 1000.0}}


@pytest.fixture
def ran(tmp_path: Path) -> Ran:
    """Simulate with `--out`, and return the folder."""

    def run(edits: Mapping[str, Any], file: Path = SMALL) -> Path:
        written = Scenario.load(file, edits)
        simulate(written.resolved, out=str(tmp_path / "run"), written=written, quiet=True)
        return tmp_path / "run"

    return run


def of_request(folder: Path, request: int | str, *, itl: bool = False) -> RequestExplanation:
    found = explain(folder, str(request), itl=itl, jobs=1)
    assert isinstance(found, RequestExplanation)
    return found


def stages(explanation: RequestExplanation, name: str = "") -> dict[str, int]:
    """Return the durations of the request's stages as it was, or with a change."""
    if not name:
        return {row.stage: row.duration_ns for row in explanation.path.rows}
    [durations] = [each.simulated.durations_ns for each in explanation.what_ifs if each.name == name]
    return dict(zip(STAGES, durations, strict=True))


def wait(explanation: RequestExplanation, stage: str) -> Any:
    [row] = [row for row in explanation.path.rows if row.stage == stage]
    return row.wait


def printed(explanation: RequestExplanation | RunExplanation) -> str:
    from rich.console import Console

    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(explanation)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_stages_add_up_to_ttft_and_so_do_those_of_each_what_if(ran: Ran) -> None:
    folder = ran({"network.preset": "rdma-400g"})
    records = read_recorded(folder).records
    for request in (0, 7, 39):
        found = of_request(folder, request)
        assert found.path.ttft_ns == records.first_token_ns[request] - records.arrival_ns[request]
        assert sum(stages(found).values()) == found.path.ttft_ns
        assert [each.name for each in found.what_ifs] == ["pull", "block 64", "2 x link", "+1 P", "+1 D"]
        for each in found.what_ifs:
            assert sum(each.simulated.durations_ns) == each.simulated.ttft_ns


def test_a_prefill_queue_names_the_requests_ahead(ran: Ran) -> None:
    """One P computes one prompt at a time in 20 ms; of four that arrive within 3 ms, the last waits for three."""
    edits = {"workload.requests": 4, "pool.p.replicas": 1, "pool.p.max_num_seqs": 1, "pool.p.async_scheduling": False}
    found = of_request(ran({**EVEN, **edits, "workload.input_tokens": 50}), 3)
    queued = wait(found, "p_queue")
    assert queued.requests == (0, 1, 2)
    assert queued.prompt_tokens == 150
    assert "3 requests ahead in p-0 (r0, r1, r2), 150 prompt tokens" in printed(found).replace("\n" + " " * 13, " ")
    assert stages(found)["p_queue"] == 57_000_000
    assert stages(found, "+1 P")["p_queue"] == 18_000_000  # one prompt is ahead of it on each P
    assert stages(found, "+1 D") == stages(found)


def test_twice_the_bandwidth_halves_the_wire(ran: Ran) -> None:
    edits = {"workload.requests": 2, "workload.input_tokens": 100, "network.bandwidth_bytes_per_s": 100_000_000}
    found = of_request(ran(edits), 0)
    slow, fast = stages(found)["xfer_wire"], stages(found, "2 x link")["xfer_wire"]
    assert slow > 100_000_000
    assert abs(slow - 2 * fast) <= 1


def test_transfers_on_the_same_nic_are_named(ran: Ran) -> None:
    """Two prompts of one step go from one P to two Ds at once: each has half of P's NIC."""
    edits = {"pool.p.replicas": 1, "workload.input_tokens": 100, "network.bandwidth_bytes_per_s": 100_000_000}
    found = of_request(ran({**EVEN, **edits, "workload.requests": 3}), 1)
    assert wait(found, "xfer_wire").requests == (0, 2)
    text = "2 other transfers left p-0 (r0, r2); no other transfers reached d-1"
    assert wait(found, "xfer_wire").text == text


def test_pull_posts_at_each_d_what_push_posts_at_one_p(ran: Ran) -> None:
    """P posts the transfers of two prompts one after the other; with pull each D posts its own."""
    edits = {"pool.p.replicas": 1, "workload.input_tokens": 100, "network.per_descriptor_s": 1e-5}
    found = of_request(ran({**EVEN, **edits, "workload.requests": 3}), 1)
    assert wait(found, "xfer_post").requests == (2,)
    assert stages(found)["xfer_post"] == 2 * stages(found, "pull")["xfer_post"] > 0


def test_an_admission_waits_for_free_blocks(ran: Ran) -> None:
    """D has blocks for one request at a time."""
    edits = {"workload.requests": 2, "workload.input_tokens": 100, "workload.output_tokens": 20}
    found = of_request(ran({**EVEN, **edits, "pool.d.replicas": 1, "pool.d.kv_tokens": 160}), 1)
    assert found.unchanged is not None
    assert found.unchanged.memory is not None
    memory = found.unchanged.memory
    assert memory.free < memory.needed == 7 <= memory.total
    assert wait(found, "d_admit").requests == (0,)
    assert f"{memory.free} of {memory.total} blocks were free, it needs 7" in wait(found, "d_admit").text
    assert stages(found, "+1 D")["d_admit"] < stages(found)["d_admit"]


def test_an_admission_that_is_held_back_names_the_limit(ran: Ran) -> None:
    """D has free blocks, but too many of them wait for KV from the same P: that of request 0, on a slow wire."""
    edits = {"workload.requests": 3, "workload.input_tokens": 50, "network.bandwidth_bytes_per_s": 100_000_000}
    found = of_request(ran({**EVEN, **edits, "pool.d.replicas": 1, "pool.d.kv_tokens": 320}), 2)
    assert found.unchanged is not None
    assert found.unchanged.memory is not None
    memory = found.unchanged.memory
    assert (memory.needed, memory.to_come, memory.most_to_come) == (4, 4, 5)
    assert memory.free >= memory.needed
    assert "4 blocks were still to come from p-0, and at most 5 may" in wait(found, "d_admit").text
    assert stages(found)["d_admit"] > stages(found, "2 x link")["d_admit"]


CHUNK = {
    **EVEN,
    "workload.arrival.rate_rps": 5.0,
    "workload.requests": 2,
    "workload.input_tokens": 3000,
    "workload.output_tokens": 60,
    "pool.w.cost": {"model": "roofline"},
    "noise": {"steps": 0.0, "api_server": 0.0, "links": 0.0},
}


def test_the_worst_itl_names_the_prompt_in_its_step(ran: Ran) -> None:
    """An aggregated engine decodes request 0 while request 1 arrives: one step of both computes its whole prompt."""
    found = of_request(ran(CHUNK, ALONE), 0, itl=True)
    assert found.unchanged is not None
    worst = found.unchanged.itl
    assert worst is not None
    assert (worst.cause, worst.prompts, worst.steps) == ("prompt chunk", ((1, 3000),), 1)
    assert worst.duration_ns > 5 * worst.median_ns
    [more] = [each.simulated.itl for each in found.what_ifs if each.name == "+1 engine"]
    assert more is not None
    assert more.prompts == ()
    assert "also computed 3,000 prompt tokens (r1)" in " ".join(printed(found).split())


def test_the_worst_itl_names_a_preemption(ran: Ran) -> None:
    """D runs out of blocks while both requests grow, and computes the second one's tokens again."""
    edits = {"workload.requests": 2, "workload.input_tokens": 60, "workload.output_tokens": 60, "pool.d.replicas": 1}
    found = of_request(ran({**EVEN, **edits, "pool.d.kv_tokens": 176}), 1, itl=True)
    assert found.unchanged is not None
    worst = found.unchanged.itl
    assert worst is not None
    assert worst.cause == "preemption"
    assert [request for request, _ in worst.prompts] == [1]
    assert "ran out of KV blocks and preempted it" in " ".join(printed(found).split())


def test_the_wait_for_the_second_token_holds_the_transfer_if_the_first_is_from_p(ran: Ran) -> None:
    edits = {"router.first_token": "prefill", "workload.output_tokens": 5, "network.bandwidth_bytes_per_s": 10**8}
    folder = ran(edits)
    run = read_recorded(folder)
    found = of_request(folder, 3, itl=True)
    assert found.unchanged is not None
    worst = found.unchanged.itl
    assert worst is not None
    assert (worst.cause, worst.token) == ("transfer", 2)
    assert worst.begin_ns == run.records.first_token_ns[3]
    assert worst.duration_ns == run.records.last_token_ns[3] - worst.begin_ns - 3 * 5_000_000


@pytest.mark.parametrize(
    ("file", "edits"),
    [
        (SMALL, {"network.preset": "rdma-400g"}),
        (SMALL, {"router.first_token": "prefill"}),
        (SMALL, CLOSED),
        (SMALL, {"transfer.method": "kv-store"}),
        (SMALL, {"slo.itl_ms": 5.0}),
        (ALONE, {"workload.output_tokens": 9}),
        (SESSIONS, {"workload.requests": 60}),
    ],
    ids=["open", "p-first", "closed", "store", "bounded", "alone", "sessions"],
)
def test_the_unchanged_request_is_the_recorded_one(ran: Ran, file: Path, edits: Mapping[str, Any]) -> None:
    """Nothing that happens after a request has ended can change it, so that its window may end there."""
    folder = ran(edits, file)
    run = read_recorded(folder)
    scenario = Scenario.load(folder / "scenario.toml").resolved
    for request in range(0, len(run.records), 9):
        again = simulate_window(scenario, TargetRequest.of(run.records, request))
        assert differences(run.records, request, again) == []
        assert again.until_ns >= run.records.last_token_ns[request]
        if run.records.itl_max_ns and run.records.output_tokens[request] > 1:
            assert again.itl is not None
            assert again.itl.duration_ns == run.records.itl_max_ns[request]


def test_a_window_is_shorter_than_the_run(ran: Ran) -> None:
    found = of_request(ran({"workload.requests": 400}), 3)
    assert found.unchanged is not None
    assert found.unchanged.arrived < 100


def test_a_changed_trace_leaves_no_what_ifs(ran: Ran, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,50,3\n0.1,50,3\n")
    written = Scenario.load(SMALL).document()
    written["workload"] = {"trace": {"path": str(trace), "format": "vidur"}}
    saved = Scenario.from_dict(written)
    folder = tmp_path / "run"
    simulate(saved.resolved, out=str(folder), written=saved, quiet=True)
    assert of_request(folder, 1).what_ifs
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,50,3\n0.2,50,3\n")
    found = of_request(folder, 1)
    assert found.what_ifs == ()
    assert "arrival_ns" in found.no_what_ifs
    assert found.path.ttft_ns is not None


@pytest.mark.parametrize("how", ["missing", "changed", "wrong", "live"])
def test_without_the_scenario_the_path_is_still_explained(ran: Ran, how: str) -> None:
    folder = ran({})
    file = folder / "scenario.toml"
    text = file.read_text()
    if how == "missing":
        file.unlink()
    elif how == "changed":
        file.write_text(text.replace("kv_tokens = 4096", "kv_tokens = 8192"))
    elif how == "wrong":
        file.write_text(text.replace("nixl-push", "nixl-pish"))
    else:
        results = (folder / "results.json").read_text()
        (folder / "results.json").write_text(results.replace('"world": "simulated"', '"world": "live"'))
    found = of_request(folder, 5)
    assert sum(stages(found).values()) == found.path.ttft_ns
    assert found.unchanged is None
    expected = {"missing": "has no scenario.toml", "changed": "has changed since the run", "wrong": "is wrong"}
    assert expected.get(how, "live run") in found.no_what_ifs
    assert "No what-ifs: " in " ".join(printed(found).split())
    if how != "live":
        assert f"--out {folder}" in found.no_what_ifs
    assert "latency is not known: " in " ".join(printed(of_request(folder, 5, itl=True)).split())


def test_a_cancelled_request_is_explained_as_far_as_it_came(ran: Ran) -> None:
    edits = {"pool.p.replicas": 1, "pool.p.max_num_seqs": 1, "workload.requests": 8, "workload.client.timeout_s": 0.05}
    folder = ran({**EVEN, **edits})
    found = of_request(folder, 7)
    assert found.path.outcome == "cancelled"
    assert found.path.ttft_ns is None
    assert found.path.stopped_in == "p_queue"
    assert "it stopped in p_queue" in printed(found)
    assert "It was cancelled 0.05 s after it arrived" in printed(found)
    assert found.unchanged is not None
    assert "It has no inter-token latency" in printed(of_request(folder, 7, itl=True))


def test_a_request_whose_engine_crashed_is_explained_with_its_reason(ran: Ran) -> None:
    file = SESSIONS.parent / "faults/decode-crash.toml"
    folder = ran({"router.max_attempts": 1}, file)
    failed = read_recorded(folder).records.outcome.index("failed")
    found = of_request(folder, failed)
    text = " ".join(printed(found).split())
    assert found.path.reason == "its engine or the engine's peer died"
    assert "after it arrived: its engine or the engine's peer died." in text
    assert f"it stopped in {found.path.stopped_in}" in text
    assert "so far" in text
    assert "+1 D: failed: its engine or the engine's peer died" in text


def test_what_does_not_apply_is_left_out_with_its_reason(ran: Ran) -> None:
    found = of_request(ran({"pool.w.block_size": 64}, ALONE), 3)
    assert [each.name for each in found.what_ifs] == ["+1 engine"]
    assert {each.name: each.reason for each in found.left_out} == {
        "pull": "aggregated engines transfer no KV",
        "block 64": "block_size is 64 already",
        "2 x link": "aggregated engines transfer no KV",
        "+1 P": "there is no prefill pool",
        "+1 D": "there is no decode pool",
    }
    assert "+1 P is left out: there is no prefill pool" in printed(found)


def test_a_method_without_a_counterpart_and_links_without_a_limit_are_left_out() -> None:
    scenario = Scenario.load(SMALL, {"transfer.method": "kv-store"}).resolved
    left_out = {each.name: each for each in changes_of(scenario, ("p-0", "d-0"))}
    assert not isinstance(left_out["push"], ScenarioChange)
    assert left_out["push"].reason == "kv-store has no counterpart that pushes"
    assert left_out["2 x link"].reason == "no NIC and no link has a limit"  # type: ignore[union-attr]


def test_one_more_engine_joins_the_pool_that_served_the_request() -> None:
    text = SMALL.read_text()
    pool = text[text.index("[[pool]]") : text.index("[[pool]]", text.index("[[pool]]") + 1)]
    both = text.replace(pool, pool + pool.replace('"p"', '"q"').replace("replicas = 2", "replicas = 4"))
    scenario = Scenario.from_toml(both).resolved
    edits = [each.edits for each in changes_of(scenario, ("q-3", "d-0")) if isinstance(each, ScenarioChange)]
    assert {"pool.q.replicas": 5} in edits


def test_a_refused_change_is_left_out_with_the_reason(ran: Ran) -> None:
    """A pool that scales has a largest number of engines, which one more would exceed."""
    found = of_request(ran({"transfer.method": "nixl-push", "transfer.progressive": True}), 3)
    names = [each.name for each in found.what_ifs]
    refused = [each for each in found.left_out if each.name == "pull"]
    assert ("pull" in names) != bool(refused)
    assert all("progressive" in each.reason for each in refused)


def test_a_run_is_explained_by_its_slowest_requests(ran: Ran) -> None:
    folder = ran({"workload.requests": 300, "workload.arrival.rate_rps": 90.0})
    found = explain(folder, None, itl=False, jobs=1)
    assert isinstance(found, RunExplanation)
    records = read_recorded(folder).records
    ttfts = sorted(first - arrival for first, arrival in zip(records.first_token_ns, records.arrival_ns, strict=True))
    assert found.found.slow == 3
    assert sum(found.found.slow_ns) == pytest.approx(sum(ttfts[-3:]) / 3)
    assert sum(found.found.all_ns) == pytest.approx(sum(ttfts) / 300)
    slowest, _, worst = found.found.examples
    assert records.first_token_ns[slowest.request] - records.arrival_ns[slowest.request] == ttfts[-1]
    assert found.found.itl is not None
    assert worst.request == found.found.itl.request
    assert found.command(worst).endswith(f"explain {folder} {worst.request} --itl")
    alone = of_request(folder, worst.request, itl=True)
    assert alone.unchanged is not None
    assert alone.unchanged.itl == found.found.itl
    assert found.command(slowest) in printed(found).replace("\n", "")


def test_the_worst_itl_of_a_run_is_that_of_its_records(ran: Ran) -> None:
    folder = ran({"slo.itl_ms": 5.0})
    found = explain(folder, None, itl=False, jobs=1)
    assert isinstance(found, RunExplanation)
    assert found.found.itl is not None
    assert found.found.itl.duration_ns == max(read_recorded(folder).records.itl_max_ns)


def test_without_the_scenario_a_run_has_three_examples_too(ran: Ran) -> None:
    folder = ran({"workload.requests": 300})
    (folder / "scenario.toml").unlink()
    found = explain(folder, None, itl=False, jobs=1)
    assert isinstance(found, RunExplanation)
    assert found.found.itl is None
    assert "has no scenario.toml" in found.found.no_itl
    assert len({each.request for each in found.found.examples}) == 3


@pytest.mark.parametrize("request_id", ["40", "-1", "x", "r", "1.5", "²"])
def test_an_unknown_request_is_refused(ran: Ran, request_id: str) -> None:
    with pytest.raises(PdflowError, match="expected 0 to 39") as refused:
        explain(ran({}), request_id, itl=False, jobs=1)
    assert refused.value.exit_code == 2


def test_a_request_is_named_by_its_number_with_or_without_r(ran: Ran) -> None:
    folder = ran({})
    assert of_request(folder, "r7").path == of_request(folder, 7).path


def test_processes_find_the_same(ran: Ran) -> None:
    folder = ran({})
    assert explain(folder, "9", itl=False, jobs=2).as_dict() == of_request(folder, 9).as_dict()


def test_the_command_prints_the_same_as_json(ran: Ran) -> None:
    folder = ran({})
    result = CliRunner().invoke(cli, ["explain", str(folder), "9", "--json", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(json.dumps(of_request(folder, 9).as_dict()))
    assert sum(row["duration_ns"] for row in found["stages"]) == found["ttft_ns"]
    assert sum(row["share"] for row in found["stages"]) == pytest.approx(1)
    assert {each["name"] for each in found["what_ifs"]} == {"pull", "block 64", "+1 P", "+1 D"}
    whole = CliRunner().invoke(cli, ["explain", str(folder), "--json"])
    assert len(json.loads(whole.stdout)["examples"]) == 2  # one request is the slowest 1 % of 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "results.json cannot be read"),
        (["nowhere", "--itl"], "--itl needs a REQUEST_ID"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["explain", str(tmp_path / arguments[0]), *arguments[1:]])
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_of_several_seeds_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    few = ["--set", "workload.requests=5", "--out", out, "--quiet"]
    assert CliRunner().invoke(cli, ["simulate", str(SMALL), "--seeds", "2", *few]).exit_code == 0
    refused = CliRunner().invoke(cli, ["explain", out])
    assert refused.exit_code == 2
    assert "seed-1" in refused.output
    one = CliRunner().invoke(cli, ["explain", f"{out}/seed-2", "3", "--jobs", "1"])
    assert one.exit_code == 0, one.output
    assert "equals its record" in " ".join(one.output.split())


def test_records_without_stages_are_refused(ran: Ran) -> None:
    folder = ran({})
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    stripped = [{**line, "ends_ns": dict.fromkeys(line["ends_ns"])} for line in lines]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stripped))
    with pytest.raises(PdflowError, match="have no stages"):
        explain(folder, "3", itl=False, jobs=1)


def test_what_an_interrupted_run_did_not_record_is_not_compared(ran: Ran) -> None:
    folder = ran({})
    records = read_recorded(folder).records
    again = simulate_window(Scenario.load(folder / "scenario.toml").resolved, TargetRequest(5))
    assert isinstance(again, SimulatedRequest)
    for column in records.ends[3:]:
        column[5] = -1
    records.outcome[5], records.first_token_ns[5], records.last_token_ns[5] = None, -1, -1
    assert differences(records, 5, again) == []
    records.ends[1][5] += 1
    assert differences(records, 5, again) == ["ends_ns"]
