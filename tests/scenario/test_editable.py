"""`pdflow.Scenario`: loading, editing, saving, showing. What the rules are is tested where they are."""

from __future__ import annotations

import json
import os
import pickle
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.methods.catalogue import METHODS
from pdflow.scenario import load
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.paths import SERVED, with_paths
from pdflow.scenario.reading.toml_text import toml_text
from pdflow.scenario.schema.jsonschema import schema_json
from pdflow.scenario.schema.scenario import ResolvedScenario

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "examples/reference.toml"
EXAMPLES = sorted(path for path in ROOT.glob("examples/**/*.toml") if path.name != "mooncake-conversation.toml")
TRACE_LINE = '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}\n'


def error_of(refused: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        refused(*arguments, **more)
    return str(caught.value)


def test_edits_make_another_scenario() -> None:
    before = Scenario.load(REFERENCE)
    after = before.with_({"transfer.method": "nixl-pull"}).with_(**{"pool.decode.replicas": 8})
    assert (after.resolved.transfer.method, after.resolved.pool("decode").replicas) == ("nixl-pull", 8)
    assert (before.resolved.transfer.method, before.resolved.pool("decode").replicas) == ("nixl-push", 4)
    assert after.edits == {"transfer.method": "nixl-pull", "pool.decode.replicas": 8}
    assert after == Scenario.load(REFERENCE, {"transfer.method": "nixl-pull", "pool.decode.replicas": 8})
    assert len({before, after, Scenario.load(REFERENCE)}) == 2


def test_an_edit_is_what_set_would_do() -> None:
    by_set = load(REFERENCE, overrides=["pool.decode.gpu.ec=0.5", "workload.input_tokens=64", "model.kv_dtype=fp8"])
    edits = {"pool.decode.gpu.ec": 0.5, "workload.input_tokens": 64, "model.kv_dtype": "fp8"}
    assert Scenario.load(REFERENCE, edits).resolved == by_set


def test_the_options_of_a_command_are_saved_with_the_scenario(tmp_path: Path) -> None:
    sets = ["pool.decode.gpu.ec=0.5", "network.bandwidth_bytes_per_s=inf"]
    scenario = Scenario.of_command(REFERENCE, sets, 7)
    assert scenario.resolved == load(REFERENCE, overrides=sets, seed=7)
    scenario.save(tmp_path / "saved.toml")
    assert (tmp_path / "saved.toml").read_text() == scenario.text_for(tmp_path)
    again = Scenario.load(tmp_path / "saved.toml").resolved
    assert content_of(again) == content_of(scenario.resolved)
    assert again.seed == 7
    assert "--set pool.decod.tp=2" in error_of(Scenario.of_command, REFERENCE, ["pool.decod.tp=2"], None)


def test_only_a_scenario_with_paths_names_files(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE_LINE)
    trace = {"trace": {"path": "trace.jsonl", "format": "mooncake"}}
    document = {**Scenario.load(REFERENCE).document(), "workload": trace}
    assert Scenario.from_dict(document, folder=tmp_path).names_files
    assert not Scenario.load(REFERENCE).names_files


def test_all_errors_are_reported_with_their_location(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(REFERENCE.read_text())
    edits = {"transfer.method": "nixl-pul", "slo.ttft_ms": -1, "pool.decod.tp": 1, "a b": 1}
    assert error_of(Scenario.load(file).with_, edits).split("\n") == [
        'edit transfer.method="nixl-pul": transfer.method: is "nixl-pul", expected one of '
        f"{', '.join(METHODS)} (did you mean nixl-pull?)",
        "edit slo.ttft_ms=-1: slo.ttft_ms: is -1, expected a number above 0",
        "edit pool.decod.tp=1: no pool named decod, expected one of prefill, decode (did you mean decode?)",
        'edit a b=1: "a b" is not a key, expected a dotted one, as in pool.decode.tp',
    ]
    # What an edit makes wrong elsewhere has the line of elsewhere.
    line = file.read_text().splitlines().index("[workload]") + 1
    assert error_of(Scenario.load(file).with_, {"workload.input_tokens": None}).startswith(f"{file}:{line}: workload")


def test_none_takes_a_key_away() -> None:
    scenario = Scenario.load(REFERENCE).with_({"slo.ttft_ms": None, "slo.e2e_ms": None})
    assert (scenario.resolved.slo.ttft_ms, scenario.resolved.slo.tpot_ms) == (None, 30)


def test_values_of_numpy_are_values() -> None:
    edits = {"pool.decode.replicas": np.int64(3), "slo.ttft_ms": np.float64(250), "network.poll": np.bool_(False)}
    edits["workload.input_tokens"] = {"dist": "empirical", "tokens": np.array([10, 20])}
    scenario = Scenario.load(REFERENCE, edits)
    assert scenario.resolved.pool("decode").replicas == 3
    assert "ttft_ms = 250.0" in toml_text(scenario.document())
    with pytest.raises(TypeError, match=r"slo.ttft_ms is <object .* cannot hold"):
        scenario.with_({"slo.ttft_ms": object()})


def test_one_can_be_made_without_a_file() -> None:
    text = REFERENCE.read_text()
    of_text, of_dict = Scenario.from_toml(text), Scenario.from_dict(tomllib.loads(text))
    assert of_text == of_dict
    assert attrs.evolve(of_text.resolved, path="") == attrs.evolve(load(REFERENCE), path="")
    assert error_of(Scenario.from_toml, "a = 1\nb = \n").startswith("scenario:2: is not TOML")
    wrong = {**tomllib.loads(text), "slo": {"ttft_ms": -1}}
    assert error_of(Scenario.from_dict, wrong) == "scenario: slo.ttft_ms: is -1, expected a number above 0"


def placeless(scenario: ResolvedScenario) -> ResolvedScenario:
    """Without the paths, which are relative to its file."""
    return attrs.evolve(scenario, path="", serve=attrs.evolve(scenario.serve, model=None))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_saved_loads_as_the_same(path: Path, tmp_path: Path) -> None:
    scenario = Scenario.load(path)
    scenario.save(tmp_path / "below/saved.toml")
    again = Scenario.load(tmp_path / "below/saved.toml")
    assert again == scenario
    assert placeless(again.resolved) == placeless(scenario.resolved)
    assert Scenario.from_dict(scenario.document(), folder=scenario.folder).with_({"scenario.name": again.name}) == again


def test_paths_stay_right_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "trace.jsonl").write_text(TRACE_LINE * 3)
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16", "model_type": "llama"}
    (home / "config.json").write_text(json.dumps({**shape, "architectures": ["LlamaForCausalLM"]}))
    document = tomllib.loads(REFERENCE.read_text())
    document["workload"] = {"trace": {"path": "trace.jsonl", "format": "mooncake"}}
    document["model"] = {"name": "mine", "hf_config": "config.json"}
    scenario = Scenario.from_dict(document, folder=home)
    scenario.save(tmp_path / "elsewhere/deep/s.toml")
    assert 'hf_config = "../../home/config.json"' in (tmp_path / "elsewhere/deep/s.toml").read_text()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Scenario.load("deep/s.toml") == scenario
    # One who saves what has absolute paths means those.
    absolute = scenario.with_({"workload.trace.path": home / "trace.jsonl"})
    absolute.save("other.toml")
    assert str(home / "trace.jsonl") in Path("other.toml").read_text()
    assert absolute == scenario


def test_every_path_of_the_schema_is_known() -> None:
    """A new key that names a file must be found by whoever moves a scenario."""
    document: dict[str, Any] = {
        "workload": {"trace": {"path": "a", "dataset": "b"}, "like": "c.toml"},
        "model": {"hf_config": "d"},
        "transfer": {"config": "f"},
        "serve": dict.fromkeys(SERVED, "g"),
        "pool": [{"cost": {"model": "measured", "path": "e"}}],
    }
    moved = with_paths(document, lambda path: f"x/{path}")
    assert json.dumps(moved).count("x/") == 6 + len(SERVED)
    assert with_paths({"workload": {"like": "azure-code"}}, lambda path: "x")["workload"]["like"] == "azure-code"
    for traces, moved_to in (("spans.jsonl", "x"), ("off", "off"), ("http://collector:4318", "http://collector:4318")):
        assert with_paths({"serve": {"traces": traces}}, lambda path: "x")["serve"]["traces"] == moved_to
    terms = ("relative to the scenario", "a file that", "next to the trace", "config.json")
    found = {
        key for key, what in _described(schema_json()) if any(term in what for term in terms) and key != "scenario"
    }
    named = {"path", "dataset", "like", "config", *SERVED}
    assert named <= found <= named | {"hf_config", "traces"}


def _described(schema: Any) -> Iterator[tuple[str, str]]:
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if isinstance(value, dict):
            yield key, str(value.get("description", ""))
        for inner in value if isinstance(value, list) else (value,):
            yield from _described(inner)


def test_it_travels_to_another_process() -> None:
    scenario = Scenario.load(REFERENCE, {"transfer.method": "nixl-pull"})
    assert pickle.loads(pickle.dumps(scenario)) == scenario


def test_repr_describes_the_scenario() -> None:
    scenario = Scenario.load(REFERENCE, {"pool.decode.replicas": 2})
    assert repr(scenario) == (
        "<Scenario 'reference' seed 1\n"
        "  workload  10,000 requests, Poisson at 8/s\n"
        "  model     llama-3.1-8b\n"
        "  pool      prefill: 4 x h100-sxm, TP 1, PP 1\n"
        "  pool      decode: 2 x h100-sxm, TP 1, PP 1\n"
        "  transfer  nixl-push, strict, over rdma-400g\n"
        "  router    round-robin, concurrent dispatch, 2 attempts\n"
        "  SLO       TTFT 500 ms, TPOT 30 ms\n"
        "  edited    pool.decode.replicas = 2>"
    )
    page = scenario.with_({"scenario.name": "<b>"})._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b><b>" not in page
    assert "pool.decode.replicas = 2" in page


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES: Any = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_toml_is_read_back_as_it_was(document: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(document)) == document


def test_saving_names_no_machine(tmp_path: Path) -> None:
    """A file that is handed on holds nothing of the folder that it came from."""
    Scenario.load(REFERENCE).save(tmp_path / "s.toml")
    assert os.path.dirname(REFERENCE) not in (tmp_path / "s.toml").read_text()
    assert PurePosixPath(tmp_path).name not in (tmp_path / "s.toml").read_text()
