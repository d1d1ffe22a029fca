"""The secret that a cluster on one host makes for itself, and the Host headers that it accepts."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import Headers, HttpRequest
from pdflow_runtime.security.host_header import HostCheck
from pdflow_runtime.security.local_secret import (
    new_secret,
    operators_file,
    operators_secret,
    written_for_operators,
)
from pdflow_runtime.security.secret import LOCAL_VARIABLE, Secret, secret_beyond_loopback
from pdflow_runtime.security.signed import Gate, Signer, operators_signer
from tests.runtime.support.live_pair import cluster
from tests.runtime.support.served import ROOT, Served, served

REFERENCE = ROOT / "examples/reference.toml"
TEXT = "a secret of one cluster on one host"


def request(*headers: tuple[bytes, bytes], path: str = "/stop") -> HttpRequest:
    return HttpRequest("POST", path, "", headers, b"{}", True, True)


def refusal(check: HostCheck | Gate, asked: HttpRequest) -> str:
    try:
        check.check(asked)
    except OpenAIError as error:
        return f"{error.status} {error}"
    return ""


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "localhost",
        "LOCALHOST:8000",
        "localhost.:1",
        "[::1]:8000",
        "[::1]",
        "10.1.2.3",
        "router.local:9",
    ],
)
def test_addresses_localhost_and_listed_names_are_accepted(host: str) -> None:
    check = HostCheck(["Router.local"])
    for _ in range(2):
        assert refusal(check, request((b"host", host.encode()))) == ""


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "0x7f000001"],
)
def test_other_names_are_refused_in_words(host: str) -> None:
    asked = request((b"host", host.encode()))
    assert "prevents DNS rebinding" in refusal(HostCheck(), asked)
    assert refusal(Gate(None, "decode-0"), asked).startswith("403 the Host header")


def test_components_of_one_host_send_a_token_that_only_one_incarnation_accepts() -> None:
    secret = Secret(TEXT.encode(), local=True)
    signer = Signer(secret)
    token = signer.sign("decode-0", "POST", "/stop", b"{}", incarnation=7)
    assert TEXT.encode() not in token[0][1]
    gate = Gate(secret, "decode-0", incarnation=7)
    for _ in range(2):
        assert refusal(gate, request(*token)) == "", "the same each time: nobody else can read it on this host"
    assert "401" in refusal(Gate(secret, "decode-1", incarnation=7), request(*token))
    later = Gate(secret, "decode-0", incarnation=8)
    assert "401" in refusal(later, request(*token)), "a process that took the port of incarnation 7 may have it"
    assert refusal(later, request(*signer.sign("decode-0", "POST", "/stop", b"{}", incarnation=8))) == ""
    assert "401" in refusal(Gate(Secret(TEXT.encode()), "decode-0", incarnation=7), request(*token)), (
        "between hosts it is no signature"
    )
    assert "curl -H @FILE" in refusal(gate, request())
    for headers in (
        ((b"authorization", b"Bearer " + TEXT.encode()),),
        Signer(Secret(TEXT.encode())).sign("decode-0", "POST", "/stop", b"{}"),
    ):
        assert refusal(gate, request(*headers)) == ""


def test_without_its_incarnation_a_receiver_gets_a_signature_that_counts_once() -> None:
    secret = Secret(TEXT.encode(), local=True)
    signed = Signer(secret).sign("store-0", "POST", "/stop", b"{}")
    gate = Gate(secret, "store-0", incarnation=7)
    assert refusal(gate, request(*signed)) == ""
    assert "repetition" in refusal(gate, request(*signed))


def test_figures_are_read_without_the_local_secret_but_not_by_pages() -> None:
    gate = Gate(Secret(TEXT.encode(), local=True), "decode-0")
    gate.check_reader(request())
    for header in ((b"origin", b"http://evil.example"), (b"host", b"evil.example")):
        with pytest.raises(OpenAIError):
            gate.check_reader(request(header))
    with pytest.raises(OpenAIError):
        Gate(Secret(TEXT.encode()), "decode-0").check_reader(request())


def test_operators_read_the_secret_from_a_file_that_others_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    for variable, folder in (("XDG_CACHE_HOME", "pdflow/run"), ("XDG_RUNTIME_DIR", "pdflow")):
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setenv(variable, str(tmp_path))
        text, path = new_secret(), operators_file("127.0.0.1", 8000)
        assert path == tmp_path / folder / "router-8000.header"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("what a cluster that was killed left, which all can read")
        path.chmod(0o666)
        with written_for_operators("127.0.0.1", 8000, text) as written:
            assert written == path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            found = operators_secret("127.0.0.1", 8000)
            assert found is not None
            assert found.is_text(text.encode())
            signed = operators_signer("127.0.0.1", 8000).sign("router", "POST", "/stop", b"{}")
            assert refusal(Gate(Secret(text.encode(), local=True), "router"), request(*signed)) == ""
            assert operators_signer("10.0.0.1", 8000).sign("router", "POST", "/stop", b"") == (), "another host's"
        assert not path.exists()
        assert operators_secret("127.0.0.1", 8000) is None


def test_clusters_at_several_addresses_of_a_host_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    texts = {host: new_secret() for host in ("127.0.0.1", "127.0.0.2", "::1")}
    with ExitStack() as stack:
        for host, text in texts.items():
            stack.enter_context(written_for_operators(host, 8000, text))
        for host, text in texts.items():
            found = operators_secret(host, 8000)
            assert found is not None
            assert found.is_text(text.encode())
        assert operators_file("localhost", 8000) == operators_file("127.0.0.1", 8000)
    assert not [*tmp_path.glob("pdflow/*")]


def test_the_file_of_a_cluster_that_was_killed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    writer = (
        "import os\nfrom pdflow_runtime.security.local_secret import written_for_operators\n"
        "with written_for_operators('127.0.0.1', 8000, 'a secret'):\n    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", writer], cwd=ROOT).returncode == 9
    assert operators_file("127.0.0.1", 8000).read_bytes().endswith(b"a secret\n")
    assert operators_secret("127.0.0.1", 8000) is None
    assert operators_signer("127.0.0.1", 8000).sign("router", "GET", "/admin/state", b"") == ()


def test_a_secret_of_the_scenario_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_VARIABLE, TEXT)
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    found = secret_beyond_loopback(cluster(), "engine_host")
    assert found is not None
    assert found.local
    monkeypatch.setenv("PDFLOW_SECRET", "that of several hosts")
    found = secret_beyond_loopback(cluster(), "engine_host")
    assert found is not None
    assert not found.local


@pytest.mark.slow
@pytest.mark.trio
async def test_a_cluster_of_one_host_asks_for_its_own_secret(tmp_path: Path) -> None:
    small = ("pool.prefill.replicas=1", "pool.decode.replicas=1", "serve.host_names=['router.example']")
    none: Headers = ()
    with served(tmp_path, REFERENCE, *small) as one:
        path = operators_file(one.host, one.port)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_bytes().split()[-1]
        for name in ("prefill-0", "pdflow_runtime.router.front"):
            assert text not in Path(f"/proc/{one.pid_of(name)}/cmdline").read_bytes()
        assert text.decode() not in one.log.read_text()

        for method, asked in (("GET", "/admin/state"), ("POST", "/admin/engines/prefill-0/drain")):
            assert (await one.exchange(method, asked, b"", none))[0] == 401
            assert (await one.exchange(method, asked, b"", ((b"authorization", b"Bearer " + text),)))[0] == 200
        assert (await one.exchange("POST", "/admin/engines/prefill-0/resume"))[0] == 200
        (port,) = re.findall(r"component=decode-0 .*HTTP on [\d.]+:(\d+)", one.log.read_text())
        engine = Served(one.process, f"http://127.0.0.1:{port}", one.log)
        for method, asked, expected in (
            ("POST", "/stop", 401),
            ("GET", "/state", 401),
            ("POST", "/v1/completions", 401),
            ("GET", "/metrics", 200),
            ("GET", "/health", 200),
        ):
            assert (await engine.exchange(method, asked, b"{}", none))[0] == expected, asked
        assert (await one.ask(prompt=[5, 6, 7], max_tokens=2)).status == 200

        def curl(host: str, asked: str) -> int:
            command = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "-H", f"@{path}", "-H", f"Host: {host}"]
            return int(subprocess.check_output([*command, f"http://127.0.0.1:{one.port}{asked}"]))

        for asked in ("/admin/state", "/v1/models", "/metrics"):
            assert curl("evil.example", asked) == 403
            assert curl("router.example", asked) == 200
        top = subprocess.run(
            [sys.executable, "-m", "pdflow", "top", f"localhost:{one.port}", "--once"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert "decode-0" in top.stdout, top.stderr
    assert not path.exists()
