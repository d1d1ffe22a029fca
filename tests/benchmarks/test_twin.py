"""benchmarks/twin.py compares stage by stage, and says what is met."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'pdflow[live]'")

import pdflow
from benchmarks.twin import compare, replayed_workload, report

QUICKSTART = Path(__file__).resolve().parents[2] / "examples/serve-quickstart.toml"


def test_a_run_is_as_itself_and_slower_engines_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = pdflow.load(QUICKSTART).with_({"workload.requests": 40, "model.preset": "tiny"})
    one = pdflow.simulate(scenario).records
    again = scenario.with_({"workload": replayed_workload(one, tmp_path / "came.csv")})
    same = compare(one, pdflow.simulate(again).records)
    assert same["TTFT"].error < 1e-6
    assert report(same, same, same, same)
    slower = compare(one, pdflow.simulate(again.with_({"pool.prefill.gpu": {"preset": "cpu", "ec": 0.3}})).records)
    assert slower["prefill"].error > 0.15
    assert not report(slower, same, same, same)
    assert "NOT MET" in capsys.readouterr().out


def test_who_comes_later_does_not_come_behind_the_next(tmp_path: Path) -> None:
    records = pdflow.simulate(pdflow.load(QUICKSTART).with_({"workload.requests": 5})).records
    replayed_workload(records, tmp_path / "later.csv", later_s=1e6)
    arrivals_s = [float(line.split(",")[0]) for line in (tmp_path / "later.csv").read_text().splitlines()[1:]]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[1] == pytest.approx(records.arrival_ns[2] / 1e9)
    assert arrivals_s[2] == pytest.approx(records.arrival_ns[2] / 1e9)
