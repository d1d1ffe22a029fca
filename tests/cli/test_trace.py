"""`pdflow trace`: what it says of a file, what it guesses, and that a model holds the shape and not the traffic."""

from __future__ import annotations

import json
import shlex
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdflow.cli import cli
from pdflow.scenario.schema.workload import Trace, TraceFormat
from pdflow.workload.fitting.statistics import statistics
from pdflow.workload.traces.guess import guess
from pdflow.workload.traces.readers import load_model, read_trace

TRACES = Path(__file__).resolve().parents[2] / "../shared/data/traces"
SHARING = {"prefix blocks hit, unlimited cache", "requests that hit more than one block", "blocks hit by those, mean"}
ROOT = Path(__file__).resolve().parents[2]


def trace(*args: object) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, args)], prog_name="pdflow")


def figures(*args: object) -> dict[str, dict[str, float]]:
    result = trace("describe", *args, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def published(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"needs the published trace {name} in ../shared/data/traces")
    return TRACES / name


@pytest.fixture
def steady(tmp_path: Path) -> Path:
    """200 requests, 4 at once every 2 s; each fourth is of another class; prefixes of two blocks, the first shared."""
    lines = [
        json.dumps(
            {
                "timestamp": 2000 * (k // 4),
                "input_length": 600 + k,
                "output_length": 10,
                "hash_ids": [0, k + 1],
                "class": "batch" if k % 4 == 3 else "chat",
            }
        )
        for k in range(200)
    ]
    path = tmp_path / "steady.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_figures_are_those_that_follow_by_hand(steady: Path) -> None:
    found = figures(steady)
    assert (found["format"], found["requests"], found["note"]) == ("mooncake", 200, "")
    arrivals = found["arrivals"]
    assert arrivals["span_s"] == 98.0
    assert arrivals["rate_rps"] == pytest.approx(200 / (98 + 98 / 199))
    assert arrivals["peak_rps"] == {"1 s": 4.0, "60 s": 2.0}
    assert arrivals["same_instant"] == pytest.approx(150 / 199)
    # Counts of 4 and 0 in turn; of nothing but 20.
    assert arrivals["dispersion"]["1 s"] == pytest.approx(2.0, abs=0.05)
    assert found["input_tokens"]["total"] == sum(range(600, 800))
    assert (found["input_tokens"]["p50"], found["output_tokens"]["max"]) == (699.5, 10)
    assert found["prefix"]["hit_blocks"] == 199 / 400
    assert found["prefix"]["hit_tokens"] == pytest.approx(199 * 512 / sum(range(600, 800)))
    assert {name: row["requests"] for name, row in found["classes"].items()} == {"batch": 50, "chat": 150}


def test_a_stretch_of_it_can_be_looked_at(steady: Path) -> None:
    found = figures(steady, "--start-s", 9, "--end-s", "20.5")
    assert (found["requests"], found["arrivals"]["span_s"]) == (24, 10.0)


def test_the_report_is_plain_and_fits_a_terminal(steady: Path) -> None:
    result = trace("describe", steady)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    assert result.stdout.isascii()
    assert [line for line in lines if line.startswith("prefix hits 49.8% of blocks")]
    assert [line for line in lines if line.startswith("batch")]
    assert sum("|" in line for line in lines) == 8


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n", "azure"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "burstgpt"),
        ("num_prefill_tokens,num_decode_tokens,pd_ratio\n", "vidur"),
        ("arrival_time_ns,input_toks,output_toks\n", "llmservingsim"),
        ("0,0,0,,0,0\n", "servegen"),
        ("600,1.5,8.5,Weibull,0.37,0.39\n", "servegen"),
        ('[\n {"id": "a",\n "conversations": [', "sharegpt"),
        ('{"prompt": "a", "output_tokens": 5}\n', "vllm-custom"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}\n', "mooncake"),
        ("t,in,out\n", None),
        ("1,2,3,4,5,6\n", None),
        ("{\n", None),
        ("", None),
    ],
)
def test_a_format_is_guessed_only_where_it_is_certain(text: str, form: TraceFormat | None) -> None:
    assert guess(text.splitlines(keepends=True)) == form


def test_doubt_and_nonsense_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,in,out\n0,1,2\n1,3,4\n")
    asked = trace("describe", path)
    assert (asked.exit_code, asked.stdout) == (2, "")
    columns = ("--column", "arrival_s=t", "--column", "input_tokens=in", "--column", "output_tokens=out")
    assert asked.stderr == (
        f"{path}: the names of its columns (t, in, out) do not show which of them are the token counts; "
        f"run pdflow trace describe {path} {' '.join(columns)}\n"
    )
    assert trace("describe", path, "--format", "csv", *columns).exit_code == 0
    assert "'cvs' is not one of mooncake" in trace("describe", path, "--format", "cvs").stderr
    assert "did you mean class?" in trace("describe", path, "--format", "csv", "--column", "clas=t").stderr
    assert "expected KEY=NAME" in trace("describe", path, "--column", "t").stderr
    assert "no such file" in trace("describe", tmp_path / "none").stderr
    path.write_text("t,in,out\n0,1,2\n1,?,4\n")
    assert f"{path}:3: in is '?'" in trace("describe", path, "--format", "csv", *columns).stderr


def test_the_command_that_an_error_gives_runs(tmp_path: Path) -> None:
    path = tmp_path / "two words.csv"
    path.write_text("id,request at,the prompt,answer len\nx,0.5,1,2\ny,1.5,3,4\n")
    error = trace("describe", path).stderr
    command = shlex.split(error.partition("; run pdflow ")[2])
    assert command[:3] == ["trace", "describe", str(path)]
    result = CliRunner().invoke(cli, command, prog_name="pdflow")
    assert result.exit_code == 0, result.output
    assert "columns input_tokens=the prompt, output_tokens=answer len" in result.stdout
    assert f"; run pdflow trace model -o m.toml '{path}' --column " in trace("model", path, "-o", "m.toml").stderr


def test_columns_imply_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,in,out\n0,1,2\n1,3,4\n")
    columns = ("--column", "arrival_s=t", "--column", "input_tokens=in", "--column", "output_tokens=out")
    found = figures(path, *columns)
    assert (found["format"], found["requests"]) == ("csv", 2)
    assert found["columns"] == {"arrival_s": "t", "input_tokens": "in", "output_tokens": "out"}


@pytest.mark.parametrize(
    ("header", "row", "columns"),
    [
        ("timestamp,prompt_tokens,completion_tokens", "0,1,2", ("arrival_s", 0, 1, 2)),
        ("TIMESTAMP,input_tokens,GeneratedTokens", "2023-11-16 18:17:03.97,1,2", ("arrival_stamp", 0, 1, 2)),
        ("output_tokens,ContextTokens,arrival_time", "1,2,3.5", ("arrival_s", 2, 1, 0)),
        ("arrival_time_ms,input_length,output_length", "5,1,2", ("arrival_ms", 0, 1, 2)),
        ("timestamp_ns,input_len,output_len", "5,1,2", ("arrival_ns", 0, 1, 2)),
        ("timestamp,prompt tokens,output tokens", "1700000000000,1,2", ("arrival_ms", 0, 1, 2)),
        ("prompt_tokens,output_tokens,total_tokens", "1,2,3", (None, None, 0, 1)),
    ],
)
def test_common_names_of_columns_are_found(
    tmp_path: Path, header: str, row: str, columns: tuple[str | None, int | None, int, int]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{row}\n")
    clock, at, prompt, answer = columns
    names = header.split(",")
    arrival = {} if clock is None or at is None else {clock: names[at]}
    found = figures(path)
    assert found["columns"] == arrival | {"input_tokens": names[prompt], "output_tokens": names[answer]}
    assert found["input_tokens"]["total"] == int(row.split(",")[prompt])


def test_two_columns_with_a_common_name_are_a_doubt(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("time,prompt_tokens,input_tokens,output_tokens\n0,1,2,3\n")
    assert "do not show which of them" in trace("describe", path).stderr
    found = figures(path, "--column", "input_tokens=input_tokens")
    assert found["columns"] == {"arrival_s": "time", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}


def test_a_file_of_no_format_is_answered_with_a_command(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"a": 1}\n')
    asked = trace("describe", path)
    assert asked.exit_code == 2
    assert f"run pdflow trace describe {path} --format FORMAT, where FORMAT is one of mooncake, azure" in asked.stderr


def test_published_figures() -> None:
    code = figures(published("azure2023_code_full.csv"))
    assert (code["requests"], round(code["input_tokens"]["mean"]), code["input_tokens"]["p50"]) == (8819, 2048, 1469)
    assert (round(code["input_tokens"]["p95"], -1), code["output_tokens"]["p50"]) == (7300, 13)
    mooncake = figures(published("mooncake_conversation_first2000.jsonl"))
    assert mooncake["prefix"]["hit_blocks"] == pytest.approx(0.289, abs=5e-4)
    lengths = figures(published("vidur_arxiv_summarization_first2000.csv"))
    assert (lengths["requests"], lengths["arrivals"]) == (2000, None)
    drawn = figures(
        published("servegen_deepseek-r1_chunk0_trace_first2000.csv"),
        "--dataset",
        published("servegen_m-large_chunk1_dataset.json"),
    )
    assert "no record of requests" in str(drawn["note"])


@pytest.mark.parametrize(
    ("name", "hits"), [("mooncake_conversation.jsonl", 0.366), ("mooncake_synthetic.jsonl", 0.640)]
)
def test_whole_mooncake_traces_hit_what_is_known_of_them(name: str, hits: float) -> None:
    assert figures(published(name))["prefix"]["hit_blocks"] == pytest.approx(hits, abs=1e-3)


def modelled(source: Path, out: Path) -> dict[str, float]:
    """What five draws of a trace's model are like, as many requests as the trace has."""
    result = trace("model", source, "-o", out)
    assert result.exit_code == 0, result.output
    model = load_model(str(out))
    count = sum(1 for line in source.read_text().splitlines() if line) - (source.suffix == ".csv")
    draws = [statistics(list(islice(model.requests(seed), count))).figures for seed in range(5)]
    return {name: sum(draw[name] for draw in draws) / len(draws) for name in draws[0]}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("vidur_splitwise_code_first2000.csv", "vidur"),
        ("azure2023_conv_first2000.csv", "azure"),
        ("mooncake_synthetic_first2000.jsonl", "mooncake"),
        ("llmservingsim_sharegpt300_lengths.csv", "llmservingsim"),
    ],
)
def test_a_model_of_any_trace_is_like_it(name: str, form: TraceFormat, tmp_path: Path) -> None:
    """Traces that no bundled model was made from. Bounds: rates within 15 %, medians within 10 %, means and p90 within
    12 %, rank correlation within 0.1, prefix hits within 20 %."""
    path = published(name)
    ours = modelled(path, tmp_path / "m.toml")
    theirs = statistics(list(read_trace(Trace(path=path.name, format=form), TRACES))).figures
    assert ours["rate_rps"] == pytest.approx(theirs["rate_rps"], rel=0.15)
    for tokens in ("input tokens", "output tokens"):
        if (tokens, form) != ("input tokens", "mooncake"):  # half of these are short, half long: none is in the middle
            assert ours[f"{tokens}, p50"] == pytest.approx(theirs[f"{tokens}, p50"], rel=0.10)
        assert ours[f"{tokens}, p90"] == pytest.approx(theirs[f"{tokens}, p90"], rel=0.12)
        assert ours[f"{tokens}, mean"] == pytest.approx(theirs[f"{tokens}, mean"], rel=0.12)
    rank = "rank correlation of input and output"
    assert ours[rank] == pytest.approx(theirs[rank], abs=0.1)
    for figure in theirs.keys() & SHARING:
        assert ours[figure] == pytest.approx(theirs[figure], rel=0.2), figure


def test_a_scenario_draws_from_a_model_of_ones_own(steady: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    assert 'like = "' in trace("model", steady, "-o", out).stdout
    text = out.read_text()
    assert "steady" not in text
    scenario = tmp_path / "s.toml"
    example = (ROOT / "examples/conversation.toml").read_text()
    scenario.write_text(example.replace('"mooncake-conversation"', '"mine.toml"'))
    assert "requests like mine.toml" in CliRunner().invoke(cli, ["validate", str(scenario)]).stdout
    out.write_text(text.replace("rate_rps", "rate"))
    refused = CliRunner().invoke(cli, ["validate", str(scenario)])
    assert refused.exit_code == 2
    assert 'workload.like: "mine.toml" arrivals: object missing required field `rate_rps`' in refused.stderr


def test_too_little_makes_no_model(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "m.toml"
    head = "arrival_time_ns,input_toks,output_toks\n"
    path.write_text(head + "5,1,1\n" * 99)
    assert "99 requests, expected at least 100" in trace("model", path, "-o", out).stderr
    path.write_text(head + "5,1,1\n" * 100)
    assert "all requests arrive within one second" in trace("model", path, "-o", out).stderr
    path.write_text("input_toks,output_toks\n" + "1,1\n" * 100)
    refused = trace("model", path, "-o", out)
    assert "has no arrival times" in refused.stderr
    assert refused.exit_code == 2
    assert not out.exists()


def test_a_run_reports_each_class_of_its_trace(tmp_path: Path) -> None:
    lines = [f"{k / 4},{200 + k},5,{('chat', '', 'batch')[k % 3]}" for k in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["t,in,out,tier", *lines]))
    columns = 'arrival_s = "t", input_tokens = "in", output_tokens = "out", class = "tier"'
    example = (ROOT / "examples/conversation.toml").read_text()
    workload = f'[workload]\ntrace = {{ path = "t.csv", format = "csv", columns = {{ {columns} }} }}\n'
    before, _, rest = example.partition("[workload]")
    scenario, out = tmp_path / "s.toml", tmp_path / "out"
    scenario.write_text(
        f"{before}{workload}[model]{rest.partition('[model]')[2]}\n[slo.class.batch]\nttft_ms = 0.001\n"
    )
    ran = CliRunner().invoke(cli, ["simulate", str(scenario), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [(r["input_tokens"], r["class"]) for r in requests[:3]] == [(200, "chat"), (201, ""), (202, "batch")]
    classes = json.loads((out / "results.json").read_text())["pdflow"]["classes"]
    assert {name: row["requests"] for name, row in classes.items()} == {"": 4, "batch": 4, "chat": 4}
    assert classes["batch"]["slo"]["attainment_by_metric"] == {"ttft": 0.0}
    assert set(classes["chat"]["slo"]["attainment_by_metric"]) == {"ttft", "tpot"}
