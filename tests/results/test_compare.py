"""Comparisons of runs whose figures are known, and files that no run wrote."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdflow.results.comparison.compare import Comparisons
from pdflow.results.files.bench_json import CostStatement, RunHeader
from pdflow.results.files.read import UnreadableRunError, read_runs
from pdflow.results.records import FIRST_DECODE, PREFILL, Records
from pdflow.results.result import Result
from pdflow.results.totals import Totals
from pdflow.scenario.schema.scenario import Slo

MS = 1_000_000
COST = CostStatement(pool="p", model="roofline", provenance="roofline of a on b", error_bar="TPOT ±25 %")


def saved(
    folder: Path, prefill_ms: Callable[[int], int], requests: int = 200, arrival_ms: int = 100, name: str = "known"
) -> Path:
    """A run whose TTFT is its prefill and 5 ms more, with five tokens 10 ms apart."""
    records = Records()
    for request in range(requests):
        arrival = request * arrival_ms * MS
        records.add(arrival, 100, 5)
        records.ends[PREFILL][request] = arrival + prefill_ms(request) * MS
        first = records.ends[PREFILL][request] + 5 * MS
        records.ends[FIRST_DECODE][request] = records.first_token_ns[request] = first
        records.last_token_ns[request] = first + 40 * MS
        records.outcome[request] = "completed"
    header = RunHeader(scenario_name=name, scenario_sha256="", seed=1, version="0", slo=Slo(ttft_ms=30), costs=(COST,))
    Result.of(header, records, {}, Totals(duration_ns=requests * arrival_ms * MS)).save(folder)
    return folder


def uneven(request: int) -> int:
    return 10 + request * 37 % 50


def compared(*folders: Path) -> Any:
    return Comparisons.of([read_runs(folder) for folder in folders]).as_dict()


def test_what_completed_nothing_is_not_called_faster(tmp_path: Path) -> None:
    nothing = saved(tmp_path / "b", uneven)
    path = nothing / "requests.jsonl"
    path.write_text(path.read_text().replace('"outcome":"completed"', '"outcome":"cancelled"'))
    found = compared(saved(tmp_path / "a", uneven), nothing)["against_first"][0]["differences"]
    assert set(found) == {"slo_attainment", "requests_per_s", "output_tokens_per_s", "goodput_rps"}


def test_the_source_of_step_times_is_reported_once_for_runs_that_agree(tmp_path: Path) -> None:
    folders = [saved(tmp_path / name, uneven, requests=3) for name in "ab"]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(Comparisons.of([read_runs(folder) for folder in folders]))
    assert isinstance(console.file, io.StringIO)
    assert "step times of A, B  p: roofline of a on b; TPOT ±25 %" in console.file.getvalue()


def test_a_constant_difference_is_found_exactly_in_its_own_stage(tmp_path: Path) -> None:
    found = compared(saved(tmp_path / "a", uneven), saved(tmp_path / "b", lambda request: uneven(request) + 7))
    [against] = found["against_first"]
    assert against["paired"]
    for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "e2e_p90_ms", "prefill_ms"):
        it = against["differences"][name]
        assert (it["difference"], it["low"], it["high"]) == pytest.approx((7, 7, 7), abs=1e-9), name
    for name in ("tpot_mean_ms", "first_decode_ms", "xfer_wire_ms"):
        it = against["differences"][name]
        assert (it["difference"], it["low"], it["high"]) == pytest.approx((0, 0, 0), abs=1e-9), name
    slo = against["differences"]["slo_attainment"]
    assert slo["low"] <= slo["difference"] <= slo["high"] < 0


def test_figures_are_those_of_the_run_itself(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", uneven)
    figures = compared(folder, folder)["runs"][0]["figures"]
    written = json.loads((folder / "results.json").read_text())
    assert figures["ttft_p99_ms"] == written["p99_ttft_ms"]
    assert figures["tpot_mean_ms"] == written["mean_tpot_ms"]
    assert figures["prefill_ms"] == written["pdflow"]["stages"]["prefill"]["mean_ms"]
    assert figures["slo_attainment"] == written["pdflow"]["slo"]["attainment"]
    assert figures["goodput_rps"] == written["request_goodput"]


def test_other_requests_are_not_paired_and_their_interval_is_wider(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", uneven)
    paired = saved(tmp_path / "b", lambda request: uneven(request) + 7)
    other = saved(tmp_path / "c", lambda request: uneven(request) + 7, arrival_ms=90)
    same, different = compared(first, paired, other)["against_first"]
    assert (same["paired"], different["paired"]) == (True, False)
    it = different["differences"]["ttft_mean_ms"]
    assert it["low"] < it["difference"] < it["high"]
    assert it["difference"] == pytest.approx(7)


def test_a_handful_of_requests_gives_no_interval(tmp_path: Path) -> None:
    few = saved(tmp_path / "a", uneven, requests=9)
    [against] = compared(few, few)["against_first"]
    assert against["differences"]["ttft_mean_ms"]["low"] is None


def several(folder: Path, ttft_ms: dict[int, float], name: str = "known", **others: list[float]) -> Path:
    """Runs of which only these figures are known."""
    folder.mkdir()
    figures = {"ttft_mean_ms": {"values": list(ttft_ms.values())}, **{n: {"values": v} for n, v in others.items()}}
    document = {"name": name, "seeds": list(ttft_ms), "interrupted": False, "figures": figures}
    (folder / "seeds.json").write_text(json.dumps(document))
    return folder


def test_seeds_that_both_have_are_compared_one_by_one(tmp_path: Path) -> None:
    """What each seed's traffic does to both cancels out: here all of it."""
    first = several(tmp_path / "a", {1: 10, 2: 200, 3: 60}, stage_prefill_ms=[1, 2, 3], requests_per_s=[5, 5, 5])
    other = several(tmp_path / "b", {1: 14, 2: 203, 3: 65}, stage_prefill_ms=[2, 3, 4], requests_per_s=[5, 5, 5])
    found = compared(first, other)
    [against] = found["against_first"]
    assert (against["over"], against["paired"]) == ("paired seeds", True)
    it = against["differences"]["ttft_mean_ms"]
    half = 4.303 * 1 / 3**0.5
    assert (it["difference"], it["low"], it["high"]) == pytest.approx((4, 4 - half, 4 + half))
    stage = against["differences"]["prefill_ms"]
    assert (stage["difference"], stage["low"], stage["high"]) == (1, 1, 1)
    assert found["runs"][0]["seeds"] == [1, 2, 3]
    assert found["runs"][0]["figures"]["ttft_mean_ms"] == 90


def test_other_seeds_are_not_paired(tmp_path: Path) -> None:
    first = several(tmp_path / "a", {1: 10, 2: 200, 3: 60})
    other = several(tmp_path / "b", {4: 14, 5: 203, 6: 65})
    [against] = compared(first, other)["against_first"]
    assert (against["over"], against["paired"]) == ("unpaired seeds", False)
    it = against["differences"]["ttft_mean_ms"]
    assert it["difference"] == pytest.approx(4)
    assert it["high"] - it["low"] > 400


def test_a_single_run_against_seeds_has_no_interval(tmp_path: Path) -> None:
    one = saved(tmp_path / "a", uneven)
    for runs in ((one, several(tmp_path / "b", {1: 10, 2: 20})), (tmp_path / "b", one)):
        found = compared(*runs)
        [against] = found["against_first"]
        assert against["over"] == "single run"
        assert against["differences"].keys() == {"ttft_mean_ms"}
        assert against["differences"]["ttft_mean_ms"]["low"] is None


def test_control_characters_of_a_file_name_are_not_printed(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x07\u202e\x9b2J\n"
    runs = [several(tmp_path / "a", {1: 10, 2: 20}, hostile), saved(tmp_path / f"b{hostile}", uneven, name=hostile)]
    console = Console(width=200, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(Comparisons.of([read_runs(run) for run in runs]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert not set(text) & set(hostile) - set("[2J\n")
    # The path of a test's folder may be so long that names are broken.
    assert "".join(text.split()).count("\ufffd[2J\ufffd\ufffd\ufffd2J\ufffd") == 3
    (tmp_path / "a/seeds.json").write_text(json.dumps({"seeds": hostile}))
    with pytest.raises(UnreadableRunError) as refused:
        read_runs(tmp_path / f"b{hostile}/nowhere")
    assert not set(str(refused.value)) & set(hostile) - set("[2J")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seeds": [], "figures": {}}, "none of its runs was completed"),
        ({"figures": {"ttft_mean_ms": {"values": [1.0]}}}, "does not have one value per seed"),
        ({"figures": {"ttft_mean_ms": {"values": [1.0, "x"]}}}, "is damaged or not from pdflow"),
        ({"seeds": None}, "is damaged or not from pdflow"),
    ],
)
def test_what_is_no_seeds_file_is_refused_in_one_sentence(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    folder = several(tmp_path / "a", {1: 10, 2: 20})
    path = folder / "seeds.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(UnreadableRunError, match=message) as refused:
        read_runs(folder)
    assert "\n" not in str(refused.value)


def test_a_folder_is_of_one_run_or_of_several(tmp_path: Path) -> None:
    both = saved(tmp_path / "a", uneven)
    several(tmp_path / "b", {1: 10, 2: 20}).joinpath("seeds.json").rename(both / "seeds.json")
    with pytest.raises(UnreadableRunError, match="give the path of one"):
        read_runs(both)
    assert compared(both / "results.json", both / "seeds.json")["against_first"][0]["over"] == "single run"
    with pytest.raises(UnreadableRunError, match="neither"):
        read_runs(tmp_path / "b")
    with pytest.raises(UnreadableRunError, match="it is not a folder"):
        read_runs(both / "requests.jsonl")


def test_it_prints_within_80_columns(tmp_path: Path) -> None:
    console = Console(width=200, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    first = saved(tmp_path / "a", lambda request: 100_000 + uneven(request))
    console.print(Comparisons.of([read_runs(run) for run in (first, saved(tmp_path / "b", uneven))]))
    lines = console.export_text().splitlines()
    console.file.close()
    assert max(map(len, lines)) <= 80
    assert any("TTFT p99, ms" in line for line in lines)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_requests(folder: Path) -> None:
    (folder / "requests.jsonl").unlink()


def empty_requests(folder: Path) -> None:
    (folder / "requests.jsonl").write_text("")


def another_tools_results(folder: Path) -> None:
    (folder / "results.json").write_text('{"duration": 1.0, "request_throughput": 2.0}')


def nested_without_end(folder: Path) -> None:
    (folder / "results.json").write_text('{"duration":' + "[" * 100_000)


def infinitely_fast(folder: Path) -> None:
    path = folder / "results.json"
    results = json.loads(path.read_text())
    path.write_text(
        json.dumps({**results, "request_throughput": 0}).replace(
            '"request_throughput": 0', '"request_throughput": 1e400'
        )
    )


def infinite_bound(folder: Path) -> None:
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"ttft_ms": 30', '"ttft_ms": 1e400'))


def no_json(folder: Path) -> None:
    (folder / "results.json").write_bytes(b"\xff\xfe{")


def truncated_requests(folder: Path) -> None:
    path = folder / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-40])


def changed(folder: Path, **values: Any) -> None:
    path = folder / "requests.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **values}), *rest]))


def token_before_arrival(folder: Path) -> None:
    changed(folder, arrival_ns=10**15)


def completed_without_a_token(folder: Path) -> None:
    changed(folder, first_token_ns=None)


def beyond_any_number(folder: Path) -> None:
    changed(folder, last_token_ns=10**30)


def another_outcome(folder: Path) -> None:
    changed(folder, outcome="eaten")


@pytest.mark.parametrize(
    "corrupt",
    [
        no_folder,
        no_requests,
        empty_requests,
        another_tools_results,
        nested_without_end,
        infinitely_fast,
        infinite_bound,
        no_json,
        truncated_requests,
        token_before_arrival,
        completed_without_a_token,
        beyond_any_number,
        another_outcome,
    ],
)
def test_what_no_run_wrote_is_refused_in_one_sentence(tmp_path: Path, corrupt: Callable[[Path], None]) -> None:
    folder = saved(tmp_path / "a", uneven, requests=20)
    corrupt(folder)
    with pytest.raises(UnreadableRunError) as refused:
        read_runs(folder)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
