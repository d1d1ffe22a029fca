"""What can be generated in the documentation is what the generator would write now."""

from __future__ import annotations

import pytest

from docs.generate import ROOT, accuracy_rows, pages, scenario_keys, written
from pdflow_sim.check.mutants import page as mutants
from pdflow_sim.check.races import page as races
from pdflow_sim.check.races.catalogue import RACES
from pdflow_sim.check.races.verdict import RaceRow
from tests.check.answers import hunted, looked


@pytest.fixture(scope="module")
def written_now() -> dict[str, str]:
    """As `python docs/generate.py` would, but for searching once more for what other tests ask for too."""
    rows = (RaceRow(race, {name: looked(race.number, name) for name in race.shown}, 0.0) for race in RACES.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "hunt", lambda mutant, clock: hunted(mutant.name))
        patch.setattr(races, "rows", lambda: rows)
        return pages()


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))])
def test_generated_sections_are_up_to_date(name: str, written_now: dict[str, str]) -> None:
    document = (ROOT / name).read_text(encoding="utf-8")
    assert document == written_now.get(name, document), f"{name} is out of date: python docs/generate.py"


def test_the_readme_has_the_errors_of_the_validation_page() -> None:
    page = """# How right is it?

## In short

| what | metric | error | at most | holds |
| --- | ---: | ---: | ---: | ---: |
| A, 2 x B, presets alone, 9 requests below saturation | TTFT | 9.5 % | 25 % | yes |
| A, 2 x B, presets alone, 9 requests below saturation | TPOT | 68.3 % | 25 % | **no** |
| A, 2 x B, calibrated on 10, the other 290 | TPOT | 1.0 % | 5 % | yes |
| P/D rows, 21 rows | TPOT | 8.8 % | 25 % | yes |

3 of 4 hold.

## Where it is wrong

| A, presets alone | TTFT | 99 % | 25 % | yes |
"""
    assert list(accuracy_rows(page))[2:] == [
        "| A, 2 x B | 9.5 % | 68.3 % |  | 1.0 % |",
        "| P/D rows, 21 rows |  | 8.8 % |  |  |",
        "",
        "3 of 4 aims of that page hold.",
    ]


def test_a_missing_mark_is_reported() -> None:
    with pytest.raises(ValueError, match="no part is marked keys"):
        written("no marks", {"keys": ""})


def test_every_key_of_a_scenario_is_documented() -> None:
    silent = [line for line in scenario_keys() if line.endswith("|  |")]
    excused = {"hidden_size", "intermediate_size", "num_heads", "head_dim", "vocab_size"}  # named as in config.json
    excused |= {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    excused |= {"experts_per_token", "expert_intermediate_size"}
    assert {line.split("`")[1] for line in silent} <= excused
