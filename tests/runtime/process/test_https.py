"""A cluster whose clients use TLS and API keys: its engines report to it, it answers requests for several answers, and
commands talk to it."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON, Headers
from pdflow_runtime.tls_socket import client_context
from tests.runtime.http.test_tls import Authority
from tests.runtime.process.test_roles import ComponentProcesses, components
from tests.runtime.support.served import ROOT

__all__ = ["components"]

pytestmark = pytest.mark.slow
KEY = "k" * 32
BEARER: Headers = (JSON, (b"authorization", b"Bearer " + KEY.encode()))
BODIES = (
    {"prompt": [5, 6, 7], "max_tokens": 3},
    {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True},
    {"prompt": [5, 6, 7], "max_tokens": 3, "n": 2},
)


def commanded(folder: Path, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """As an operator or a client calls it, who trusts the authority."""
    trusting = {"SSL_CERT_FILE": str(folder / "ca.crt"), "OPENAI_API_KEY": key}
    command = [sys.executable, "-m", "pdflow", *arguments]
    return subprocess.run(
        command, env={**os.environ, **trusting}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.trio
async def test_components_that_are_started_one_by_one(
    components: ComponentProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "keys").write_text(f"team:{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    named = ("client_tls_cert", authority.cert), ("client_tls_key", authority.key), ("api_keys_file", tmp_path / "keys")
    settings = [f"serve.{key}={path}" for key, path in named]
    for name in ("router", "prefill-0", "decode-0"):
        components.start(name, *settings)
    context: ssl.SSLContext = client_context()
    authority.made.configure_trust(context)
    monkeypatch.setattr("tests.runtime.process.test_roles.HttpClient", lambda: HttpClient(tls=context))
    await components.healthy()
    for body in BODIES:
        status, answer = await components.exchange("POST", "/v1/completions", msgspec.json.encode(body), BEARER)
        assert status == 200, (answer, components.logs())
        if "n" in body:
            assert len(msgspec.json.decode(answer)["choices"]) == 2
    url = f"https://127.0.0.1:{components.port}"
    monkeypatch.setenv("PDFLOW_SECRET", (tmp_path / "secret").read_text())
    shown = commanded(tmp_path, "top", url, "--once")
    assert re.search(r"prefill-0 .*\n.*decode-0 ", shown.stdout), shown.stderr
    load = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4", "--quiet")
    ran = commanded(tmp_path, "bench", "--base-url", url, "--dataset-name", "random", *load)
    assert ran.returncode == 0, ran.stderr
    refused = commanded(tmp_path, "bench", "--base-url", url, "--dataset-name", "random", *load, key="x" * 32)
    assert refused.returncode != 0
    assert "401" in refused.stdout + refused.stderr
    assert KEY not in components.logs() + refused.stdout + refused.stderr
