"""The campaign of walks: it goes on where its file ends, and refuses files that are not its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import walk_campaign
from benchmarks.walk_campaign import CampaignError, lines_of, main, summary


def seeds_of(file: Path) -> list[tuple[int, int]]:
    return [(line["first_seed"], line["next_seed"]) for line in lines_of(file, "strict")]


def test_a_further_call_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    file = tmp_path / "walks.jsonl"
    assert main([str(file), "--until", "150", "--batch", "100"]) == 0
    assert seeds_of(file) == [(0, 100), (100, 150)]
    assert main([str(file), "--until", "200", "--batch", "100"]) == 0
    assert seeds_of(file) == [(0, 100), (100, 150), (150, 200)]
    assert main([str(file), "--until", "200"]) == 0
    assert len(seeds_of(file)) == 3
    totals = summary(lines_of(file, "strict"))
    assert (totals["runs"], totals["wide_runs"], totals["broken"]) == (200, 100, {})
    assert [(commit["first_seed"], commit["next_seed"]) for commit in totals["commits"]] == [(0, 200)]
    out = tmp_path / "totals.json"
    assert main([str(file), "--summary", str(out)]) == 0
    assert json.loads(out.read_text()) == totals


def test_an_interrupt_loses_only_the_batch_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, batch = tmp_path / "walks.jsonl", walk_campaign.batch

    def interrupted(dialect: str, seeds: range, jobs: int) -> dict[str, Any]:
        if seeds[0]:
            raise KeyboardInterrupt
        return batch(dialect, seeds, jobs)

    monkeypatch.setattr(walk_campaign, "batch", interrupted)
    assert main([str(file), "--until", "100", "--batch", "50"]) == 130
    assert seeds_of(file) == [(0, 50)]
    monkeypatch.undo()
    assert main([str(file), "--until", "100", "--batch", "50"]) == 0
    assert seeds_of(file) == [(0, 50), (50, 100)]


def test_a_violation_is_in_its_line_and_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "walks.jsonl"
    line = {"dialect": "strict", "first_seed": 0, "next_seed": 100, "broken": {"S1": 2}, "commit": "a"}
    monkeypatch.setattr(walk_campaign, "batch", lambda dialect, seeds, jobs: line)
    assert main([str(file), "--until", "100"]) == 1
    assert main([str(file), "--until", "100"]) == 1


def test_batches_that_broke_something_are_walked_again(tmp_path: Path) -> None:
    file = tmp_path / "walks.jsonl"
    main([str(file), "--until", "150", "--batch", "50"])
    lines = lines_of(file, "strict")
    failures = [{"seed": 60, "invariant": "S1", "what": "x", "scope": ""}]
    lines[1] |= {"broken": {"S1": 2}, "commit": "a", "failures": failures}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(file), "--again"]) == 0
    after = lines_of(file, "strict")
    assert seeds_of(file) == [(0, 50), (50, 100), (100, 150)]
    assert (after[0], after[2]) == (lines[0], lines[2])
    assert (after[1]["broken"], after[1]["runs"]) == ({}, 50)
    assert after[1]["found"] == [{"commit": "a", "broken": {"S1": 2}, "failures": failures}]
    assert summary(after)["found"] == failures


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no line of a campaign"),
        ('{"dialect": "vllm-compat", "first_seed": 0, "next_seed": 100}', "is of vllm-compat, not of strict"),
        ('{"dialect": "strict", "first_seed": 100, "next_seed": 200}', "begins at seed 100"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "walks.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(CampaignError, match=why):
        lines_of(file, "strict")
    with pytest.raises(SystemExit):
        main([str(file)])
