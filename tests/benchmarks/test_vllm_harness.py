"""The harness around real vLLM instances, without vLLM: arrivals, configurations, judgements, the table of faults."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.vllm.arrivals import LONGEST, compare, phases
from benchmarks.vllm.cases import CASES
from benchmarks.vllm.client import Reply, prompt_tokens_by_source, total
from benchmarks.vllm.connectors import NAMES, kv_transfer_config, mode_of, origin_of
from benchmarks.vllm.faults import chosen, table
from benchmarks.vllm.model import FIRST_TOKEN, VOCABULARY, prompt
from benchmarks.vllm.scene import in_advance, unknown

INSIDE = Path(__file__).resolve().parents[2] / "benchmarks" / "vllm" / "inside"


def test_a_run_has_as_many_prompts_as_asked_for_and_the_edges_of_a_block() -> None:
    for count in (7, 60, 500):
        plan = phases(count, 128)
        prompts = [tokens for phase in plan for tokens in phase.prompts]
        assert len(prompts) == count
        assert max(map(len, prompts)) <= LONGEST
    lengths = {len(tokens) for tokens in plan[0].prompts}
    assert {1, 127, 128, 129, 256, LONGEST} <= lengths
    assert phases(60, 128) == phases(60, 128)
    assert phases(60, 128) != phases(60, 128, seed=1)


def test_prefix_phases_begin_with_whole_blocks_of_earlier_prompts() -> None:
    plan = phases(100, 32)
    earlier: set[tuple[int, ...]] = set()
    for phase in plan:
        if phase.kind.startswith("hits"):
            shared = [tokens for tokens in phase.prompts if tuple(tokens[:32]) in earlier]
            assert len(shared) > len(phase.prompts) // 2
        earlier |= {tuple(tokens[:32]) for tokens in phase.prompts if len(tokens) >= 32}
    assert {phase.forget for phase in plan if phase.kind.startswith("hits")} == {"p", "d", None}


def test_prompts_are_tokens_of_the_model_and_the_same_again() -> None:
    assert all(FIRST_TOKEN <= token < VOCABULARY for token in prompt(1000, "x"))
    assert prompt(10, "x") == prompt(10, "x") != prompt(10, "y")


def test_a_difference_says_where_the_answers_differ_and_by_how_little() -> None:
    (phase,) = phases(3, 128, kinds=("concurrent",))
    expected = [Reply("ok", 0.1, 200, (1, 2, 3), (5.0, 0.01, 5.0))] * 3
    answers = [expected[0], Reply("ok", 0.1, 200, (1, 9, 3)), Reply("hung", 60.0)]
    (difference,), failed = compare(phase, expected, answers)
    assert (difference.index, difference.position, difference.gap, failed) == (1, 1, 0.01, 1)


def test_each_connector_has_a_configuration_for_both_roles() -> None:
    for name in NAMES[1:]:
        for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            config = json.loads(kv_transfer_config(name, role, extra={"lease_s": 6}) or "")  # type: ignore[arg-type]
            assert config["kv_role"] == kv_role
            assert config["kv_connector_extra_config"]["lease_s"] == 6
            assert "engine_id" not in config
            if origin_of(name) == "pdflow":
                assert config["kv_connector_extra_config"]["transfer_mode"] == mode_of(name)
    assert kv_transfer_config("none", "alone") is None
    with pytest.raises(ValueError, match="stock-push"):
        kv_transfer_config("stock", "prefill")


def test_metrics_are_summed_by_label() -> None:
    name = "vllm:prompt_tokens_by_source_total"
    metrics = {f'{name}{{engine="0",source="local_compute"}}': 3.0, f'{name}{{engine="1",source="external"}}': 4.0}
    assert total(metrics, name) == 7
    assert total(metrics, name, engine="1") == 4
    assert prompt_tokens_by_source(metrics) == {"local_compute": 3, "external": 4}


def test_unknown_and_early_parameters_name_no_prompt_of_p() -> None:
    own = {"xid": "a" * 32, "block_size": 128, "digest": 5, "ranks": [["127.0.0.1", 1]]}
    answer = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1, "tp_size": 1, "pp_size": 1}
    answer |= {"remote_request_id": "r", "remote_block_ids": [[1]], "pdflow": own}
    other = unknown(answer)
    assert other["remote_request_id"] != "r"
    assert other["pdflow"]["xid"] != own["xid"]
    early = in_advance(answer, "n")
    assert early["pdflow"] == {"xid": "n", "block_size": 128, "ranks": [["127.0.0.1", 1]]}
    assert "remote_block_ids" not in early


def test_rows_are_chosen_by_key_or_by_number() -> None:
    assert [each.key for each in chosen("1,idle")] == ["1", "1-fail", "idle"]
    assert len(chosen(None)) == len(CASES)
    with pytest.raises(SystemExit, match="'99'"):
        chosen("99")


def test_each_row_of_the_table_has_a_fault_that_says_what_is_done() -> None:
    numbers = {key.partition("-")[0] for key in CASES}
    assert {str(number) for number in range(1, 11)} <= numbers
    for each in CASES.values():
        assert each.run.__doc__, each.key
        assert each.mode in ("push", "pull")


def test_the_table_says_what_shows_on_stock_and_what_pdflow_does_not_meet() -> None:
    seen = {"observed": "hung | 60 s", "facts": {}, "done": True}
    results = {
        "stock": {"10": seen | {"met": False}, "2": seen | {"met": True}},
        "pdflow": {"10": seen | {"met": False}, "2": seen | {"met": True}},
    }
    *_, second, tenth = table(results).splitlines()
    assert second.startswith("| 2 |")
    assert second.endswith("| not shown on stock, pdflow: met |")
    assert tenth.startswith("| 10 |")
    assert tenth.endswith("| shown on stock, pdflow: NOT MET |")
    assert tenth.count("|") == 7


def test_a_transfer_fails_once_for_each_order(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("nixl_faults", INSIDE / "nixl_faults.py")
    assert spec is not None
    assert spec.loader is not None
    nixl_faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nixl_faults)

    class MissingError(Exception):
        pass

    class Agent:
        def transfer(self, handle: Any) -> str:
            return "PROC"

        def check_xfer_state(self, handle: Any) -> str:
            return "DONE"

        def get_xfer_telemetry(self, handle: Any) -> int:
            return 1

    api = SimpleNamespace(nixl_agent=Agent, nixlBind=SimpleNamespace(nixlNoTelemetryError=MissingError))
    nixl_faults._change(api, str(tmp_path))
    agent, first, second = Agent(), object(), object()
    (tmp_path / "fail-transfer").touch()
    assert agent.transfer(first) == "ERR"
    assert agent.transfer(second) == "PROC"
    assert (agent.check_xfer_state(first), agent.check_xfer_state(second)) == ("ERR", "DONE")
    assert agent.get_xfer_telemetry(second) == 1
    order = tmp_path / "hold-transfer"
    order.touch()
    assert (agent.transfer(second), agent.check_xfer_state(second)) == ("PROC", "PROC")
    order.unlink()
    assert agent.check_xfer_state(second) == "PROC", "it is posted only now"
    assert agent.check_xfer_state(second) == "DONE"
    (tmp_path / "no-telemetry").touch()
    with pytest.raises(MissingError):
        agent.get_xfer_telemetry(second)
