"""`pdflow check methods`: what it says, and its exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from pdflow.cli import cli
from pdflow.methods.shipment import Piece, Shipment


def pdflow(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", "methods", *arguments], catch_exceptions=False)


def test_known_violations_are_found_and_reported() -> None:
    ran = pdflow("--only", "p2p-nccl-get")
    assert ran.exit_code == 0
    assert "2 of 2 as expected" in ran.stdout
    assert "p2p-nccl-get, as-published: a skipped layer" in ran.stdout
    assert "r0 decodes with None as token 0" in ran.stdout


def test_rows_for_json() -> None:
    rows = json.loads(pdflow("--only", "kv-store", "--json").stdout)["methods"]
    assert [(row["dialect"], list(row["findings"]), row["ok"]) for row in rows] == [
        ("strict", [], True),
        ("as-published", ["a salted key"], True),
    ]


@pytest.mark.parametrize(
    ("dialect", "rows"), [("strict", ["strict"]), ("vllm-stock", ["as-published"]), ("vllm-compat", [])]
)
def test_a_dialect_alone(dialect: str, rows: list[str]) -> None:
    reported = json.loads(pdflow("--only", "nixl-push", "--dialect", dialect, "--json").stdout)["methods"]
    assert [row["dialect"] for row in reported] == rows


def test_an_unexpected_violation_fails_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shipment, "lost", lambda self: self.landed(Piece(0, 0, 4)))
    ran = pdflow("--only", "mooncake-v1", "--dialect", "strict")
    assert ran.exit_code == 1
    assert "0 of 1 as expected" in ran.stdout


def test_a_budget_that_is_spent_is_no_pass() -> None:
    assert pdflow("--only", "nixl", "--budget", "0").exit_code == 3


def test_an_unknown_name_is_an_error() -> None:
    ran = pdflow("--only", "carrier-pigeon")
    assert ran.exit_code == 2
    assert "no method has 'carrier-pigeon' in its name" in ran.output
