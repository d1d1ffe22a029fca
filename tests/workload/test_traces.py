"""Traces: what a line means, and that every bad one is named with its number."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.scenario.schema.workload import Trace, TraceFormat
from pdflow.workload import Request
from pdflow.workload.traces.clock import instant_ns
from pdflow.workload.traces.complaints import REPORTED, TraceError
from pdflow.workload.traces.readers import check_trace, read_trace
from pdflow.workload.traces.traces import parse

TRACES = Path(__file__).resolve().parents[2] / "../shared/data/traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def of(form: TraceFormat) -> Trace:
    return Trace(path="t", format=form)


def published(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the published trace {name} in ../shared/data/traces")
    return path


def mooncake(at: object, prompt: object, answer: object, hashes: object = ()) -> str:
    return json.dumps({"timestamp": at, "input_length": prompt, "output_length": answer, "hash_ids": hashes}) + "\n"


def test_mooncake_lines() -> None:
    lines = [mooncake(27, 600, 5, [7, 8]), "\n", mooncake(3027.5, 0, 0), mooncake(3027.5, 513, 1, [7])]
    assert list(parse(lines, "t", of("mooncake"))) == [
        Request(0, 0, 600, 5, (7, 8)),
        Request(1, 3_000_500_000, 1, 1),
        Request(2, 3_000_500_000, 513, 1, (7,)),
    ]


def test_azure_lines() -> None:
    lines = [
        "\ufeff" + HEADER,
        "2023-11-16 18:17:03.9799600,4808,10\r\n",
        "2023-11-16 18:17:04.0319601,3180,0\n",
        "2024-02-29 00:00:00.1+01:00,1,1\n",
        "2024-02-28 23:30:00Z,1,1\n",
    ]
    got = list(parse(lines, "t", of("azure")))
    assert got[:2] == [Request(0, 0, 4808, 10), Request(1, 52_000_100, 3180, 1)]
    assert got[3].arrival_ns - got[2].arrival_ns == 1_799_900_000_000


@given(st.datetimes())
def test_stamps_count_like_the_calendar(moment: datetime) -> None:
    day = instant_ns("1970-01-01 00:00:00")
    got = instant_ns(moment.strftime(f"{moment.year:04}-%m-%d %H:%M:%S.%f"))
    assert day is not None
    assert got is not None
    since = moment - datetime(1970, 1, 1)
    assert got - day == ((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds) * 1000


@pytest.mark.parametrize(
    "stamp",
    ["", "2023-02-29 00:00:00", "2023-13-01 00:00:00", "2023-01-01 24:00:00", "2023-01-01", "1900-02-29 00:00:00"],
)
def test_what_is_no_stamp(stamp: str) -> None:
    assert instant_ns(stamp) is None


def complaints(lines: list[str], form: TraceFormat) -> list[str]:
    with pytest.raises(TraceError) as caught:
        list(parse(lines, "t", of(form)))
    return [str(problem) for problem in caught.value.problems]


def test_every_bad_mooncake_line_is_reported() -> None:
    good = mooncake(0, 600, 5, [1, 2])
    problems = complaints(
        [
            good,
            "{not json\n",
            mooncake(0, -1, 5),
            mooncake(0, "600", 5),
            '{"timestamp": 0, "input_length": 5}\n',
            mooncake(0, 512, 5, [1, 2]),
            mooncake(10, 5, 5),
            mooncake(9, 5, 5),
            mooncake(float("nan"), 5, 5),
            good.replace("0", "\ud800", 1),
            mooncake(10, 10**12, 5),
            mooncake(10, 5, 10**20),
            mooncake(1e300, 5, 5),
        ],
        "mooncake",
    )
    assert [line.split(":")[1] for line in problems] == ["2", "3", "4", "5", "6", "8", "9", "10", "11", "12", "13"]
    assert problems[0].startswith("t:2: JSON is malformed")
    assert problems[1].startswith("t:3: input_length: expected")
    assert "output_length" in problems[3]
    assert "expected at most 1" in problems[4]
    assert "expected times in order" in problems[5]


def test_every_bad_azure_line_is_reported() -> None:
    problems = complaints(
        [
            HEADER,
            "2023-11-16 18:17:03.9,1,1\n",
            "yesterday,1,1\n",
            "2023-11-16 18:17:04,x,1\n",
            "2023-11-16 18:17:04,1,-1\n",
            "2023-11-16 18:17:04,1\n",
            "2023-11-16 18:17:02,1,1\n",
        ],
        "azure",
    )
    assert [line.split(":")[1] for line in problems] == ["3", "4", "5", "6", "7"]
    assert "ContextTokens is 'x'" in problems[1]
    assert "GeneratedTokens is '-1'" in problems[2]
    assert complaints(["a,b\n"], "azure")[0].startswith("t:1: the header lacks TIMESTAMP, ContextTokens")


def test_empty_traces_are_errors() -> None:
    assert "empty" in complaints([], "mooncake")[0]
    assert "header lacks" in complaints([], "azure")[0]
    assert "no requests" in complaints([HEADER], "azure")[0]


def test_many_bad_lines_are_counted() -> None:
    with pytest.raises(ScenarioError) as caught:
        list(parse(["?\n"] * (REPORTED + 7), "t", of("mooncake")))
    assert isinstance(caught.value, TraceError)
    assert len(caught.value.problems) == REPORTED
    assert caught.value.more == 7
    assert str(caught.value).endswith("and 7 more problems of this kind")


@given(st.lists(st.text(max_size=40)), st.sampled_from(["mooncake", "azure"]))
def test_arbitrary_lines_are_requests_or_complaints(lines: list[str], form: TraceFormat) -> None:
    try:
        for request in parse([HEADER, *lines] if form == "azure" else lines, "t", of(form)):
            assert request.input_tokens >= 1
            assert request.output_tokens >= 1
    except TraceError:
        pass


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        check_trace(Trace(path="none.csv", format="azure"), tmp_path)


@pytest.mark.parametrize(
    ("name", "form", "count", "prompt", "answer"),
    [
        ("mooncake_conversation_first2000.jsonl", "mooncake", 2000, 27_441_774, 704_602),
        ("mooncake_synthetic_first2000.jsonl", "mooncake", 2000, 24_732_716, 382_951),
        ("azure2023_code_full.csv", "azure", 8819, 18_059_974, 245_896),
        ("azure2023_conv_full.csv", "azure", 19366, 22_361_870, 4_088_665),
    ],
)
def test_published_traces_read_whole(name: str, form: TraceFormat, count: int, prompt: int, answer: int) -> None:
    requests = list(read_trace(Trace(path=published(name).name, format=form), TRACES))
    assert len(requests) == count
    assert requests[0].arrival_ns == 0
    assert sum(r.input_tokens for r in requests) == prompt
    assert sum(r.output_tokens for r in requests) == answer
