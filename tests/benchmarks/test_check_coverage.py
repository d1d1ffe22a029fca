"""The page of branches that the checker takes: what was measured comes back, and each branch has its reason."""

from __future__ import annotations

from pathlib import Path

from benchmarks.check_coverage import Branch, FileCoverage, load, page, saved

CODEC = Branch("pdflow/protocol/wire/strict.py", "decode_frame", 7, "if len(data) < 5:", "return problem")
NEW = Branch("pdflow/protocol/peers.py", "Peers.wonder", 3, "if a | b:", "end")
FOUND = [FileCoverage("pdflow/protocol/wire/strict.py", 10, (CODEC,)), FileCoverage("pdflow/protocol/peers.py", 4, ())]


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(saved(FOUND))
    assert load(file) == FOUND


def test_each_branch_has_its_reason_or_is_listed() -> None:
    text = page(FOUND, 6_400)
    assert "13 of 14 are taken" in " ".join(text.split())
    assert "**The codecs of messages** (1 branch)." in " ".join(text.split())
    assert "Not explained" not in text
    text = page([*FOUND, FileCoverage("pdflow/protocol/peers.py", 4, (NEW,))], 6_400)
    assert "## Not explained yet (1 branch)" in text
    assert "| Peers.wonder (peers.py) | `if a \\| b:` | `end` |" in text
    assert max(map(len, text.splitlines())) <= 140
