"""The steps of docs/deploying.md for rolling restarts, as they stand there, against real processes under a steady load:
no request fails. `ssh ... systemctl restart` and `balancer` are programs of this test."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trustme

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.security.local_secret import operators_file
from pdflow_runtime.security.tls import KEYS
from tests.docs.pages import all_blocks
from tests.runtime.process.test_roles import SECRET
from tests.runtime.process.test_two_routers import TwoRouters, free_port
from tests.runtime.support.served import ROOT, Served, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq"),
]
PAGE = (ROOT / "docs/deploying.md").read_text()
BLOCKS = {block.title: block.text for block in all_blocks(PAGE) if block.title}
CLIENTS = 4
TOKENS = 40
HOST = "127.0.0.1"
SSH = """#!/bin/sh
# ssh HOST systemctl restart UNIT: the test restarts it, and removes the file.
[ "$2 $3" = "systemctl restart" ] || exit 64
echo "$1 $4" > {folder}/asked.new && mv {folder}/asked.new {folder}/asked
while [ -e {folder}/asked ]; do sleep 0.1; done
"""
BALANCER = """#!/bin/sh
# balancer add|remove URL: clients use the URLs in the file.
case "$1" in
  add) echo "$2" >> {folder}/routers ;;
  remove) grep -vxF "$2" {folder}/routers > {folder}/routers.new; mv {folder}/routers.new {folder}/routers ;;
  *) exit 64 ;;
esac
"""


class Load:
    """Clients that ask again and again, half of them for streams. Args: `ports` gives the routers in use."""

    def __init__(self, ports: Callable[[], list[int]]) -> None:
        self.ports = ports
        self.answered = 0
        self.failures: list[object] = []
        self._ended = False

    async def run(self, number: int) -> None:
        turn = 0
        while not self._ended:
            turn += 1
            ports = self.ports()
            fields = {"prompt": list(range(5, 60 + number)), "max_tokens": TOKENS, "ignore_eos": True}
            stream = number % 2 == 0
            body = msgspec.json.encode({**fields, "temperature": 0, "stream": stream, "return_token_ids": True})
            client = HttpClient(connect_s=30)
            try:
                at = HOST, ports[turn % len(ports)]
                async with client.request("POST", *at, "/v1/completions", (JSON,), body) as response:
                    answer = await response.read()
                self._check(response.status, answer, stream)
            except UpstreamError as error:
                self.failures.append(error)
            finally:
                client.close()

    def _check(self, status: int, answer: bytes, stream: bool) -> None:
        if stream:
            *events, done, _ = answer.split(b"\n\n")
            read = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events] if status == 200 else []
            tokens = [token for event in read for choice in event["choices"] for token in choice.get("token_ids") or ()]
            whole = done == b"data: [DONE]"
        else:
            tokens = msgspec.json.decode(answer)["choices"][0]["token_ids"] if status == 200 else []
            whole = True
        if (status, len(tokens), whole) != (200, TOKENS, True):
            self.failures.append((status, answer))
        self.answered += 1

    @asynccontextmanager
    async def steady(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self.run, number)
            yield
            self._ended = True

    async def more(self, requests: int) -> None:
        """Until so many more are answered."""
        target = self.answered + requests
        with trio.fail_after(60):
            while self.answered < target and not self.failures:
                await trio.sleep(0.05)


async def ran(block: str, folder: Path, **settings: str) -> None:
    """The commands of a block, with these settings in place of the page's."""
    environment = {**os.environ, **settings, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    with trio.fail_after(300):
        done = await trio.run_process(
            ["bash", "-c", BLOCKS[block]],
            cwd=folder,
            env=environment,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()


def settings_of(block: str) -> set[str]:
    return {line.partition("=")[0] for line in BLOCKS[block].splitlines() if "=" in line}


@pytest.fixture
def rolling(tmp_path: Path) -> Iterator[TwoRouters]:
    made = TwoRouters(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("ssh", SSH), ("balancer", BALANCER)):
        (programs / name).write_text(text.format(folder=tmp_path))
        (programs / name).chmod(0o755)
    (tmp_path / "header").write_text(f"authorization: Bearer {SECRET}\n")
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()


def with_cluster_ports(rolling: TwoRouters) -> dict[int, int]:
    """Give the cluster certificates, and curl the page's .curlrc for them; return each router's cluster port, by its
    port for clients."""
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(rolling.folder / "ca.crt")
    issued.cert_chain_pems[0].write_to_path(rolling.folder / "host.crt")
    issued.private_key_pem.write_to_path(rolling.folder / "host.key")
    (rolling.folder / ".curlrc").write_text(BLOCKS[".curlrc"].replace("/etc/pdflow", str(rolling.folder)))
    files = zip(KEYS, ("host.crt", "host.key", "ca.crt"), strict=True)
    rolling.tls = [f"serve.{key}={rolling.folder / file}" for key, file in files]
    return {rolling.port: free_port(), rolling.other: free_port()}


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.trio
async def test_components_of_several_hosts(rolling: TwoRouters, guarded: bool) -> None:
    folder, hosts = rolling.folder, {"host-a": rolling.port, "host-b": rolling.other}
    inside = with_cluster_ports(rolling) if guarded else {port: port for port in hosts.values()}
    urls = {port: f"http{'s' if guarded else ''}://{HOST}:{inside[port]}" for port in hosts.values()}
    more = ("pool.prefill.replicas=2", "pool.decode.replicas=2")
    engines = ("prefill-0", "prefill-1", "decode-0", "decode-1")

    def start(unit: str, host: str) -> None:
        port = hosts.get(host, rolling.port)
        routers = ", ".join(f"{HOST}:{at}" for at in inside.values())
        settings = (f"serve.router={routers}", *([f"serve.cluster_port={inside[port]}"] if guarded else []))
        if unit == "pdflow-router":
            rolling.start("router", *more, *settings, port=port)
            rolling.processes[host] = rolling.processes.pop("router")
        else:
            rolling.start(unit.partition("@")[2], *more, *settings)

    restarted = []

    async def restarts() -> None:
        while True:
            await trio.sleep(0.05)
            asked = folder / "asked"
            if asked.exists():
                host, unit = asked.read_text().split()
                name = unit.partition("@")[2] or host
                rolling.signal(name, signal.SIGTERM)
                assert await rolling.ended(name) == 0, rolling.logs()
                start(unit, host)
                restarted.append(name)
                asked.unlink()

    for host in hosts:
        start("pdflow-router", host)
    for engine in engines:
        start(f"pdflow-engine@{engine}", "elsewhere")
    await rolling.both_healthy()
    await rolling.answers()
    with trio.fail_after(60):
        while rolling.logs().count("registered with the router") < len(engines) * len(hosts):
            await trio.sleep(0.1)
    (folder / "routers").write_text("".join(f"{url}\n" for url in urls.values()))
    ports = {url: port for port, url in urls.items()}
    load = Load(lambda: [ports[url] for url in (folder / "routers").read_text().split()])
    assert settings_of("settings") == {"ROUTERS", "ENGINES"}
    settings = {
        "ROUTERS": " ".join(f"{host}={urls[port]}" for host, port in hosts.items()),
        "ENGINES": " ".join(f"elsewhere={engine}" for engine in engines),
        "CURL_HOME": str(folder),
    }
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restarts)
        async with load.steady():
            await load.more(CLIENTS)
            await ran("engines", folder, **settings)
            await load.more(CLIENTS)
            await ran("routers", folder, **settings)
            await load.more(CLIENTS)
        nursery.cancel_scope.cancel()
    assert restarted == [*engines, *hosts]
    assert load.failures == [], rolling.logs()
    assert load.answered > 20


@pytest.mark.trio
async def test_a_cluster_on_one_host(tmp_path: Path) -> None:
    scenario = tmp_path / "cluster.toml"
    scenario.write_text((ROOT / "examples/reference.toml").read_text())
    engines = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    small = ("pool.prefill.replicas=2", "pool.decode.replicas=2", "router.on_failure=retry")
    with served(tmp_path, scenario, *small) as cluster:
        shutil.copy(operators_file(cluster.host, cluster.port), tmp_path / "header")
        before = {name: cluster.pid_of(name) for name in (*engines, "pdflow_runtime.router.front")}
        load = Load(lambda: [cluster.port])
        assert settings_of("settings of one host") == {"FILE", "ROUTER", "ENGINES"}
        settings = {"FILE": str(scenario), "ROUTER": f"http://{HOST}:{cluster.port}", "ENGINES": " ".join(engines)}
        async with load.steady():
            await load.more(CLIENTS)
            await ran("one host", tmp_path, **settings)
            with trio.fail_after(60):
                while not router_is_new(cluster, before):
                    await trio.sleep(0.1)
            await load.more(4 * CLIENTS)
        after = {name: cluster.pid_of(name) for name in before}
    assert not set(before.values()) & set(after.values()), "every process is another one"
    assert load.failures == []


def router_is_new(cluster: Served, before: dict[str, int]) -> bool:
    try:
        return cluster.pid_of("pdflow_runtime.router.front") != before["pdflow_runtime.router.front"]
    except LookupError:
        return False
