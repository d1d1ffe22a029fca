"""Clusters with mutual TLS between router, engines and a store's nodes, for requests, frames and KV over tcp: their
answers are those without it. Real processes, tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio
import trustme

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.security.tls import KEYS
from tests.runtime.http.test_tls import Authority
from tests.runtime.process.test_cluster import QUICKSTART, prompt
from tests.runtime.process.test_roles import ComponentProcesses, components
from tests.runtime.store.test_store_cluster import STORE
from tests.runtime.support.certificates import certify
from tests.runtime.support.served import Served, served

__all__ = ["components"]

pytestmark = pytest.mark.slow
PROMPTS = [prompt(60 + number, number) for number in range(6)]


def certified(folder: Path) -> list[str]:
    """Settings by which all components have a certificate."""
    certify(folder, trustme.CA())
    return [f"serve.{key}={folder / key}" for key in KEYS]


async def answers(cluster: Served) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    async def ask(number: int) -> None:
        fields = {"prompt": PROMPTS[number], "max_tokens": 12, "ignore_eos": True, "stream": number % 2 == 0}
        answer = await cluster.ask(**fields)
        assert answer.status == 200, answer.body
        found[number] = answer.tokens

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(ask, number)
    return [found[number] for number in range(len(PROMPTS))]


async def metric(cluster: Served, name: str) -> list[float]:
    """Of each process that has it."""
    status, page = await cluster.exchange("GET", "/metrics/cluster")
    assert status == 200, page
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (.*)$", page.decode(), re.MULTILINE)]


@pytest.mark.trio
async def test_answers_are_those_of_a_cluster_without_tls(tmp_path: Path) -> None:
    for name in ("plain", "tls", "store"):
        (tmp_path / name).mkdir()
    settings = certified(tmp_path)
    with served(tmp_path / "plain", QUICKSTART) as cluster:
        right = await answers(cluster)
    settings.append("serve.transport=tcp")
    with served(tmp_path / "tls", QUICKSTART, *settings) as cluster:
        assert await answers(cluster) == right
        ports = [int(port) for port in re.findall(r"HTTP on 127\.0\.0\.1:(\d+)", cluster.log.read_text())]
        assert len(ports) >= 2
        plain, unknown = HttpClient(), Authority(tmp_path).client()
        for port in ports:
            async with plain.request("GET", "127.0.0.1", port, "/health") as response:
                assert response.status == 401
            with pytest.raises(UpstreamError, match="certificate verify failed"):
                await unknown.dial(("127.0.0.1", port))
        plain.close()
        assert await answers(cluster) == right
        assert await metric(cluster, "pdflow_cluster_scrape_up") == [1] * len(ports)
    with served(tmp_path / "store", QUICKSTART, *settings, *STORE) as cluster:
        assert await answers(cluster) == right
        assert await metric(cluster, "pdflow_cluster_scrape_up") == [1] * 5
        assert sum(await metric(cluster, "pdflow_store_objects")) > 0, "prefill engines have put KV"
    logs = "".join((tmp_path / name / "serve.log").read_text() for name in ("tls", "store"))
    assert "Traceback" not in logs


@pytest.mark.trio
async def test_an_engine_of_another_authority_gets_no_requests_and_the_log_says_why(
    components: ComponentProcesses, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = certified(tmp_path / "other")
    components.certify()
    components.start("router")
    components.start("prefill-0", *other)
    components.start("decode-0")
    await components.healthy()
    status, _ = await components.exchange("POST", "/v1/completions", b'{"prompt": [5, 6, 7], "max_tokens": 2}')
    assert status == 503
    log = components.log("router").read_text()
    assert re.search("a request to prefill-0 failed: no TLS with .*: certificate verify failed.*serve.tls_ca", log), log
