"""`pdflow simulate` and `pdflow validate` as a user runs them: a process, a pipe of 80 columns, files, exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdflow.results.files.events import read_events
from pdflow.results.records import STAGES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = str(Path(__file__).parent / "small.toml")
ENV = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
BRIEF = "workload.requests=150"


def pdflow(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdflow", *args]
    return subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def example(name: str) -> tuple[str, ...]:
    """The file, and where its trace is if it has one."""
    path = str(EXAMPLES / name)
    if "mooncake" not in name:
        return (path,)
    trace = ROOT / "../shared/data/traces/mooncake_conversation_first2000.jsonl"
    if not trace.exists():
        pytest.skip("the trace that this example names is not here; README says where it is published")
    return (path, "--set", f"workload.trace.path={trace.resolve()}")


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    args = example(name)
    validated = pdflow("validate", *args)
    assert validated.returncode == 0, validated.stderr
    out = tmp_path / "out"
    done = pdflow("simulate", *args, "--set", BRIEF, "--check-invariants", "--out", str(out))
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, validated.stdout):
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
    assert "TTFT" in done.stdout
    assert "150 of 150" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["requests.jsonl", "results.json", "scenario.toml"]
    assert json.loads((out / "results.json").read_text())["completed"] == 150


def test_files_of_a_run_that_is_asked_for_everything(tmp_path: Path) -> None:
    done = pdflow("simulate", SMALL, "--events", "--save-detailed", "--quiet", "--out", str(tmp_path), "--seed", "7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["pdflow"]["seed"] == 7
    assert len(results["itls"]) == 40
    header, lines = read_events(tmp_path / "events.jsonl")
    assert header.seed == 7
    kinds = {(line.direction, line.body["type"]) for line in lines}
    assert {("in", "RequestArrived"), ("out", "PostWrite"), ("in", "WriteEnded"), ("out", "Reply")} <= kinds


def test_the_command_that_results_record_runs_as_it_stands(tmp_path: Path) -> None:
    files = ("--events", "--timeline", "--html", "--save-detailed", "--quiet", f"--out={tmp_path}")
    sets = ("--set", "workload.requests=5", "--set", "network.http_latency_s = 1")
    assert pdflow("simulate", SMALL, *files, *sets, "--seed", "3").returncode == 0
    command = json.loads((tmp_path / "results.json").read_text())["pdflow"]["command_line"]
    assert command == f"pdflow simulate {SMALL} --set workload.requests=5 --set 'network.http_latency_s = 1' --seed 3"
    again = pdflow(*shlex.split(command)[1:])
    assert again.returncode == 0, again.stderr
    assert "seed 3 · 5 requests" in again.stdout


def test_stages_sum_to_ttft(tmp_path: Path) -> None:
    overrides = ("network.preset=rdma-400g", "pool.d.kv_tokens=256", "router.dispatch=sequential")
    sets = [argument for override in overrides for argument in ("--set", override)]
    assert pdflow("simulate", SMALL, *sets, "--quiet", "--out", str(tmp_path)).returncode == 0
    for line in (tmp_path / "requests.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert list(record["ends_ns"]) == list(STAGES)
        latest, spent = record["arrival_ns"], 0
        for end in record["ends_ns"].values():
            if end is not None:
                spent += max(0, end - latest)
                latest = max(latest, end)
        assert latest == record["first_token_ns"] <= record["last_token_ns"]
        assert spent == record["first_token_ns"] - record["arrival_ns"]
        ends = list(record["ends_ns"].values())
        assert ends == sorted(ends), "in a sequential dispatch each stage ends after the one before"


def test_set_and_seed_change_the_run(tmp_path: Path) -> None:
    for name, args in (("a", ()), ("b", ("--seed", "1")), ("c", ("--set", "pool.d.replicas=1"))):
        assert pdflow("simulate", SMALL, *args, "--quiet", "--out", str(tmp_path / name)).returncode == 0
    a, b, c = ((tmp_path / name / "requests.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert b'"d-1"' in a
    assert b'"d-1"' not in c


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "pool.d.tp=3"), "tp"),
        (("--set", "router.polcy=round-robin"), "did you mean policy?"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_a_wrong_scenario_writes_nothing(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = pdflow("simulate", SMALL, *args, "--out", str(out))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not out.exists()


@pytest.mark.parametrize("folder", ["file/x", "/dev/null/x"])
def test_a_folder_that_cannot_be(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = pdflow("simulate", SMALL, "--quiet", "--out", str(tmp_path / folder))
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path / folder}: cannot write: Not a directory. " + (
        "The file was not written; choose another --out, or free space there.\n"
    )


def test_a_missing_file() -> None:
    done = pdflow("simulate", "nowhere.toml")
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr


def test_a_request_that_never_fits_fails_with_its_reason(tmp_path: Path) -> None:
    """Of a trace nobody can say beforehand that all of it fits."""
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": [%d]}\n'
    trace.write_text("".join(row % (100 * i, 9000 if i == 1 else 100, i) for i in range(3)))
    scenario = tmp_path / "trace.toml"
    text = Path(SMALL).read_text()
    begin, end = text.index("[workload]"), text.index("[model]")
    scenario.write_text(
        text[:begin] + '[workload]\ntrace = { path = "trace.jsonl", format = "mooncake" }\n\n' + text[end:]
    )
    done = pdflow("simulate", str(scenario), "--out", str(tmp_path / "out"), "--check-invariants")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["completed", "failed", "completed"]
    assert records[1]["reason"] == "does not fit the engine's KV cache"


ENDED_BY = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a simulation, to be ended by a signal."""
    with subprocess.Popen(
        [sys.executable, "-m", "pdflow", "simulate", *arguments],
        env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # What is started in the background of a shell ignores Ctrl-C, and so does what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def interrupted_run(folder: Path, number: signal.Signals, *arguments: str) -> tuple[str, str]:
    """Run until the first events are written, send the signal, and return stdout and stderr."""
    events = folder / "events.jsonl.part"
    with started(*arguments, "--events", "--out", str(folder)) as process:
        deadline = time.monotonic() + 30
        while not events.exists() or events.stat().st_size == 0:
            assert time.monotonic() < deadline, "the run has not begun"
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads((folder / "results.json").read_text())["pdflow"]["interrupted"] is True
    assert "interrupted, partial" in " ".join(out.split())
    return out, err


@ENDED_BY
def test_a_signal_before_the_run_says_that_there_are_no_results(tmp_path: Path, number: signal.Signals) -> None:
    scenario = tmp_path / "scenario.toml"
    os.mkfifo(scenario)
    # The pipe opens when the command reads its scenario, which then has no end.
    with started(str(scenario), "--out", str(tmp_path / "out")) as process, scenario.open("w"):
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted: nothing simulated yet, and nothing written\n")
    assert not (tmp_path / "out").exists()


@ENDED_BY
def test_a_signal_before_the_first_completion_leaves_partial_results(tmp_path: Path, number: signal.Signals) -> None:
    long = ("workload.output_tokens=50000000", "pool.d.kv_tokens=1000000000", "workload.requests=2000")
    sets = [argument for override in long for argument in ("--set", override)]
    _, err = interrupted_run(tmp_path, number, SMALL, "--exact", *sets)
    assert "interrupted: the results are partial; no request had completed yet" in err
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert {record["outcome"] for record in records} == {None}


@ENDED_BY
def test_a_signal_keeps_the_results_so_far(tmp_path: Path, number: signal.Signals) -> None:
    endless = ("--set", "workload.requests=100000000", "--html", "--timeline")
    _, err = interrupted_run(tmp_path, number, SMALL, *endless)
    assert "requests had completed" in err
    assert "Interrupted: the figures cover only a part of the run." in (tmp_path / "report.html").read_text()
    trace = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))
    assert trace["traceEvents"]
    assert trace["otherData"]["interrupted"] is True
    results = json.loads((tmp_path / "results.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert results["completed"] == sum(record["outcome"] == "completed" for record in records) > 0
    assert sum(1 for _ in read_events(tmp_path / "events.jsonl")[1]) > 0


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_itls_sum_to_last_less_first_token_with_preemptions_too(tmp_path: Path, first_token: str) -> None:
    tight = (
        "workload.output_tokens=60", "pool.d.kv_tokens=256", "pool.d.replicas=1", "network.preset=rdma-400g",
        f"router.first_token={first_token}", "pool.d.cost={ model = 'roofline' }",
    )  # fmt: skip
    sets = [argument for override in tight for argument in ("--set", override)]
    done = pdflow("simulate", SMALL, *sets, "--save-detailed", "--quiet", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    itls = json.loads((tmp_path / "results.json").read_text())["itls"]
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for waits, record in zip(itls, records, strict=True):
        assert len(waits) == record["output_tokens"] - 1
        spent_ns = sum(round(wait * 1e9) for wait in waits)
        assert spent_ns == record["last_token_ns"] - record["first_token_ns"]
    longest, median = max(map(max, itls)), sorted(wait for waits in itls for wait in waits)[len(itls) // 2]
    assert longest > 3 * median, "somebody was preempted"


def test_python_overrides_are_read_back_as_what_they_were() -> None:
    import pdflow

    result = pdflow.simulate(
        SMALL,
        overrides={
            "workload.arrival": {"process": "constant", "rate_rps": 50.0},
            "workload.requests": 5,
            "scenario.name": "8",
            "network.poll": False,
        },
    )
    assert result.header.scenario_name == "8"
    assert result.header.request_rate_rps == 50.0
    assert len(result.requests) == 5


@pytest.mark.parametrize("option", ["events", "save_detailed", "timeline", "html"])
def test_python_requires_a_folder_for_what_it_writes(option: str) -> None:
    import pdflow

    asked: dict[str, Any] = {option: True}
    with pytest.raises(ValueError, match="set out to a folder"):
        pdflow.simulate(SMALL, **asked)


def test_python_writes_what_the_command_writes(tmp_path: Path) -> None:
    import pdflow

    pdflow.simulate(SMALL, out=tmp_path, timeline=True, html=True)
    names = {"results.json", "requests.jsonl", "scenario.toml", "timeline.json.gz", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_engines_that_computed_only_abandoned_requests_are_not_reported_as_idle(tmp_path: Path) -> None:
    """Their steps stand in no record of a request."""
    few = ("workload.requests=5", "workload.client={timeout_s=0.01}", "pool.w.api_server_s=0.03")
    sets = [argument for each in few for argument in ("--set", each)]
    alone = str(Path(SMALL).with_name("alone.toml"))
    assert pdflow("simulate", alone, *sets, "--quiet", "--html", "--out", str(tmp_path)).returncode == 0
    assert json.loads((tmp_path / "results.json").read_text())["pdflow"]["gpu_busy_share"]["aggregated"] > 0
    page = (tmp_path / "report.html").read_text()
    assert "Always zero" in page
    assert "GPUs at work" not in page


def test_a_reader_of_the_report_may_stop_reading() -> None:
    """`| head` has seen enough: no error, and no exit code that means something else."""
    command = f"{sys.executable} -m pdflow simulate {SMALL} | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("arguments", [f"simulate {SMALL}", "presets", "schema", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(arguments: str) -> None:
    command = f"{sys.executable} -m pdflow {arguments} > /dev/full"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 2
    assert "standard output: cannot write: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
