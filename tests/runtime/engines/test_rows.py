"""A live run's rows follow from what its parts have noted, whatever their clocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow.results.records import STAGES, stage_durations_ns
from pdflow.scenario.reading.load import load
from pdflow_runtime.observe.event_log import (
    LAST,
    RELEASED,
    TOKEN,
    FirstPiecePassed,
    Frame,
    Generated,
    Moved,
    Noted,
    Page,
    Passed,
    Replied,
    RequestReceived,
    Sent,
    Stepped,
)
from pdflow_runtime.observe.record import NotesHeader, Record, read_notes
from pdflow_runtime.observe.rows import Rows, rows

SCENARIO = load(str(Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml"))


def router(*notes: Noted) -> Page:
    return Page("router", 1_000, list(notes))


def of(*pages: Page) -> Rows:
    return rows(pages, SCENARIO)


def test_a_request_passes_ten_stages_on_the_clocks_of_three_processes() -> None:
    """Instant 0 is the arrival, at 1,100 on the wall's clock; P's clock is 50 ahead of it, D's 7."""
    found = of(
        router(
            RequestReceived(100, 7, 40),
            Sent(101, 7, "a", "prefill", "prefill-0"),
            Sent(101, 7, "a", "decode", "decode-1"),
            FirstPiecePassed(230, 7),
            Passed(300, "a", LAST),
            Replied(301, 7, "completed", "", 1),
        ),
        Page(
            "prefill-0",
            50,
            [
                Passed(1060, "a", "route"),
                Passed(1065, "a", "p_queue"),
                Stepped(1065, 85, 1, 40, 820, 0, 0, 0, 3),
                Passed(1150, "a", "prefill"),
                Frame(1151, "a", "RegisterAck", "prefill-0.r0", "decode-1.r0", False),
                Passed(1152, "a", "handshake"),
                Passed(1155, "a", "xfer_post"),
                Moved(1152, "a", 3, 18, 2560, 4),
                Passed(1200, "a", RELEASED),
            ],
        ),
        Page(
            "decode-1",
            7,
            [
                Passed(1104, "a", "handoff"),
                Passed(1106, "a", "d_admit"),
                Passed(1210, "a", "xfer_wire"),
                Passed(1213, "a", "notify"),
                Stepped(1214, 100, 0, 0, 0, 1, 40, 0, 4),
                Passed(1310, "a", TOKEN),
                Stepped(1314, 60, 0, 0, 0, 1, 41, 1, 4),
                Generated(1374, "a", 2),
            ],
        ),
    )
    records = found.records
    assert dict(zip(STAGES, [column[0] for column in records.ends], strict=True)) == {
        "route": 10,
        "p_queue": 15,
        "prefill": 100,
        "handoff": 11,
        "d_admit": 13,
        "handshake": 102,
        "xfer_post": 105,
        "xfer_wire": 117,
        "notify": 120,
        "first_decode": 130,
    }
    assert stage_durations_ns(records)[:, 0].tolist() == [10, 5, 85, 0, 0, 2, 3, 12, 3, 10]
    row = records.record(0)
    assert (row["outcome"], row["attempts"], row["input_tokens"], row["output_tokens"]) == ("completed", 1, 40, 2)
    assert (row["prefill_engine"], row["decode_engine"]) == ("prefill-0", "decode-1")
    assert (row["arrival_ns"], row["first_token_ns"], row["last_token_ns"]) == (0, 130, 200)
    totals = found.totals
    assert (totals.duration_ns, totals.bytes_moved, totals.transfers, totals.messages) == (201, 2560, 1, 1)
    assert totals.stranded_byte_ns == 2560 * ((150 - 100) + (120 - 13))
    engines = {engine.name: engine for engine in totals.engines}
    assert engines["decode-1"].busy_ps == 160_000
    assert engines["decode-1"].peak_kv_blocks == 4
    assert [(times.tolist(), weights.tolist()) for times, weights in found.steps["decode-1"].chunks()] == [
        ([60_000], [1])
    ]
    assert found.recording.kv_blocks["prefill-0"].curve()[1].tolist() == [3]


def test_the_last_attempt_stamps() -> None:
    found = of(
        router(
            RequestReceived(0, 1, 5),
            Sent(1, 1, "a", "prefill", "prefill-0"),
            Sent(40, 1, "b", "prefill", "prefill-1"),
            Sent(41, 1, "b", "decode", "decode-0"),
            FirstPiecePassed(90, 1),
            Passed(95, "b", LAST),
            Replied(96, 1, "completed", "", 2),
        ),
        Page("prefill-0", 1_000, [Passed(3, "a", "route"), Passed(9, "a", "p_queue")]),
        Page("prefill-1", 1_000, [Passed(50, "b", "route"), Passed(60, "b", "p_queue")]),
    )
    row = found.records.record(0)
    assert (row["attempts"], row["prefill_engine"]) == (2, "prefill-1")
    assert (row["ends_ns"]["route"], row["ends_ns"]["p_queue"]) == (50, 60)


def test_who_computes_a_prompt_alone_hands_nothing_over() -> None:
    found = of(
        router(
            RequestReceived(0, 1, 5),
            Sent(1, 1, "a", "alone", "decode-0"),
            FirstPiecePassed(90, 1),
            Passed(95, "a", LAST),
            Replied(96, 1, "completed", "", 1),
        ),
        Page("decode-0", 1_000, [Passed(5, "a", "route"), Passed(8, "a", "p_queue"), Passed(80, "a", TOKEN)]),
    )
    assert stage_durations_ns(found.records)[:, 0].tolist() == [5, 3, 72, 0, 0, 0, 0, 0, 0, 10]
    assert found.records.prefill_engine == found.records.decode_engine == ["decode-0"]


def test_a_failed_request_has_a_reason_and_an_unfinished_one_has_no_outcome() -> None:
    found = of(router(RequestReceived(0, 1, 5), RequestReceived(2, 2, 6), Replied(9, 1, "failed", "peer_dead", 1)))
    assert found.records.outcome == ["failed", None]
    assert found.records.reason == ["peer dead", None]


def test_what_a_killed_process_had_begun_to_write_is_left_out(tmp_path: Path) -> None:
    notes = [Passed(3, "a", "route"), Passed(9, "a", "p_queue")]
    lines = [NotesHeader("prefill-0", 12), *notes]
    whole = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (tmp_path / "prefill-0-1.notes.jsonl").write_bytes(whole + b'["passed",12,"a"')
    (tmp_path / "prefill-1-1.notes.jsonl").write_bytes(b"")
    assert read_notes(tmp_path) == [Page("prefill-0", 12, notes)]


def test_files_left_by_a_killed_run_are_not_read_by_the_next(tmp_path: Path) -> None:
    left = [tmp_path / f"prefill-0-1.{kind}.jsonl" for kind in ("notes", "events")]
    for file in (*left, tmp_path / "requests.jsonl"):
        file.write_bytes(b"")
    Record(out=tmp_path, events=True).begin()
    assert [file.name for file in tmp_path.iterdir()] == ["requests.jsonl"]


def test_an_empty_run_leaves_files_too(tmp_path: Path) -> None:
    result = Record(out=tmp_path, timeline=True, html=True).conclude(SCENARIO)
    assert result is not None
    assert len(result.records) == 0
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"results.json", "requests.jsonl", "timeline.json.gz", "report.html"}
