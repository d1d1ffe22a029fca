"""docs/kv-transfer-params.md is what the classes say. UPDATE_DOCS=1 writes it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdflow.methods.params.page import TABLES, regenerated
from pdflow.methods.params.parse import PARAMS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kv-transfer-params.md"


def test_the_tables_are_generated_from_the_classes() -> None:
    page = regenerated(PAGE.read_text(encoding="utf-8"))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, f"{PAGE} is old: UPDATE_DOCS=1 pytest {__file__}"


def test_every_method_has_its_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{method}`" in page for method in PARAMS)


@pytest.mark.parametrize("name", TABLES)
def test_a_page_without_a_mark_is_reported(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8").replace(f"<!-- /{name} -->", "")
    with pytest.raises(ValueError, match=f"marked {name}"):
        regenerated(page)
