"""One page of metrics for the whole cluster, whatever its engines do meanwhile."""

from __future__ import annotations

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from pdflow_runtime.http.messages import Headers
from pdflow_runtime.process.addresses import EngineGone
from pdflow_runtime.router import admin, cluster_metrics
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import Gate
from tests.runtime.http.world import LOCAL
from tests.runtime.router.test_router_node import ENGINES, Town, town

PAGE = b'# HELP steps Steps\n# TYPE steps counter\nsteps_total{kind="a"} 4\n'


async def read(built: Town, headers: Headers = ()) -> tuple[int, str]:
    async with built.client.request("GET", LOCAL, built.port, "/metrics/cluster", headers) as response:
        answer = await response.read()
    return response.status, answer.decode()


def samples(text: str) -> dict[tuple[str, str], float]:
    """The values by the sample's name and its engine."""
    found = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            found[sample.name, sample.labels["engine"]] = sample.value
    return found


@pytest.mark.trio
async def test_a_page_has_all_processes_and_says_who_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "ANSWER_S", 0.2)
    async with town() as built:
        built.pages = {"prefill-0": PAGE, "prefill-1": b"<html>", "decode-0": PAGE, "decode-1": None}
        status, text = await read(built)
        assert status == 200
        found = samples(text)
        up = {engine: found["pdflow_cluster_scrape_up", engine] for engine in ENGINES}
        assert up == {"prefill-0": 1, "prefill-1": 0, "decode-0": 1, "decode-1": 0}
        assert found["pdflow_cluster_scrape_seconds", "decode-1"] >= 0.2
        assert found["steps_total", "prefill-0"] == found["steps_total", "decode-0"] == 4
        assert ("steps_total", "prefill-1") not in found
        assert found["pdflow_router_requests_open", "router"] == 0
        assert found["pdflow_router_engine_up", "decode-1"] == 1, "its router has not missed it yet"
        assert text.count("# TYPE steps counter") == 1


@pytest.mark.trio
async def test_an_engine_that_is_gone_is_named() -> None:
    async with town() as built:
        built.pages = dict.fromkeys(ENGINES, PAGE)
        built.node.members.apply_report(EngineGone("decode-0"))
        found = samples((await read(built))[1])
        assert found["pdflow_cluster_scrape_up", "decode-0"] == 0
        assert found["pdflow_router_engine_up", "decode-0"] == 0


@pytest.mark.trio
async def test_a_page_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_metrics, "PAGE_BYTES", 1000)
    monkeypatch.setattr(cluster_metrics, "ALL_BYTES", 2 * len(PAGE))
    async with town() as built:
        built.pages = dict.fromkeys(ENGINES, PAGE) | {"prefill-0": PAGE + b"a 1\n" * 500}
        found = samples((await read(built))[1])
        up = [found["pdflow_cluster_scrape_up", engine] for engine in ENGINES]
        assert up[0] == 0
        assert sum(up) == 2, "all together are limited too"


@pytest.mark.trio
async def test_many_readers_cost_as_much_as_one() -> None:
    async with town() as built:
        built.pages = dict.fromkeys(ENGINES, PAGE)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(read, built)
        assert built.pages_asked == len(ENGINES)


@pytest.mark.trio
async def test_who_may_read_it() -> None:
    """Who may read an engine's metrics: on loopback every process of the host, beyond it who has the secret."""
    async with town() as built:
        built.pages = dict.fromkeys(ENGINES, PAGE)
        built.front.gate = Gate(Secret(b"x" * 32, local=True), "router")
        assert (await read(built))[0] == 200
        assert (await read(built, ((b"origin", b"http://evil"),)))[0] == 403
        built.front.gate = Gate(Secret(b"x" * 32), "router")
        assert (await read(built))[0] == 401
        assert (await read(built, ((b"authorization", b"Bearer " + b"x" * 32),)))[0] == 200
        built.front.gate = None
        status, text = await read(built)
        assert (status, "without a secret" in text) == (403, True)
