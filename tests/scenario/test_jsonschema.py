"""The JSON Schema accepts what the loader accepts, and refuses what a single key has wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pdflow.scenario.schema.jsonschema import schema_json

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "examples/reference.toml").read_text()
VALIDATOR = Draft202012Validator(schema_json())


def errors(document: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(document)]


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(schema_json())


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda file: file.name)
def test_the_examples_satisfy_it(file: Path) -> None:
    assert errors(tomllib.loads(file.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("requests = 10000", "requests = 0"),
        ("requests = 10000", 'requests = "many"'),
        ('"poisson"', '"poison"'),
        ("rate_rps = 8.0", "rate_rps = -8.0"),
        ("rate_rps = 8.0", "rate = 8.0"),
        ("low = 512", "low = 0"),
        ('"llama-3.1-8b"', '"llama-3-8b"'),
        ('gpu = "h100-sxm"', 'gpu = "h1000"'),
        ('gpu = "h100-sxm"', "gpu = { ec = 0.5 }"),
        ("tp = 1", "tp = true"),
        ('role = "prefill"', 'rolle = "prefill"'),
        ('"rdma-400g"', '"rdma"'),
        ("[slo]", "[sol]"),
        ('"round-robin"', '"random"'),
    ],
)
def test_wrong_documents_do_not(old: str, new: str) -> None:
    assert old in REFERENCE
    assert errors(tomllib.loads(REFERENCE.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('gpu = "h100-sxm"', 'gpu = { preset = "h100-sxm", ec = 0.5 }'),
        ('preset = "llama-3.1-8b"', 'preset = "llama-3.1-8b"\nkv_dtype = "fp8"'),
        ('preset = "rdma-400g"', 'preset = "ideal"\nlinks = [{ name = "a", bandwidth_bytes_per_s = inf }]'),
        ("input_tokens = {", "input_tokens = 5 # {"),
        ("tp = 1", 'cost = { model = "constant", prefill_s = 0.1 }'),
    ],
)
def test_other_sound_documents_do(old: str, new: str) -> None:
    assert old in REFERENCE
    assert errors(tomllib.loads(REFERENCE.replace(old, new, 1))) == []


def test_an_empty_document_does_not() -> None:
    assert len(errors({})) == 3


def test_a_model_is_in_its_table_or_in_serve_model() -> None:
    document = tomllib.loads(REFERENCE)
    served = {"serve": {"model": "folder"}}
    model = document.pop("model")
    assert errors(document)
    assert errors(document | {"model": {"name": "mine"}})
    for sound in (served, served | {"model": {"name": "mine"}}, served | {"model": model}, {"model": model}):
        assert errors(document | sound) == []
