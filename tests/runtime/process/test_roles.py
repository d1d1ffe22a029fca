"""Parts that are started one by one, as on several hosts: they find each other, whoever comes first, falls silent, dies
or begins anew; and nobody takes part who does not know the secret. Real processes on loopback, synthetic engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio
import trustme
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import Headers
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Signer
from pdflow_runtime.security.tls import KEYS
from tests.runtime.support.certificates import certify
from tests.runtime.support.served import ROOT, served

pytestmark = pytest.mark.slow

REFERENCE = ROOT / "examples/reference.toml"
SECRET = "what all parts of this cluster know"


class ComponentProcesses:
    """Processes by their names, each with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tls: list[str] = []
        with closing(listen("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)

    def certify(self) -> None:
        """From now on, parts speak TLS."""
        certify(self.folder, trustme.CA())
        self.tls = [f"serve.{key}={self.folder / key}" for key in KEYS]

    def start(self, name: str, *overrides: str, secret: str | None = "secret", port: int | None = None) -> None:
        role = name.rpartition("-")[0] or name
        settings = [
            "pool.prefill.replicas=1",
            "pool.decode.replicas=1",
            "serve.transport=tcp",
            "router.heartbeat_s=0.3",
            "router.silent_after_s=2",
            "router.on_failure=retry",
            *self.tls,
            *([] if secret is None else [f"serve.secret_file={self.folder / secret}"]),
            *overrides,
        ]
        command = [sys.executable, "-m", "pdflow", "serve", str(REFERENCE), "--port", str(port or self.port)]
        command += [
            "--role",
            role,
            *([] if role == "router" else ["--name", name]),
            *(arg for override in settings for arg in ("--set", override)),
        ]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        await self.ended(name)

    async def ended(self, name: str) -> int:
        with trio.fail_after(60):
            while (code := self.processes[name].poll()) is None:
                await trio.sleep(0.02)
        return code

    async def exchange(
        self, method: str, path: str, body: bytes = b"", headers: Headers = (), port: int | None = None
    ) -> tuple[int, bytes]:
        """503 where nobody answers."""
        client = HttpClient()
        try:
            async with client.request(method, "127.0.0.1", port or self.port, path, headers, body) as response:
                return response.status, await response.read()
        except UpstreamError:
            return 503, b""
        finally:
            client.close()

    async def admin(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return await self.exchange(
            method, path, body, Signer(Secret(SECRET.encode())).sign("router", method, path, body)
        )

    async def healthy(self, expected: bool = True) -> None:
        """Until /health says so."""
        with trio.fail_after(60):
            while ((await self.exchange("GET", "/health"))[0] == 200) is not expected:
                await trio.sleep(0.02)

    async def answers(self) -> None:
        """To a request, in the end: engines of a busy machine may be late with a report."""
        body = msgspec.json.encode({"prompt": list(range(5, 105)), "max_tokens": 4})
        with trio.fail_after(60):
            while (answer := await self.exchange("POST", "/v1/completions", body))[0] != 200:
                assert answer[0] in (502, 503), (answer, self.logs())
                await trio.sleep(0.1)
        assert msgspec.json.decode(answer[1])["usage"]["completion_tokens"] == 4


@pytest.fixture
def components(tmp_path: Path) -> Iterator[ComponentProcesses]:
    made = ComponentProcesses(tmp_path)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.trio
async def test_components_find_each_other_and_recover(components: ComponentProcesses) -> None:
    components.certify()
    for name in ("decode-0", "prefill-0", "router"):
        components.start(name)
    await components.healthy()
    await components.answers()

    components.signal("decode-0", signal.SIGSTOP)
    await components.healthy(False)
    components.signal("decode-0", signal.SIGCONT)
    await components.healthy()
    await components.answers()

    await components.kill("router")
    components.start("router")
    await components.healthy()
    await components.answers()

    await components.kill("prefill-0")
    await components.healthy(False)
    components.start("prefill-0")
    await components.healthy()
    await components.answers()

    components.signal("decode-0", signal.SIGTERM)
    assert await components.ended("decode-0") == 0
    # On a busy machine its last report may be given up; then the router misses the next one.
    await components.healthy(False)
    log = components.log("router").read_text()
    assert "decode-0 is down: removed from routing" in log
    assert "Traceback" not in components.logs()


@pytest.mark.trio
async def test_a_process_without_the_secret_is_refused(components: ComponentProcesses) -> None:
    (components.folder / "another").write_text("what parts of another cluster know")
    (components.folder / "another").chmod(0o600)
    components.start("router")
    components.start("decode-0", secret="another")
    components.start("prefill-0", secret=None)
    reasons = {"decode-0": "wrong signature", "prefill-0": "authentication required"}
    with trio.fail_after(60):
        while not all(why in components.log(name).read_text() for name, why in reasons.items()):
            await trio.sleep(0.05)
    await components.healthy(False)
    assert (await components.exchange("GET", "/admin/state"))[0] == 401
    bearer = ((b"authorization", b"Bearer " + SECRET.encode()),)
    for answer in (
        await components.admin("GET", "/admin/state"),
        await components.exchange("GET", "/admin/state", b"", bearer),
    ):
        assert answer[0] == 200
        assert msgspec.json.decode(answer[1])["engines"] == {"prefill-0": None, "decode-0": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "decode"], "--name is missing; known: decode-0, decode-1"),
        (
            ["--role", "decode", "--name", "prefill-0"],
            "--name prefill-0: no component of role decode has this name; known: decode-0",
        ),
        (["--role", "prefill", "--name", "prefill-9"], "known: prefill-0, prefill-1, prefill-2, prefill-3"),
        (["--role", "scheduler"], "'scheduler' is not one of 'router', 'prefill', 'decode'"),
        (["--name", "decode-0"], "--name and --host require --role"),
        (
            ["--role", "router", "--host", "192.0.2.1"],
            "serve.host: is 192.0.2.1: beyond loopback a cluster secret is required",
        ),
        (["--role", "decode", "--name", "decode-0", "--host", "192.0.2.1"], "serve.engine_host: is 192.0.2.1: beyond"),
        (["--role", "decode", "--name", "decode-0", "--host", "0.0.0.0"], "0.0.0.0 is not an address of one host"),
        (["--role", "decode", "--name", "decode-0", "--set", "serve.router=here"], "is here, expected HOST:PORT"),
        (["--role", "router", "--port", "{busy}"], "127.0.0.1:{busy} cannot be listened on: Address already in use"),
        (["--role", "router", "--set", "serve.secret_file=nowhere"], "nowhere cannot be read: No such file"),
        (["--role", "router", "--set", "serve.secret_file={open}"], "is readable by other users: chmod 600"),
        (["--role", "router", "--set", "serve.secret_file={short}"], "has 5 bytes, expected 16 to 4,096"),
        (["--set", "serve.engine_host=192.0.2.1"], "without --role all engines run on this host"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode, text in (("open", 0o644, SECRET), ("short", 0o600, "short")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    monkeypatch.delenv("PDFLOW_SECRET", raising=False)
    if "0.0.0.0" in arguments:
        monkeypatch.setenv("PDFLOW_SECRET", SECRET)
    for variable in ("OMP_NUM_THREADS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(variable, "")
    for starts in ("component", "one_host"):
        monkeypatch.setattr(f"pdflow_runtime.process.{starts}.log_to_stderr", lambda who: None)
    with closing(listen("127.0.0.1", 0)) as taken:
        paths = {"busy": taken.getsockname()[1], "open": tmp_path / "open", "short": tmp_path / "short"}
        ran = CliRunner().invoke(cli, ["serve", str(REFERENCE), *(argument.format(**paths) for argument in arguments)])
    lines = [line for line in ran.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert ran.exit_code == 2, ran.stderr
    assert len(lines) == 1, ran.stderr
    assert message.format(**paths) in lines[0]


@pytest.mark.trio
async def test_engines_are_added_and_removed_while_a_cluster_serves(tmp_path: Path) -> None:
    small = ("pool.prefill.replicas=1", "pool.decode.replicas=1", "serve.spare_engines=1")
    with served(tmp_path, REFERENCE, *small) as cluster:

        async def engines() -> dict[str, bool]:
            """Those that there ought to be, and whether they answer."""
            body = msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])
            return {name: state is not None for name, state in body["engines"].items()}

        async def until(expected: dict[str, bool]) -> None:
            with trio.fail_after(60):
                while await engines() != expected:
                    await trio.sleep(0.02)

        async def asks() -> None:
            answer = await cluster.ask(prompt=list(range(5, 105)), max_tokens=4)
            assert answer.status == 200, answer.body

        assert await engines() == {"prefill-0": True, "decode-0": True}
        assert await cluster.exchange("POST", "/admin/engines", b'{"pool": "decode"}') == (
            202,
            b'{"engine":"decode-1"}',
        )
        await until({"prefill-0": True, "decode-0": True, "decode-1": True})
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(asks)
            await trio.sleep(0.01)
            assert (await cluster.exchange("DELETE", "/admin/engines/decode-0"))[0] == 202
        await until({"prefill-0": True, "decode-1": True})
        await asks()
        assert "decode-0 exited, as ordered; not restarted" in cluster.log.read_text()
        assert await cluster.exchange("POST", "/admin/engines", b'{"pool": "decode"}') == (
            202,
            b'{"engine":"decode-0"}',
        )
        await until({"prefill-0": True, "decode-0": True, "decode-1": True})
        for _ in range(2):
            await asks()
        assert msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])["drained"] == []
        os.kill(cluster.pid_of("decode-1"), signal.SIGTERM)
        await until({"prefill-0": True, "decode-0": True})
        assert (await cluster.exchange("POST", "/admin/engines", b'{"pool": "decode"}'))[1] == b'{"engine":"decode-1"}'
        await until({"prefill-0": True, "decode-0": True, "decode-1": True})
    assert "Traceback" not in cluster.log.read_text()
    assert cluster.process.returncode == 0


@pytest.mark.trio
async def test_engines_of_one_host_send_heartbeats_if_the_scenario_has_them(tmp_path: Path) -> None:
    """One that stands still is told from one that is idle, and one that dies is not waited for."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    small = ("pool.prefill.replicas=1", "pool.decode.replicas=1", f"serve.secret_file={tmp_path / 'secret'}")
    with served(tmp_path, REFERENCE, *small, "router.heartbeat_s=0.5", "router.silent_after_s=2") as cluster:

        async def healthy(expected: bool) -> None:
            with trio.fail_after(60):
                while ((await cluster.exchange("GET", "/health"))[0] == 200) is not expected:
                    await trio.sleep(0.02)

        await healthy(True)
        os.kill(cluster.pid_of("decode-0"), signal.SIGSTOP)
        await healthy(False)
        os.kill(cluster.pid_of("decode-0"), signal.SIGCONT)
        await healthy(True)
        os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
        await healthy(False)
        await healthy(True)
        with trio.fail_after(60):
            while (await cluster.ask(prompt=list(range(5, 105)), max_tokens=4)).status != 200:
                await trio.sleep(0.1)
        assert (await cluster.exchange("GET", "/admin/state"))[0] == 401
        top = subprocess.run(
            [sys.executable, "-m", "pdflow", "top", f"127.0.0.1:{cluster.port}", "--once"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PDFLOW_SECRET": SECRET},
        )
        assert "decode-0" in top.stdout, top.stderr
    assert "Traceback" not in cluster.log.read_text()
