"""What a pool's step takes, however the scenario says it: files, tables that come with pdflow, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pdflow.cli import cli
from pdflow.cost.roofline import roofline
from pdflow.cost.step import LinearTable, LinearTime, StepCost
from pdflow.errors import ScenarioError
from pdflow.scenario import load
from pdflow.scenario.costs.aiconfigurator import tabulated
from pdflow.scenario.costs.cost_file import MadeFrom, MeasuredEngine, RowErrors, cost_file, read_cost, written
from pdflow.scenario.costs.step_costs import cost_tables, kind_of, step_cost
from pdflow_sim.build import build
from pdflow_sim.run import run_header, simulate

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/costs.md").read_text()
GOOD = (Path(__file__).resolve().parents[2] / "examples/reference.toml").read_text()
BY_TABLE = StepCost(
    h0=1_000_000_007,
    h1=10_000_001,
    hp=3,
    a1=5,
    a2=741,
    c0=7,
    c1=11,
    c2=41_306,
    linear=LinearTable(tokens=(1, 64, 4096), ps=(5_000_000_000, 6_000_000_000, 83_000_000_001)),
    provenance="calibrated on 10 requests",
    rel_error={"tpot": "±3 %", "ttft": "mean ±5 %"},
)
BY_FORMULA = StepCost(
    h0=1, a2=2, c2=3, linear=LinearTime(slope_ps=4, floor_ps=5, allreduce_ps=6, allreduce_slope_ps=7), provenance="x"
)
SOURCE = MadeFrom(source="a test", fitted_on=("rows 1 to 10",), held_out=("the others",))
ERRORS = (RowErrors(of="decode", rows=3, median=0.01, p95=0.02, max=0.03, bias=-0.005),)


@pytest.mark.parametrize("cost", [BY_TABLE, BY_FORMULA], ids=["table", "formula"])
def test_what_is_written_is_read_back(cost: StepCost) -> None:
    file = cost_file(cost, MeasuredEngine(gpu="h100-sxm", model="llama-3.1-8b", tp=1, kv_tokens=41_408), SOURCE, ERRORS)
    text = written(file)
    again, problems = read_cost("cost.json", text)
    assert problems == []
    assert again == file
    assert again is not None
    assert again.step_cost() == cost
    assert again.step_cost().rel_error == cost.rel_error
    assert written(again) == text


def test_the_file_in_the_documentation_is_one() -> None:
    text = DOCUMENT.partition("```json\n")[2].partition("```")[0]
    file, problems = read_cost("docs/costs.md", text)
    assert problems == []
    assert file is not None


def test_a_roofline_is_a_cost_file_too() -> None:
    """A user can write one down, change it and use it."""
    scenario = load(Path(__file__).resolve().parents[2] / "examples/reference.toml")
    cost = roofline(scenario.model, scenario.pools[0].gpu, tp=2)
    again, _ = read_cost("", written(cost_file(cost, MeasuredEngine(tp=2), SOURCE)))
    assert again is not None
    assert again.step_cost() == cost


def document(**changes: Any) -> dict[str, Any]:
    """A sound file as plain data, some of its keys replaced; None removes one."""
    plain = json.loads(written(cost_file(BY_TABLE, MeasuredEngine(), SOURCE, ERRORS)))
    return {key: value for key, value in {**plain, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "pdflow-step-cost/2"}, 'format: is "pdflow-step-cost/2", expected one of pdflow-step-cost/1'),
        ({"provenance": None}, "provenance: is missing"),
        ({"provenance": ""}, 'provenance: is "", expected a value that is not empty'),
        ({"provenence": "x"}, "provenence: unknown key (did you mean provenance?)"),
        ({"step_ps": {"h0": 1}}, "step_ps.h1: is missing"),
        ({"step_ps": {"h0": -1}}, "step_ps.h0: is -1, expected a number of at least 0"),
        ({"step_ps": {"h0": 1.5}}, "step_ps.h0: is 1.5, expected an integer"),
        ({"step_ps": {"h0": 10**19}}, "step_ps.h0: is 10000000000000000000, expected an integer of at most 64 bits"),
        ({"step_ps": {"h0": 2 * 10**18}}, "step_ps.h0: is 2000000000000000000, expected a number of at least 0 and at"),
        ({"table_ps": None}, "has neither or both of linear_ps and table_ps, expected exactly one"),
        (
            {"linear_ps": {"slope": 1, "floor": 1}},
            "has neither or both of linear_ps and table_ps, expected exactly one",
        ),
        (
            {"table_ps": {"tokens": [2, 3], "ps": [1, 2]}},
            "table_ps: a table of L(T) has at least two points, the first",
        ),
        (
            {"table_ps": {"tokens": [1, 3], "ps": [2, 1]}},
            "table_ps: a table of L(T) has increasing tokens and times that",
        ),
        ({"table_ps": {"tokens": [1, "3"], "ps": [1, 2]}}, 'table_ps.tokens[1]: is "3", expected an integer'),
        (
            {"table_ps": {"tokens": [1, 2], "ps": [1, 10**18 + 1]}},
            "table_ps: exceeds a billion tokens or 1,000,000",
        ),
        (
            {"table_ps": {"tokens": [*range(1, 5000)], "ps": [1] * 4999}},
            "table_ps: has 4999 points, expected at most 4096",
        ),
        (
            {"table_ps": {"tokens": [1, 2], "ps": [1, 10**13]}},
            "table_ps: ends with a slope of more than a second per token",
        ),
        (
            {"step_ps": {"c2": 2 * 10**9}},
            "step_ps.c2: is 2000000000, expected a number of at least 0 and at most 1,000",
        ),
        ({"engine": {"tp": 0}}, "engine.tp: is 0, expected a number of at least 1"),
        ({"engine": {"tp": "2"}}, 'engine.tp: is "2", expected an integer'),
        ({"errors": [{"of": "x"}]}, "errors[0].rows: is missing"),
        ({"error_bar": {"tpot": 3}}, "error_bar.tpot: is 3, expected a string in quotes"),
        ({"error_bar": "±3 %"}, 'error_bar: is "±3 %", expected a table'),
    ],
)
def test_wrong_keys_are_reported_by_their_path(changes: dict[str, Any], expected: str) -> None:
    file, problems = read_cost("cost.json", json.dumps(document(**changes)))
    assert file is None
    assert any(str(problem).startswith(f"cost.json: {expected}") for problem in problems), problems


def test_every_problem_at_once() -> None:
    _, problems = read_cost("cost.json", json.dumps(document(provenance=3, chunks=1, step_ps={"h0": -1, "h1": 0})))
    assert {problem.path for problem in problems} >= {"provenance", "chunks", "step_ps.h0", "step_ps.hp", "step_ps.c2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "cost.json:1: is not JSON: Expecting value, column 1"),
        ('{\n "a": 1\n "b": 2}', "cost.json:3: is not JSON: "),
        ("[" * 100_000, "cost.json: is nested too deeply"),
        ("9" * 5000, "cost.json: is not JSON: "),
        ('{"chunks": true, "chunks": false}', "cost.json: is not JSON: the key 'chunks' occurs twice in one object"),
        ("NaN", "cost.json: is nan, expected a table"),
        ("[]", "cost.json: is an array, expected a table"),
        (" " * 1_000_001, "cost.json: is larger than 1,000,000 bytes, expected a cost file"),
        (b'{"a": "\xff"}', "cost.json: is not JSON: "),
    ],
    ids=lambda value: str(value)[:24].strip(),
)
def test_text_that_is_no_cost_file(text: str | bytes, expected: str) -> None:
    file, problems = read_cost("cost.json", text)
    assert file is None
    assert str(problems[0]).startswith(expected)


def scenario_with(folder: Path, cost: str, *more: str, name: str = "s.toml") -> Any:
    """The reference, its prefill pool with this cost."""
    file = folder / name
    file.write_text(GOOD)
    return load(file, overrides=[f"pool.prefill.cost={cost}", *more])


def problems_of(folder: Path, cost: str, *more: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        scenario_with(folder, cost, *more)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_a_measured_cost_lies_next_to_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs/a.json").write_text(written(cost_file(BY_TABLE, MeasuredEngine(gpu="h100-sxm"), SOURCE)))
    scenario = scenario_with(tmp_path, "{ model = 'measured', path = 'costs/a.json' }")
    prefill, decode = scenario.pools
    assert step_cost(scenario.model, prefill, scenario.base_dir) == BY_TABLE
    assert (kind_of(prefill), kind_of(decode)) == ("measured", "roofline")


def test_what_an_engine_logged_as_its_kv_capacity_comes_with_its_cost(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(written(cost_file(BY_TABLE, MeasuredEngine(kv_tokens=41_408), SOURCE)))
    cost = "{ model = 'measured', path = 'a.json' }"
    assert scenario_with(tmp_path, cost).pools[0].kv_tokens == 41_408
    assert scenario_with(tmp_path, cost, "pool.prefill.kv_tokens=50000").pools[0].kv_tokens == 50_000


def test_times_of_something_else_are_refused(tmp_path: Path) -> None:
    file = cost_file(BY_TABLE, MeasuredEngine(gpu="h200", model="qwen3-8b", tp=2, weight_bytes_per_param=1.0), SOURCE)
    (tmp_path / "a.json").write_text(written(file))
    assert problems_of(tmp_path, "{ model = 'measured', path = 'a.json' }") == [
        "--set pool.prefill.cost={ model = 'measured', path = 'a.json' }: pool.prefill.cost.path: "
        '"a.json" has times for model qwen3-8b, not llama-3.1-8b, gpu h200, not h100-sxm, tp 2, not 1, '
        "weight_bytes_per_param 1.0, not 2.0; choose a table or file for this pool"
    ]


def test_a_file_that_is_not_there_or_wrong(tmp_path: Path) -> None:
    [absent] = problems_of(tmp_path, "{ model = 'measured', path = 'a.json' }")
    assert absent.endswith('"a.json" cannot be read: No such file or directory; looked for a.json')
    (tmp_path / "a.json").write_text(json.dumps(document(step_ps={"h0": -1}, chunks=1)))
    found = problems_of(tmp_path, "{ model = 'measured', path = 'a.json' }")
    assert "a.json: chunks: is 1, expected true or false" in found
    assert any(problem.startswith("a.json: step_ps.h0: is -1") for problem in found)
    (tmp_path / "a.json").write_bytes(b"[" * 3_000_000)
    [large] = problems_of(tmp_path, "{ model = 'measured', path = 'a.json' }")
    assert large == "a.json: is larger than 1,000,000 bytes, expected a cost file"
    os.mkfifo(tmp_path / "pipe.json")
    for name in (".", "pipe.json"):
        [other] = problems_of(tmp_path, f"{{ model = 'measured', path = '{name}' }}")
        assert f'"{name}" is not a file' in other


def test_a_tp_that_no_model_has_is_reported_once(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "{ model = 'aiconfigurator' }", "pool.prefill.tp=3", "pool.decode.tp=3")
    assert all("does not divide" in problem for problem in found)


def test_an_unknown_key_does_not_hide_the_other_errors(tmp_path: Path) -> None:
    """The class is built only without the keys that nobody knows, and then refuses."""
    length = '{ dist = "uniform", low = 9, high = 1, hihg = 2 }'
    [unknown, order] = problems_of(tmp_path, "{ model = 'roofline' }", f"workload.input_tokens={length}")
    assert "unknown key (did you mean high?)" in unknown
    assert "high is 1, expected at least low" in order


AIC = cost_tables("aiconfigurator")


def test_tables_of_about_twenty_combinations_come_with_pdflow() -> None:
    assert len(AIC) >= 20
    for gpu in ("a100-80g", "b200", "h100-sxm", "h200"):
        assert {f"llama-3.1-8b_{gpu}_tp1", f"llama-3.1-70b_{gpu}_tp4", f"qwen3-32b_{gpu}_tp2"} <= set(AIC)


@pytest.mark.parametrize("name", AIC)
def test_a_table_of_aiconfigurator_has_its_provenance_and_error_bar(name: str) -> None:
    file = AIC[name]
    of = file.engine
    in_8_bits = of.weight_bytes_per_param == 1 and of.model != "deepseek-v3"
    assert name == f"{of.model}{'-fp8' if in_8_bits else ''}_{of.gpu}_tp{of.tp}"
    assert "NVIDIA, Apache-2.0" in file.provenance
    assert file.made_from.licence == "Apache-2.0"
    assert file.error_bar.tpot
    assert {row.of for row in file.errors} == {"prefill", "decode", "mixed"}
    assert all(row.median < 0.08 for row in file.errors)


def test_gpu_time_agrees_with_figures_that_others_took_from_the_same_package() -> None:
    """aiconfigurator-core 0.12.0, vLLM's tables: a prompt of 2048 tokens, and 32 decodes at 2048, in ms."""
    for name, prefill_ms, decode_ms in (
        ("llama-3.1-8b_h100-sxm_tp1", 43.5, 9.6),
        ("llama-3.1-70b_h200_tp4", 128, 14.5),
        ("qwen3-32b_b200_tp2", 58, 9.6),
        ("llama-3.1-8b_a100-80g_tp1", 125, 19.1),
        ("llama-3.1-70b-fp8_h100-sxm_tp2", 165.6, 20.2),
    ):
        cost = AIC[name].step_cost()
        assert cost.step_ps([(2048, 0)], []) / 1e9 == pytest.approx(prefill_ms, rel=0.05)
        assert cost.decode_step_ps(32, 32 * 2048) / 1e9 == pytest.approx(decode_ms, rel=0.06)


def test_host_time_comes_on_top_of_gpu_time(tmp_path: Path) -> None:
    table = AIC["llama-3.1-8b_h100-sxm_tp1"].step_cost()
    scenario = scenario_with(tmp_path, "{ model = 'aiconfigurator' }")
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    assert cost.decode_step_ps(64, 64_000) - table.decode_step_ps(64, 64_000) == (1_000 + 64 * 10) * 10**6
    scenario = scenario_with(tmp_path, "{ model = 'aiconfigurator', host_step_s = 0.0, host_seq_s = 0.0 }")
    none = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    assert none.decode_step_ps(64, 64_000) == table.decode_step_ps(64, 64_000)
    assert "host 0 ms" in none.provenance


def test_a_combination_that_does_not_come_with_pdflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)  # Not installed.
    [problem] = problems_of(tmp_path, "{ model = 'aiconfigurator' }", "pool.prefill.tp=2", "pool.decode.tp=2")
    assert problem.endswith(
        "pool.prefill.cost.model: pdflow has no table of llama-3.1-8b on h100-sxm, tp 2; "
        "pip install 'pdflow[aiconfigurator]' computes one; "
        "tables that come with pdflow for llama-3.1-8b on h100-sxm: tp 1 in 8 bits, tp 1"
    )
    [problem] = problems_of(tmp_path, "{ model = 'aiconfigurator' }", "pool.prefill.gpu=mi300x")
    assert "aiconfigurator has no data for gpu mi300x" in problem
    assert "llama-3.1-8b on h200 tp 1" in problem


def test_a_table_is_of_its_own_precision(tmp_path: Path) -> None:
    kernels = "{ model = 'aiconfigurator' }"
    eight_bits = ("model.weight_dtype=fp8", "model.activation_dtype=fp8")
    [problem] = problems_of(tmp_path, kernels, "model.weight_dtype=int4")
    assert "pdflow has no table of llama-3.1-8b with 0.52 bytes per parameter, and computes none" in problem
    assert "tables that come with pdflow for llama-3.1-8b on h100-sxm: tp 1 in 8 bits, tp 1" in problem
    [problem] = problems_of(tmp_path, kernels, eight_bits[0])
    assert "8-bit weights only with 8-bit products; expected model.weight_dtype = " in problem
    [problem_of_products] = problems_of(tmp_path, kernels, eight_bits[1])
    assert problem_of_products.partition(" has ")[2] == problem.partition(" has ")[2]
    costs = []
    for more in ((), eight_bits):
        scenario = scenario_with(tmp_path, kernels, *more)
        costs.append(step_cost(scenario.model, scenario.pools[0], scenario.base_dir))
    assert "llama-3.1-8b in 8 bits on h100-sxm" in costs[1].provenance
    assert costs[1].step_ps([(8192, 0)], []) < costs[0].step_ps([(8192, 0)], [])


def test_a_table_is_of_its_own_kv_precision(tmp_path: Path) -> None:
    [problem] = problems_of(tmp_path, "{ model = 'aiconfigurator' }", "model.kv_dtype=fp8")
    assert problem.endswith(
        "aiconfigurator has times for kv_bytes_per_value 2, not 1; choose a table or file for this pool"
    )


def test_eight_bit_products_on_a_gpu_without_them(tmp_path: Path) -> None:
    more = ("model.activation_dtype=fp8", "pool.prefill.gpu=a100-80g")
    [problem] = problems_of(tmp_path, "{ model = 'roofline' }", *more)
    assert "pool.prefill.gpu: a100-80g has no fp8_flops, and model.activation_dtype is fp8" in problem


def test_an_error_since_loading_is_reported_for_people(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(written(cost_file(BY_TABLE, MeasuredEngine(), SOURCE)))
    scenario = scenario_with(tmp_path, "{ model = 'measured', path = 'a.json' }")
    (tmp_path / "a.json").unlink()
    with pytest.raises(ScenarioError, match=r"pool\.prefill\.cost: .* cannot be read"):
        step_cost(scenario.model, scenario.pools[0], scenario.base_dir)


class Kernels:
    """What stands in for the package's engine: kernels of a simple law, in ms."""

    slowdown = 0.0
    slow_alone = 0.0

    def __init__(self, tp: int) -> None:
        self.tp = tp

    @classmethod
    def compile(cls, model: str, system: str, backend: str, *, tp_size: int, **_: Any) -> Kernels:
        if system == "l40s":
            raise KeyError("no operator table")
        return cls(tp_size)

    def predict_prefill_latency(self, prompts: int, length: int, prefix: int) -> float:
        new = length - prefix
        attended = prompts * (new * prefix + new * (new + 1) // 2)
        return 5 + 0.02 * prompts * new / self.tp + 7e-7 * attended + self.slowdown * self.tp

    def predict_decode_latency(self, decodes: int, context: int) -> float:
        return 5 + 0.02 * decodes / self.tp + 4e-5 * decodes * context + self.slow_alone / decodes

    def mixed_step_latency(self, tokens: int, decodes: int, length: int, _: int) -> float:
        prompts = tokens // length
        return self.predict_prefill_latency(prompts, length, 0) + 0.02 * decodes / self.tp + 4e-5 * decodes * length


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> type[Kernels]:
    tabulated.cache_clear()
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", ModuleType("aiconfigurator_core"))
    sdk = ModuleType("aiconfigurator_core.sdk")
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", sdk)
    monkeypatch.setattr(Kernels, "slowdown", 0.0)
    monkeypatch.setattr(Kernels, "slow_alone", 0.0)
    sdk.EngineHandle = Kernels  # type: ignore[attr-defined]
    return Kernels


def test_what_is_installed_is_tabulated_when_a_scenario_asks(tmp_path: Path, kernels: type[Kernels]) -> None:
    more = ("model.preset=qwen3-8b", "pool.prefill.tp=2", "pool.decode.tp=2")
    scenario = scenario_with(tmp_path, "{ model = 'aiconfigurator', host_step_s = 0, host_seq_s = 0 }", *more)
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    law = kernels(2)
    assert cost.step_ps([(1000, 3000)], []) / 1e9 == pytest.approx(law.predict_prefill_latency(1, 4000, 3000), rel=0.01)
    assert cost.decode_step_ps(50, 50_000) / 1e9 == pytest.approx(law.predict_decode_latency(50, 1000), rel=0.01)
    assert all(row.max < 0.01 for row in tabulated("h100-sxm", "qwen3-8b", 2).errors)


def test_a_table_in_which_more_gpus_are_slower_is_refused(kernels: type[Kernels], monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "slowdown", 100.0)
    with pytest.raises(
        ValueError, match=r"pdflow rejects .* a prompt of 2048 tokens takes 4.. ms, but 2.. ms with tp 2"
    ):
        tabulated("h100-sxm", "qwen3-8b", 4)


def test_a_table_in_which_one_decode_is_slower_than_many_is_refused(kernels: type[Kernels], monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "slow_alone", 30.0)
    with pytest.raises(
        ValueError, match=r"pdflow rejects .* a step of one decode takes 35 ms, but one of 64 decodes only 9 ms"
    ):
        tabulated("h100-sxm", "qwen3-8b", 1)


def test_data_that_is_missing_is_one_sentence(kernels: type[Kernels]) -> None:
    with pytest.raises(ValueError, match="aiconfigurator has no table of qwen3-8b on l40s, tp 1: 'no operator table'"):
        tabulated("l40s", "qwen3-8b", 1)


FITTED = cost_tables("fitted")
HELD_OUT = {
    # Largest medians of the rows that were not fitted on: prefill, decode.
    "distserve": (0.01, 0.13),
    "splitwise": (0.07, 0.04),
    "llmservingsim": (0.04, 0.01),
}


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_table_has_its_provenance_and_error_bar(name: str) -> None:
    file, of = FITTED[name], FITTED[name].engine
    source = name.partition("_")[0].partition("-")[0]
    assert name.endswith(f"_{of.model}_{of.gpu}_tp{of.tp}")
    assert source in file.provenance.lower()
    assert file.made_from.licence in ("MIT", "Apache-2.0")
    assert file.made_from.fitted_on
    assert file.made_from.held_out
    medians = {row.of: row.median for row in file.errors}
    prefill, decode = HELD_OUT[source]
    assert medians["prefill"] <= prefill
    assert medians["decode"] <= decode


def test_prefills_of_distserve_are_its_formula() -> None:
    """Its coefficients of OPT-13B, tp 1, in ms: published/distserve_profiler_a100_80g.json."""
    cost = FITTED["distserve_opt-13b_a100-80g_tp1"].step_cost()
    for n in (1, 512, 2048):
        exact_ms = 18.10254647486372 + 0.1019122572698738 * n + 7.122264314252114e-06 * n * n
        assert cost.step_ps([(n, 0)], []) / 1e9 == pytest.approx(exact_ms, rel=1e-5)


def test_token_times_of_splitwise() -> None:
    """Splitwise, Llama-2-70B: 55/45/45 ms on A100, 37/29/30 ms on H100 with tp 2/4/8."""
    for gpu, tokens_ms in (("a100-80g", (55, 45, 45)), ("h100-sxm", (37, 29, 30))):
        for tp, token_ms in zip((2, 4, 8), tokens_ms, strict=True):
            cost = FITTED[f"splitwise_llama-2-70b_{gpu}_tp{tp}"].step_cost()
            assert cost.decode_step_ps(1, 576) / 1e9 == pytest.approx(token_ms, rel=0.04)


def test_a_table_is_named_by_the_scenario(tmp_path: Path) -> None:
    on_4090 = ("pool.prefill.gpu=rtx-4090", "transfer.dialect=strict")
    scenario = scenario_with(
        tmp_path, "{ model = 'fitted', table = 'llmservingsim_llama-3.1-8b_rtx-4090_tp1' }", *on_4090
    )
    cost = step_cost(scenario.model, scenario.pools[0], scenario.base_dir)
    assert cost == FITTED["llmservingsim_llama-3.1-8b_rtx-4090_tp1"].step_cost()
    [wrong] = problems_of(tmp_path, "{ model = 'fitted', table = 'llmservingsim_llama-3.1-8b_rtx-4090' }")
    assert wrong.endswith("expected the name of a cost table (did you mean llmservingsim_llama-3.1-8b_rtx-4090_tp1?)")
    [other] = problems_of(tmp_path, "{ model = 'fitted', table = 'splitwise_llama-2-70b_h100-sxm_tp2' }")
    assert "has times for model llama-2-70b, not llama-3.1-8b, tp 2, not 1; choose" in other


def test_a_table_brings_the_capacity_that_its_engine_had(tmp_path: Path) -> None:
    table = "{ model = 'fitted', table = 'distserve_opt-13b_a100-80g_tp2' }"
    on_a100 = (f"pool.{name}.{key}" for name in ("prefill", "decode") for key in ("gpu=a100-80g", "tp=2"))
    scenario = scenario_with(tmp_path, table, "model.preset=opt-13b", *on_a100)
    assert scenario.pools[0].kv_tokens == 163_008  # distserve_max_num_tokens.csv
    assert scenario.pools[1].kv_tokens is None


def test_presets_lists_tables_and_shows_the_error_of_one() -> None:
    everything = CliRunner().invoke(cli, ["presets"]).output
    assert all(name in everything for name in (*AIC, *FITTED))
    one = " ".join(CliRunner().invoke(cli, ["presets", "splitwise_llama-2-70b_h100-sxm_tp8"]).output.split())
    assert "Splitwise (MIT): llama-2-70b on h100-sxm, tp 8" in one
    assert "decode, 9 rows held out: median 1.7%" in one
    assert "did not run as one" in one


def test_a_result_has_the_provenance_of_its_step_times(tmp_path: Path) -> None:
    """Its provenance and its error bar reach the reader."""
    scenario = scenario_with(tmp_path, "{ model = 'aiconfigurator' }", "workload.requests=3")
    costs = run_header(scenario, build(scenario).costs, (), False).costs
    assert [cost.model for cost in costs] == ["aiconfigurator", "roofline"]
    assert costs[0].provenance.startswith("aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0): vLLM 0.24.0 kernels of")
    assert costs[0].error_bar.startswith("TPOT ±10 % (−20 % at high N), E2E ±15 %, TTFT ±35 %")
    result = simulate(scenario, quiet=True).result
    assert result.metrics.completed == 3


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


def locations(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(location for key, inner in inside for location in locations(inner, (*path, key)))]


@given(st.data())
def test_every_field_is_read_or_reported(data: st.DataObject) -> None:
    """Nothing raises; and what is read is written and read again, and gives a cost that takes its time."""
    whole = document()
    *parents, last = data.draw(st.sampled_from(locations(whole)[1:]))
    inner: Any = whole
    for key in parents:
        inner = inner[key]
    inner[last] = data.draw(ODD)
    file, problems = read_cost("cost.json", json.dumps(whole))
    assert (file is None) == bool(problems)
    if file is not None:
        assert read_cost("cost.json", written(file)) == (file, [])
        assert file.step_cost().step_ps([(100, 50)], [1000]) >= 0
