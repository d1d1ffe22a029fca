"""[serve] traces: what it may be, and what happens without the extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.load import load
from pdflow_runtime.observe.spans import endpoint_of, spans_of
from tests.runtime.support.served import ROOT, running

REFERENCE = ROOT / "examples/reference.toml"


def test_traces_are_off_by_default() -> None:
    assert spans_of(load(REFERENCE), "router", follows=False) is None


def test_without_the_extra_the_key_says_what_to_install(tmp_path: Path) -> None:
    missing = running("import sys\nsys.modules['opentelemetry.sdk'] = None\n", tmp_path)
    command = [sys.executable, "-m", "pdflow", "serve", str(REFERENCE), "--port", "0", "--set"]
    result = subprocess.run(
        [*command, f"serve.traces={tmp_path}/spans.jsonl"],
        env={**os.environ, **missing},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "serve.traces needs the OpenTelemetry SDK: pip install 'pdflow[otel]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("target", ["ftp://host/x", "http://", "https://name:password@host", "http://host?x"])
def test_a_url_that_is_no_collector(target: str) -> None:
    with pytest.raises(ScenarioError, match=r"serve\.traces"):
        load(REFERENCE, overrides=[f"serve.traces={target}"])


@pytest.mark.parametrize("target", ["spans.jsonl", "/var/log/spans", "http://127.0.0.1:4318", "https://host/v1/traces"])
def test_files_and_collectors(target: str) -> None:
    assert load(REFERENCE, overrides=[f"serve.traces={target}"]).serve.traces == target


def test_the_path_of_otlp_is_added_to_a_url_without_one() -> None:
    assert endpoint_of("http://host:4318") == "http://host:4318/v1/traces"
    assert endpoint_of("http://host:4318/") == "http://host:4318/v1/traces"
    assert endpoint_of("http://host:4318/otlp/v1/traces") == "http://host:4318/otlp/v1/traces"
