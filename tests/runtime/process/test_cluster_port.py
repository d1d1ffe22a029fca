"""Clusters with serve.cluster_port: engines report and operators order there, with certificates and signatures, and the
port for clients refuses both. Real processes, synthetic engines."""

from __future__ import annotations

import os
import re
import shlex
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trustme
from click.testing import CliRunner, Result

from pdflow.cli import cli
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.target import server_of
from pdflow_runtime.calibrate.command import edited_of, notes_source
from pdflow_runtime.calibrate.probe import Probe
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON, Headers
from pdflow_runtime.process.router_sockets import cluster_limits_of, limits_of
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Signer
from pdflow_runtime.security.tls import KEYS, operators_client
from tests.runtime.http.world import response_to
from tests.runtime.process.test_roles import REFERENCE, SECRET, ComponentProcesses
from tests.runtime.process.test_two_routers import free_port
from tests.runtime.support.certificates import certify
from tests.runtime.support.live_pair import cluster
from tests.runtime.support.served import served

pytestmark = pytest.mark.slow

BEARER: Headers = ((b"authorization", b"Bearer " + SECRET.encode()),)
DRAIN = "/admin/engines/prefill-0/drain"
SMALL = ("pool.prefill.replicas=1", "pool.decode.replicas=1")
PROMPT = list(range(5, 105))


def certified(folder: Path, authority: trustme.CA) -> tuple[Path, ...]:
    """The files of a certificate of that authority, in the order of KEYS."""
    folder.mkdir(exist_ok=True)
    certify(folder, authority, "127.0.0.1")
    return tuple(folder / key for key in KEYS)


def named(files: tuple[Path, ...]) -> list[str]:
    return [f"serve.{key}={file}" for key, file in zip(KEYS, files, strict=True)]


def failed_reports(logs: str) -> list[str]:
    """Why reports failed, but for those that a busy machine answered too late."""
    reasons = re.findall(r"report to the router at .* failed: (.*); retrying", logs)
    return [reason for reason in reasons if not reason.startswith("no answer within")]


def top(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["top", "--once", *arguments], env={"PDFLOW_SECRET": SECRET})


class Guarded(ComponentProcesses):
    """A cluster of components with a cluster port; `files` are those of their certificate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.authority = trustme.CA()
        self.files = certified(folder / "certificates", self.authority)
        self.inside = free_port()
        self.tls = [*named(self.files), f"serve.cluster_port={self.inside}", f"serve.router=127.0.0.1:{self.inside}"]
        self.operator = operators_client(*self.files)

    async def start_all(self, *overrides: str) -> None:
        """A router, a prefill and a decode engine, until all are there."""
        for name in ("decode-0", "prefill-0", "router"):
            self.start(name, *overrides)
        await self.healthy()

    async def registered(self, *names: str) -> None:
        """Until these have the router's answer to a report; the router may say before that they are there."""
        with trio.fail_after(60):
            for name in names:
                while f"registered with the router at 127.0.0.1:{self.inside}" not in self.log(name).read_text():
                    await trio.sleep(0.02)

    async def ask(
        self, client: HttpClient, method: str, path: str, headers: Headers = (), body: bytes = b""
    ) -> tuple[int, bytes]:
        """The answer at the cluster port, on a new connection. UpstreamError without one."""
        client.forget("127.0.0.1", self.inside)
        async with client.request(method, "127.0.0.1", self.inside, path, (*headers, JSON), body) as response:
            return response.status, await response.read()

    async def state(self) -> dict[str, object]:
        status, body = await self.ask(self.operator, "GET", "/admin/state", BEARER)
        assert status == 200, body
        found: dict[str, object] = msgspec.json.decode(body)
        return found

    def signed(self, method: str, path: str) -> Headers:
        return Signer(Secret(SECRET.encode())).sign("router", method, path, b"")


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[Guarded]:
    components = Guarded(folder)
    try:
        yield components
    except trio.TooSlowError:
        raise AssertionError(components.logs()) from None
    finally:
        components.operator.close()
        for process in components.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.mark.trio
async def test_operators_need_a_certificate_and_the_secret_and_come_to_the_cluster_port(tmp_path: Path) -> None:
    async with guarded(tmp_path) as components:
        await components.start_all()
        await components.answers()

        assert (await components.ask(components.operator, "POST", DRAIN))[0] == 401, "a certificate orders nothing"
        assert (await components.state())["drained"] == []
        assert (await components.ask(components.operator, "POST", DRAIN, components.signed("POST", DRAIN)))[0] == 200
        assert (await components.state())["drained"] == ["prefill-0"]
        await components.healthy(False)
        resume = DRAIN.replace("drain", "resume")
        assert (await components.ask(components.operator, "POST", resume, BEARER))[0] == 200
        await components.healthy()

        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        components.authority.configure_trust(nobody)
        other = trustme.CA()
        files = certified(tmp_path / "other", other)
        components.authority.cert_pem.write_to_path(files[2])
        for client, reason in (
            (HttpClient(tls=nobody), "certificate required"),
            (operators_client(*files), "unknown ca"),
        ):
            with pytest.raises(UpstreamError, match=f"the server refuses this side's certificate: {reason}"):
                await components.ask(client, "POST", DRAIN, BEARER)
            client.close()
        head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %b\r\n"
        plain = await response_to(components.inside, head % (DRAIN.encode(), SECRET.encode()) + b"\r\n")
        assert plain.startswith(b"HTTP/1.1 401 ")
        assert b"clients must present a certificate of the cluster's authority" in plain
        assert (await components.state())["drained"] == []
        assert "rejected a connection from 127.0.0.1" in components.log("router").read_text()

        for headers in (BEARER, components.signed("POST", DRAIN)):
            status, body = await components.exchange("POST", DRAIN, headers=headers)
            assert status == 403
            assert f"answered at the cluster port {components.inside} only".encode() in body
        assert (await components.exchange("GET", "/admin/state"))[0] == 403

        for method, path, headers in (
            ("GET", "/health", ()),
            ("GET", "/metrics", ()),
            ("GET", "/metrics/cluster", BEARER),
            ("GET", "/v1/models", ()),
            ("POST", "/v1/completions", ()),
        ):
            body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 2}) if method == "POST" else b""
            status, answer = await components.ask(components.operator, method, path, headers, body)
            assert status == 200, (path, answer)
        assert "Traceback" not in components.logs()


@pytest.mark.trio
async def test_top_shows_a_cluster_at_its_cluster_port(tmp_path: Path) -> None:
    async with guarded(tmp_path) as components:
        await components.start_all()
        cert, key, authority = map(str, components.files)
        files = ("--cert", cert, "--key", key, "--ca", authority)
        for at in (f"https://127.0.0.1:{components.inside}", f"127.0.0.1:{components.inside}"):
            shown = await trio.to_thread.run_sync(top, at, *files)
            assert re.search(r"prefill-0 .*\n.*decode-0 ", shown.stdout), shown.stderr
        for arguments, problem in (
            (
                (f"127.0.0.1:{components.port}",),
                f"HTTP 403: /admin is answered at the cluster port {components.inside}",
            ),
            ((f"127.0.0.1:{components.inside}",), "HTTP 401: this port uses TLS, and clients must present a certif"),
            ((f"https://127.0.0.1:{components.inside}",), "certificate verify failed"),
            ((f"127.0.0.1:{components.inside}", *files[:4]), "--cert, --key and --ca belong together"),
            ((f"http://127.0.0.1:{components.inside}", *files), "a URL that begins with https://"),
            ((f"127.0.0.1:{components.port}", *files), "the server does not use TLS"),
            ((f"127.0.0.1:{components.inside}", *files[:3], cert, *files[4:]), f"{cert}, {cert}, {authority}: "),
        ):
            refused = await trio.to_thread.run_sync(top, *arguments)
            assert refused.exit_code == 2
            assert problem in refused.stderr, refused.stderr


@pytest.mark.trio
async def test_only_engines_with_a_certificate_of_the_authority_are_registered(tmp_path: Path) -> None:
    async with guarded(tmp_path) as components:
        other = named(certified(tmp_path / "other", trustme.CA()))
        components.start("router")
        components.start("decode-0", "router.heartbeat_s=0.3")
        components.start("prefill-0", *other)
        reason = r"report to the router at .* failed: no TLS with .*: certificate verify failed.*; serve.tls_ca names"
        with trio.fail_after(60):
            while not re.search(reason, components.log("prefill-0").read_text()):
                await trio.sleep(0.05)
            while (await components.state())["engines"].get("decode-0") is None:  # type: ignore[attr-defined]
                await trio.sleep(0.05)
        assert "serve.router must name the router's serve.cluster_port" in components.log("prefill-0").read_text()
        await components.healthy(False)
        assert (await components.state())["engines"]["prefill-0"] is None  # type: ignore[index]
        assert "prefill-0 is up" not in components.log("router").read_text()
        await components.registered("decode-0")

        # An engine that knows the secret, and reports without TLS, or to the port for clients.
        await components.kill("prefill-0")
        plain = [setting for setting in components.tls if "cluster_port" not in setting and "router" not in setting]
        components.tls, before = plain, components.tls
        for port, problem in (
            (components.inside, "clients must present a certificate of the cluster's authority"),
            (components.port, f"/admin is answered at the cluster port {components.inside} only"),
        ):
            components.start("prefill-0", f"serve.router=127.0.0.1:{port}")
            with trio.fail_after(60):
                while problem not in components.log("prefill-0").read_text():
                    await trio.sleep(0.05)
            await components.kill("prefill-0")
        assert "prefill-0 is up" not in components.log("router").read_text()

        components.tls = before
        components.start("prefill-0")
        await components.healthy()
        await components.answers()


@pytest.mark.trio
async def test_store_nodes_report_there_too(tmp_path: Path) -> None:
    names = ("decode-0", "prefill-0", "router", "store-0")
    async with guarded(tmp_path) as components:
        for name in names:
            components.start(name, "transfer.method=kv-store", "router.on_failure=recompute")
        await components.healthy()
        await components.answers()
        await components.registered("decode-0", "prefill-0", "store-0")
        for name in names:
            components.signal(name, signal.SIGTERM)
        assert [await components.ended(name) for name in names] == [0, 0, 0, 0]
        assert "Traceback" not in components.logs()


@pytest.mark.trio
async def test_engines_stay_registered_while_half_open_connections_flood_the_cluster_port(tmp_path: Path) -> None:
    async with guarded(tmp_path) as components:
        await components.start_all("serve.connections=128")
        await components.registered("decode-0", "prefill-0")
        limits = cluster_limits_of(limits_of(cluster("serve.connections=128"), 1))
        assert limits.new_connections < limits.connections == 32
        before = failed_reports(components.logs())
        async with AsyncExitStack() as flood:
            with trio.move_on_after(4):  # twice silent_after_s
                while True:
                    await flood.enter_async_context(await trio.open_tcp_stream("127.0.0.1", components.inside))
                    await trio.sleep(0.02)
            assert (await components.exchange("GET", "/health"))[0] == 200
            with trio.fail_after(10):
                assert (await components.state())["silent"] == []
        assert failed_reports(components.logs()) == before


@pytest.mark.trio
async def test_a_drained_router_ends_the_answers_of_both_ports_and_accepts_no_more(tmp_path: Path) -> None:
    async with guarded(tmp_path) as components:
        await components.start_all()
        body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True})
        answers: list[tuple[int, bytes]] = []
        port = components.port

        async def ask(inside: bool) -> None:
            path = "/v1/completions"
            if inside:
                answers.append(await components.ask(components.operator, "POST", path, (), body))
            else:
                answers.append(await components.exchange("POST", path, body, port=port))

        async with trio.open_nursery() as nursery:
            for inside in (True, False):
                nursery.start_soon(ask, inside)
            open_requests: object = 0
            watcher = operators_client(*components.files)
            while open_requests != 2:
                status, state = await components.ask(watcher, "GET", "/admin/state", BEARER)
                assert (status, answers) == (200, []), "the answers must take longer than this"
                open_requests = msgspec.json.decode(state)["open"]
            watcher.close()
            components.signal("router", signal.SIGTERM)
        assert [status for status, _ in answers] == [200, 200], components.logs()
        assert await components.ended("router") == 0
        for closed in (components.port, components.inside):
            with pytest.raises(OSError, match="all attempts to connect"):
                await trio.open_tcp_stream("127.0.0.1", closed)


@pytest.mark.trio
async def test_one_host_reports_and_is_operated_at_the_cluster_port_also_after_a_restart_of_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    inside = free_port()
    files = certified(tmp_path / "certificates", trustme.CA())
    settings = (*SMALL, *named(files), f"serve.cluster_port={inside}", "router.heartbeat_s=0.5")
    with served(tmp_path, REFERENCE, *settings) as one:
        assert (await one.ask(prompt=PROMPT, max_tokens=3)).status == 200
        (command,) = re.findall(r"operators: (curl .*/admin/state)", one.log.read_text())
        assert f"https://127.0.0.1:{inside}/admin/state" in command

        def state() -> dict[str, Any]:
            done = subprocess.run(shlex.split(command), capture_output=True, timeout=30, check=False)
            found: dict[str, Any] = msgspec.json.decode(done.stdout or b"{}")
            return found

        def all_report() -> bool:
            found = state()
            return bool(found) and None not in found["engines"].values() and found["silent"] == []

        with trio.fail_after(60):
            while one.log.read_text().count(f"registered with the router at 127.0.0.1:{inside}") < 2:
                await trio.sleep(0.05)
            while not all_report():
                await trio.sleep(0.1)
        assert (await one.exchange("GET", "/admin/state"))[0] == 403
        asked = BenchOptions(host=one.host, port=one.port)
        notes = notes_source(edited_of(str(REFERENCE), settings).resolved, server_of(asked))
        assert notes is not None
        client = HttpClient()
        probe = Probe(client, server_of(asked), "", 0, notes)
        await probe.fetch()
        assert {page.node for page in probe.pages()} == {"router", "prefill-0", "decode-0"}
        client.close()
        notes.client.close()

        os.kill(one.pid_of("pdflow_runtime.router.front"), signal.SIGKILL)
        with trio.fail_after(60):
            while "the router is up again, with 2 engines" not in one.log.read_text():
                await trio.sleep(0.05)
        await trio.sleep(2)  # an engine that did not report would be silent after 0.9 s, and stay so
        with trio.fail_after(60):
            while not all_report():
                await trio.sleep(0.1)
        assert (await one.ask(prompt=PROMPT, max_tokens=3)).status == 200
    assert "Traceback" not in one.log.read_text()
    assert one.process.returncode == 0
