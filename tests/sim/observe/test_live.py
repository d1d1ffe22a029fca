"""The table of a run that goes on: within 80 columns, gone at the end, and of the last ten seconds."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from pdflow.results.files.write import request_lines
from pdflow.scenario.reading.load import load
from pdflow_sim.observe import live_table as live
from pdflow_sim.observe.live_table import WINDOW_NS, Watcher, watching
from pdflow_sim.run import RunOptions, prepare, run

HERE = Path(__file__).parents[1]
LONG = ("workload.requests=200", "workload.arrival.rate_rps=10")


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=24, highlight=False, markup=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def watched(console: Console, monkeypatch: pytest.MonkeyPatch, *overrides: str, file: str = "small.toml") -> bytes:
    """A run that is drawn at every end; its records."""
    monkeypatch.setattr(live, "AT_ONCE_S", 0)
    monkeypatch.setattr(live, "COST", 0)
    scenario = load(HERE / file, overrides=overrides)
    world, _ = prepare(scenario, RunOptions(), [])
    with watching(console, scenario, world):
        assert not run(world, None, drain=False)
    return b"".join(request_lines(world.records))


def test_it_shows_the_run_and_changes_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal()
    records = watched(console, monkeypatch, *LONG)
    world, _ = prepare(load(HERE / "small.toml", overrides=LONG), RunOptions(), [])
    run(world, None, drain=False)
    assert records == b"".join(request_lines(world.records))
    text = text_of(console)
    assert "100 of 200 requests" in text
    for line in ("last 10", "TTFT", "TPOT", "KV moved", "p  ", "d  "):
        assert re.search(f"^{line}", text, re.MULTILINE), line


@pytest.mark.parametrize("file", ["small.toml", "mixed.toml", "alone.toml"])
def test_it_fits_80_columns_and_wider_ones_show_no_more(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    consoles = terminal(80), terminal(200)
    for console in consoles:
        watched(console, monkeypatch, "scenario.name='" + "x" * 200 + "'", file=file)
        assert max(map(len, text_of(console).splitlines())) <= 80
        assert ("KV moved" in text_of(console)) == (file != "alone.toml")


def test_figures_are_those_of_the_window() -> None:
    scenario = load(HERE / "small.toml", overrides=LONG)
    world, _ = prepare(scenario, RunOptions(), [])
    console = terminal()
    watcher = Watcher(Live(console=console, auto_refresh=False), scenario, world)
    samples = []

    def ended(request: int, outcome: str) -> None:
        watcher.requests.append(request)
        last = watcher.sample(watcher.pools())
        samples.append((watcher.samples[0], last, list(watcher.requests)))

    world.clients.on_end.append(ended)
    run(world, None, drain=False)
    assert len(samples) == 200
    late = [each for each in samples if each[1].now >= WINDOW_NS * 1.2]
    assert len(late) > 20
    for first, last, requests in late:
        assert WINDOW_NS <= last.now - first.now < WINDOW_NS * 1.2
        assert len(requests) == last.ended - first.ended
        assert all(world.records.last_token_ns[request] >= first.now for request in requests)


def test_a_terminal_sees_it_and_a_pipe_does_not() -> None:
    command = [sys.executable, "-m", "pdflow", "simulate", str(HERE / "small.toml")]
    leader, follower = pty.openpty()
    try:
        shown = {**os.environ, "TERM": "xterm"}
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=shown, check=True)
        drawn = os.read(leader, 1 << 16).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert "waiting" in drawn
    assert b"\x1b" not in ran.stdout
    piped = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert "waiting" not in piped.stderr
    assert "\x1b" not in piped.stderr
