"""The printed report, against stored pictures of it (`PDFLOW_UPDATE_PICTURES=1 pytest tests/results` draws them)."""

from __future__ import annotations

import io
import os
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from pdflow.results import formatting
from pdflow.results.files.bench_json import CostStatement, RunHeader
from pdflow.results.records import Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals

PICTURES = Path(__file__).parent / "pictures"


def assert_like_picture(text: str, name: str) -> None:
    path = PICTURES / name
    if os.environ.get("PDFLOW_UPDATE_PICTURES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "ascii_only"), [(80, False), (80, True), (60, False)])
def test_report_looks_like_its_picture(result: Result, width: int, ascii_only: bool) -> None:
    text = result.table().text(width, ascii_only=ascii_only)
    assert_like_picture(text, f"report-{width}{'-ascii' if ascii_only else ''}.txt")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    assert text.isascii() or not ascii_only


def test_report_of_nothing_looks_like_its_picture() -> None:
    header = RunHeader(scenario_name="empty [red]", scenario_sha256="", seed=0, version="", interrupted=True)
    assert_like_picture(str(Result.of(header, Records(), {}, Totals()).table()), "report-empty.txt")


def test_a_pipe_gets_no_escapes(result: Result) -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(result.table())
    assert "\x1b" not in file.getvalue()
    assert file.getvalue() == str(result.table())


def test_no_color_gets_no_colours_and_loses_no_text(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    console.print(result.table())
    colours = [f"\x1b[{code}m" for code in range(30, 38)]
    assert not [colour for colour in colours if colour in file.getvalue()]


def test_the_report_shows_how_full_engines_were_and_their_time_in_steps(result: Result) -> None:
    """98 % of the time in steps reads as saturation, whatever the batch was."""
    facts = dict(result.table().facts())
    assert facts["in steps"] == "prefill 25.0 % of 2 GPUs' time · decode 75.0 % of 1 GPU's time"
    assert facts["mean batch"] == "decode 0.8 sequences", "5 steps each, in 4 of which one sequence waits for a token"
    assert facts["KV peak"] == "prefill 6.0 % · decode 2.0 % of the fullest engine's blocks"
    engines = [attrs.evolve(engine, max_num_seqs=256, kv_blocks=0) for engine in result.totals.engines]
    facts = dict(attrs.evolve(result, totals=attrs.evolve(result.totals, engines=engines)).table().facts())
    assert facts["mean batch"] == "decode 0.8 of at most 256 sequences"
    assert "KV peak" not in facts, "its blocks are unlimited"


def test_pools_with_equal_step_times_share_a_line(result: Result) -> None:
    other = CostStatement(pool="d2", model="constant", provenance="other", error_bar="10 %")
    header = attrs.evolve(result.header, costs=(*result.header.costs, other))
    facts = list(attrs.evolve(result, header=header).table().facts())
    lines = [value for name, value in facts if name == "step times"]
    assert lines == ["prefill, decode: constant, as the scenario states; exact", "d2: other; 10 %"]


def test_bars_of_the_waterfall_follow_each_other(result: Result) -> None:
    bars = [line[37:] for line in str(result.table()).splitlines() if "█" in line]
    begins = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert len(bars) == 4
    assert begins == sorted(begins)
    for bar, begin in zip(bars, begins[1:], strict=False):
        assert len(bar) - begin in (0, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.percent(0.0), "0 %"),
        (formatting.percent(1.0), "100 %"),
        (formatting.percent(0.99999), "> 99.9 %"),
        (formatting.percent(1e-7), "< 0.1 %"),
        (formatting.percent(0.123), "12.3 %"),
        (formatting.size(0), "0 B"),
        (formatting.size(999), "999 B"),
        (formatting.size(1_000), "1.00 kB"),
        (formatting.size(67_108_864), "67.1 MB"),
        (formatting.size(1.21e12), "1.21 TB"),
        (formatting.duration(0), "0 s"),
        (formatting.duration(12_345_000_000), "12.3 s"),
        (formatting.duration(500 * 10**9), "8 min 20 s"),
        (formatting.duration(6_250 * 10**9), "1 h 44 min"),
        (formatting.number(0), "0"),
        (formatting.number(1234.5), "1,234.5"),
        (formatting.number(8.0), "8.000"),
    ],
)
def test_numbers_are_formatted(text: str, expected: str) -> None:
    assert text == expected
