"""docs/wire.md is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.protocol.wire.formats import regenerated

PAGE = Path(__file__).resolve().parents[3] / "docs" / "wire.md"


def test_the_tables_of_the_page_are_generated_from_the_code() -> None:
    page = PAGE.read_text()
    assert regenerated(page) == page, "docs/wire.md is out of date: its last lines say how to write it anew"


def test_a_page_without_the_marks_is_no_page() -> None:
    with pytest.raises(ValueError, match="strict"):
        regenerated("# Nothing")
