"""Formats besides Mooncake's and Azure's: what each line means, what is left out, and that bad bytes are complaints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, islice, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.scenario.schema.workload import Columns, Trace, TraceFormat
from pdflow.workload import Request
from pdflow.workload.traces.clock import milliseconds_ns, nanoseconds_ns, seconds_ns
from pdflow.workload.traces.complaints import TraceError
from pdflow.workload.traces.csv_rows import cells_of
from pdflow.workload.traces.json_rows import sharegpt_texts
from pdflow.workload.traces.readers import LONGEST_LINE, has_arrival_times, read_trace
from pdflow.workload.traces.traces import parse

TRACES = Path(__file__).resolve().parents[2] / "../shared/data/traces"
OWN = Columns(arrival_s="t", input_tokens="in", output_tokens="out", class_="tier")


def rows(form: TraceFormat, lines: Iterable[str], timed: bool = True, columns: Columns | None = None) -> list[Request]:
    return list(parse(lines, "t", Trace(path="t", format=form, columns=columns or Columns()), timed))


def problems_of(
    form: TraceFormat, lines: Iterable[str], timed: bool = True, columns: Columns | None = None
) -> list[str]:
    with pytest.raises(TraceError) as caught:
        rows(form, lines, timed, columns)
    return [str(problem) for problem in caught.value.problems]


def test_burstgpt_leaves_failures_out() -> None:
    lines = [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        "5,ChatGPT,472,18,490,Conversation log\n",
        "45,ChatGPT,1087,0,1087,Conversation log\n",
        "118,GPT-4,417,276,693,API log\n",
    ]
    assert rows("burstgpt", lines) == [Request(0, 0, 472, 18), Request(1, 113_000_000_000, 417, 276)]
    with_class = rows("burstgpt", lines, columns=Columns(class_="Log Type"))
    assert [request.class_ for request in with_class] == ["Conversation log", "API log"]


def test_other_published_tables() -> None:
    assert rows(
        "vidur", ["arrived_at,num_prefill_tokens,num_decode_tokens\n", "0.5,7,2\n", "1.892654999999999,8,3\n"]
    ) == [
        Request(0, 0, 7, 2),
        Request(1, 1_392_655_000, 8, 3),
    ]
    assert rows("llmservingsim", ["arrival_time_ns,input_toks,output_toks\n", "46926808,9,4\n", "46926809,1,1\n"]) == [
        Request(0, 0, 9, 4),
        Request(1, 1, 1, 1),
    ]
    header = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    assert rows("splitwise", [header, "0,2,0,1,1,4096,32\n"]) == [Request(0, 0, 4096, 32)]


def test_lengths_alone_need_no_times() -> None:
    lines = ["num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n", "3772,54,3826,69.8\n", "20,1,21,20\n"]
    assert rows("vidur", lines, timed=False) == [Request(0, 0, 3772, 54), Request(1, 0, 20, 1)]
    [problem] = problems_of("vidur", lines)
    assert problem.startswith("t:1: the header lacks arrived_at")
    assert problem.endswith("for a trace without times, set workload.arrival")


def test_a_table_of_ones_own() -> None:
    lines = ['tier,"t",note,in,out\n', 'gold,1.5,"a, ""b""",10.0,2\n', " ,2e0, plain ,20,3\n"]
    assert rows("csv", lines, columns=OWN) == [Request(0, 0, 10, 2, (), "gold"), Request(1, 500_000_000, 20, 3)]
    [problem] = problems_of("csv", lines, columns=Columns(arrival_s="t", output_tokens="out"))
    assert problem == "t:1: the column of input_tokens is not named; name it in columns"


def test_every_bad_line_of_a_table_is_reported() -> None:
    lines = [
        "t,in,out,tier\n",
        "0,1,1,gold\n",
        "-1,1,1,gold\n",
        "1,1,x,gold\n",
        "1,1,1,\x1b[31m\n",
        '1,1,1,"open\n',
        "1,1,1\n",
        "nan,1,1,a\n",
        "1e99,1,1,a\n",
        "1,1.5,1,a\n",
        "2,1,1,a\n",
        "1.9,1,1,a\n",
    ]
    problems = problems_of("csv", lines, columns=OWN)
    assert [line.split(":")[1] for line in problems] == ["3", "4", "5", "6", "7", "8", "9", "10", "12"]
    assert "t is '-1', expected seconds such as 17.25" in problems[0]
    assert "tier is '\\x1b[31m', expected a name" in problems[2]
    assert "does not end on this line" in problems[3]
    assert "t 1.9 is earlier than the line above" in problems[-1]


def test_two_columns_of_times_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="arrival_s and arrival_ms all give arrival times"):
        Columns(arrival_s="a", arrival_ms="b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1.0000000005", 1_000_000_001),
        ("12.", 12_000_000_000),
        ("1e-9", 1),
        ("1700000000.123456789", 1700000000123456789),
    ],
)
def test_seconds(text: str, expected: int) -> None:
    assert seconds_ns(text) == expected


def test_what_is_no_time() -> None:
    assert [seconds_ns(text) for text in ("", "-1", "inf", "1e30", "1_0", "１", "9" * 12)] == [None] * 7
    assert milliseconds_ns("0.0000005") == 1
    assert [nanoseconds_ns(text) for text in ("1.5", "-1", "9" * 19, "17")] == [None, None, None, 17]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n"), max_size=8), min_size=1, max_size=6))
def test_quoted_cells_come_back(cells: list[str]) -> None:
    line = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    assert cells_of(line + "\n") == cells


def conversation(*turns: str, **more: object) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns], **more}


def test_sharegpt_takes_counts_at_their_word_and_estimates_the_rest() -> None:
    entries = [
        conversation("a" * 41, "b" * 8, "later"),
        conversation("one turn"),
        conversation("a", "b", prompt_len=70, output_len=9),
        {"input_tokens": 5, "output_tokens": 0},
    ]
    expected = [Request(0, 0, 11, 2), Request(1, 0, 70, 9), Request(2, 0, 5, 1)]
    for text in (json.dumps(entries), json.dumps(entries, indent=1), "\n".join(map(json.dumps, entries))):
        for size in (1, 7, 1 << 20):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert rows("sharegpt", pieces, timed=False) == expected
    assert list(sharegpt_texts([json.dumps(entries[:1])], "t", 2.0)) == [(21, 4, "a" * 41)]
    assert [prompt for _, _, prompt in sharegpt_texts([json.dumps(entries)], "t", 4.0)] == ["a" * 41, "a", None]
    assert list(sharegpt_texts(['{"conversations": {"a": 1}, "input_tokens": 1, "output_tokens": 2}'], "t", 4.0)) == [
        (1, 2, None)
    ]


def test_bad_sharegpt_is_reported_with_its_line() -> None:
    good = json.dumps(conversation("a", "b"))
    assert problems_of("sharegpt", [f"[{good},\n{good},\n", '{"conversations": [}, 7]'], False)[0].startswith(
        "t:3: is not JSON"
    )
    assert problems_of("sharegpt", [f"[{good},\n", '{"conversations": ["a", "b"]},\n', "7]"], False) == [
        f"t:{line}: an entry is not a conversation, expected an array of "
        '{"conversations": [{"value": "prompt"}, {"value": "answer"}, ...]}'
        for line in (2, 3)
    ]
    assert "is not JSON" in problems_of("sharegpt", [f'[{good}, {{"conver'], False)[0]
    assert "nested too deeply" in problems_of("sharegpt", ['{"a":' + "[" * 100_000], False)[0]
    assert "no conversation has two turns" in problems_of("sharegpt", ["[]"], False)[0]


def test_custom_lines() -> None:
    lines = ['{"prompt": "12345678", "output_tokens": 3}\n', "\n", '{"prompt_len": 5, "output_len": 6}\n']
    assert rows("vllm-custom", lines, timed=False) == [Request(0, 0, 2, 3), Request(1, 0, 5, 6)]
    problems = problems_of(
        "vllm-custom", ["{\n", '{"prompt": "a"}\n', '{"prompt": "a", "output_tokens": true}\n', *lines], False
    )
    assert [line.split(":")[1] for line in problems] == ["1", "2", "3"]


def test_a_mooncake_line_may_have_a_class() -> None:
    line = '{"timestamp": 0, "input_length": 5, "output_length": 5, "class": "%s"}\n'
    assert rows("mooncake", [line % "gold"]) == [Request(0, 0, 5, 5, (), "gold")]
    assert "class: expected a name" in problems_of("mooncake", [line % "\\u001b"])[0]


@given(
    st.lists(st.text(max_size=40)),
    st.sampled_from(["burstgpt", "vidur", "llmservingsim", "splitwise", "csv", "sharegpt", "vllm-custom", "mooncake"]),
    st.sampled_from(["t,in,out,tier\n", "num_prefill_tokens,num_decode_tokens\n", "[", ""]),
)
def test_arbitrary_text_is_requests_or_complaints(lines: list[str], form: TraceFormat, head: str) -> None:
    try:
        for request in rows(form, [head, *lines], timed=False, columns=OWN if form == "csv" else None):
            assert request.input_tokens >= 1
            assert request.output_tokens >= 1
    except TraceError:
        pass


def test_bytes_that_are_no_text_are_complaints(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"t,in,out,tier\n0,1,1,a\n\xff\xfe,1,1,a\n\x00,1,1,a\n")
    with pytest.raises(TraceError) as caught:
        list(read_trace(Trace(path="t.csv", format="csv", columns=OWN), tmp_path))
    assert [problem.location for problem in caught.value.problems] == [f"{tmp_path}/t.csv:3", f"{tmp_path}/t.csv:4"]


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{" + " " * LONGEST_LINE)
    with pytest.raises(TraceError, match=r"t\.jsonl:1: the line has more than 1,048,576 characters"):
        list(read_trace(Trace(path="t.jsonl", format="mooncake"), tmp_path))


@pytest.mark.parametrize(
    ("name", "form", "timed", "count", "prompt", "answer"),
    [
        ("vidur_splitwise_code_first2000.csv", "vidur", True, 2000, 3_973_157, 59_024),
        ("vidur_splitwise_conv_first2000.csv", "vidur", True, 2000, 2_209_565, 529_807),
        ("vidur_arxiv_summarization_first2000.csv", "vidur", False, 2000, 5_079_765, 625_186),
        ("llmservingsim_sharegpt300_lengths.csv", "llmservingsim", True, 300, 257_239, 195_753),
        ("splitwise_sim_test_trace.csv", "splitwise", True, 3, 8192, 56),
    ],
)
def test_published_tables_read_whole(
    name: str, form: TraceFormat, timed: bool, count: int, prompt: int, answer: int
) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"needs the published trace {name} in ../shared/data/traces")
    trace = Trace(path=name, format=form)
    assert has_arrival_times(trace, TRACES) == timed
    requests = list(read_trace(trace, TRACES, timed=timed))
    assert len(requests) == count
    assert (sum(r.input_tokens for r in requests), sum(r.output_tokens for r in requests)) == (prompt, answer)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("csv", "0,5,6,a\n"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 6}\n'),
        ("sharegpt", '{"prompt_len": 5, "output_len": 6},\n'),
        ("vllm-custom", '{"prompt_len": 5, "output_len": 6}\n'),
    ],
)
def test_lines_stream(form: TraceFormat, line: str) -> None:
    """Of a trace without end the first requests come at once."""
    lines = chain(["t,in,out,tier\n"] if form == "csv" else [], repeat(line))
    columns = OWN if form == "csv" else Columns()
    drawn = list(islice(parse(lines, "t", Trace(path="t", format=form, columns=columns)), 3))
    assert [(r.input_tokens, r.output_tokens) for r in drawn] == [(5, 6)] * 3
