"""The requests of a run as a table, and what is said where pandas is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

import pdflow
from pdflow.results.comparison.frame import requests_frame
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result

REFERENCE = Path(__file__).resolve().parents[2] / "examples/reference.toml"


def test_a_row_per_request(result: Result) -> None:
    frame = result.requests
    assert frame["request"].tolist() == [0, 1, 2, 3, 4]
    assert frame["outcome"].tolist() == ["completed", "completed", "failed", "cancelled", "unfinished"]
    assert frame["arrival_s"].tolist() == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert frame["ttft_ms"].iloc[:2].tolist() == [35.0, 45.0]
    assert frame["tpot_ms"].iloc[:2].tolist() == [10.0, 10.0]
    assert frame["e2e_ms"].iloc[:2].tolist() == [75.0, 85.0]
    assert frame.loc[2:, ["ttft_ms", "tpot_ms", "e2e_ms", "prefill_ms"]].isna().all(axis=None)
    assert frame.loc[1, ["p_queue_ms", "prefill_ms", "xfer_wire_ms"]].tolist() == [10.0, 20.0, 5.0]
    assert "class" not in frame


def test_its_figures_are_those_of_the_summary() -> None:
    result = pdflow.simulate(REFERENCE, overrides={"workload.requests": 300, "workload.warmup_s": 5})
    frame, summary = result.requests, result.summary
    counted = frame[~frame.warmup]
    assert 0 < len(counted) == summary["requests"] < 300
    for name in ("ttft", "tpot", "e2e"):
        column = counted[f"{name}_ms"]
        assert column.mean() == pytest.approx(summary[f"{name}_mean_ms"])
        assert column.quantile(0.99) == pytest.approx(summary[f"{name}_p99_ms"])
    stages = counted[[f"{stage}_ms" for stage in STAGES]]
    assert stages.mean().tolist() == pytest.approx(list(summary["stages_mean_ms"].values()))
    assert stages.sum(axis=1).tolist() == pytest.approx(counted.ttft_ms.tolist())


def test_a_request_of_one_token_has_no_tpot(records: Records) -> None:
    records.output_tokens[0] = 1
    assert requests_frame(records)["tpot_ms"].isna().tolist() == [True, False, True, True, True]


def test_classes_are_a_column(records: Records) -> None:
    records.classify(1, "chat")
    assert requests_frame(records)["class"].tolist() == ["", "chat", "", "", ""]


def test_of_nothing_it_is_an_empty_table_with_its_columns() -> None:
    frame = requests_frame(Records())
    assert len(frame) == 0
    assert "ttft_ms" in frame
    assert isinstance(frame, pd.DataFrame)


@pytest.mark.parametrize("module", ["pandas", "matplotlib"])
def test_a_missing_extra_is_one_sentence(module: str, result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module or name == "pdflow.results.plots"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pdflow.MissingBackendError, match=rf'{module}.* is not installed: pip install "pdflow\[note'):
        _ = result.requests if module == "pandas" else result.plot_ttft()
    if module == "pandas":
        with pytest.raises(pdflow.MissingBackendError, match="pandas is not installed"):
            pdflow.sweep(REFERENCE, {})
    assert "TTFT" in repr(result)
    assert "TTFT" in result._repr_html_()
