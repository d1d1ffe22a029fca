"""The spans of a cluster: one trace for each request, in the client's; a tree of router, legs and stages, with the
instants that the access log has; and no effect of an export that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON, Headers
from pdflow_runtime.observe.access_log import AccessLine
from tests.runtime.support.served import ROOT, Served, served
from tests.runtime.support.traced import Traced, TracedSpan

pytest.importorskip("opentelemetry.sdk", reason="needs the OpenTelemetry SDK: pip install 'pdflow[otel]'")
pytestmark = pytest.mark.slow

REFERENCE = ROOT / "examples/reference.toml"
SMALL = ("pool.prefill.replicas=1", "pool.decode.replicas=2", "serve.access_log=json")
OF_CLIENT = "b7ad6b7169203331"
SERVER, CLIENT, INTERNAL = 2, 3, 1
ROUNDING_MS = 0.002
"""Of the stages in the access log, and of a span's two ends."""
ROW = re.compile(r"^ *[\d.]+ +[\d.]+ +(\D.*?) {2,}(\S+)", re.MULTILINE)
"""Of a printed tree: the name of a span, and its process."""
CLOCKS_NS = 20_000_000
"""How far apart the clocks of two processes of one host may be read."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


def trace_id(number: int) -> str:
    return f"{number:032x}"


def of_trace(number: int, flags: str = "01") -> Headers:
    return JSON, (b"traceparent", f"00-{trace_id(number)}-{OF_CLIENT}-{flags}".encode())


async def ask(cluster: Served, headers: Headers, expected: int = 200, **fields: Any) -> None:
    body = {"prompt": list(range(1, 40)), "max_tokens": 6, "ignore_eos": True, **fields}
    status, answer = await cluster.exchange("POST", "/v1/completions", msgspec.json.encode(body), headers)
    assert status == expected, answer


def access_lines(cluster: Served) -> list[AccessLine]:
    lines = (line for line in cluster.log.read_bytes().splitlines() if line.startswith(b"{"))
    return [msgspec.json.decode(line, type=AccessLine) for line in lines]


def test_a_trace_is_a_tree_of_router_legs_and_stages(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with served(tmp_path, REFERENCE, *SMALL, f"serve.traces={path}") as cluster:
        trio.run(ask, cluster, of_trace(1))
    traced = Traced(path)
    root, *others = (span for span in traced.of_trace(trace_id(1)) if span.kind == SERVER and span.process == "router")
    assert (others, root.parent_id, root.name) == ([], OF_CLIENT, "POST /v1/completions")
    (line,) = access_lines(cluster)
    assert root.lasted_ms == pytest.approx(line.total_ms, abs=ROUNDING_MS)
    assert root.events == ["first_token"]
    shown = {name: root.attributes[name] for name in root.attributes if name.startswith(("pdflow.", "gen_ai."))}
    assert shown == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pdflow",
        "gen_ai.request.model": "llama-3.1-8b",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 39,
        "gen_ai.usage.output_tokens": 6,
        "pdflow.attempts": 1,
        "pdflow.decode": line.decode,
        "pdflow.outcome": "completed",
        "pdflow.prefill": "prefill-0",
        "pdflow.request": line.request,
        "pdflow.resumed": False,
    }
    legs = traced.children(root)
    assert sorted(leg.name for leg in legs) == ["decode leg", "prefill leg"]
    assert all(leg.kind == CLIENT and leg.within(root) and leg.attributes["pdflow.code"] == "none" for leg in legs)
    prefill = engine_of(traced, traced.child(root, "prefill leg"))
    decode = engine_of(traced, traced.child(root, "decode leg"))
    assert [stage.name for stage in traced.children(prefill)] == ["p_queue", "prefill", "xfer_post", "xfer_wire"]
    assert [stage.name for stage in traced.children(decode)] == ["d_admit", "transfer", "first_decode", "decode"]
    check_stages(traced, (prefill, decode), line)
    script = [sys.executable, ROOT / "examples/span_tree.py", path]
    tree = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert sorted(ROW.findall(tree)) == sorted((span.name, span.process) for span in traced.spans), tree


def engine_of(traced: Traced, leg: TracedSpan) -> TracedSpan:
    """The only span below a leg, which is its engine's."""
    (engine,) = traced.children(leg)
    assert (engine.kind, engine.process) == (SERVER, leg.attributes["pdflow.engine"])
    assert engine.attributes["pdflow.attempt"] == leg.attributes["pdflow.attempt"]
    assert engine.begun_ns >= leg.begun_ns - CLOCKS_NS
    return engine


def check_stages(traced: Traced, engines: tuple[TracedSpan, ...], line: AccessLine) -> None:
    """Stages lie in their engine's span, follow each other, and last as long as the access log says."""
    lasted = {}
    for engine in engines:
        stages = traced.children(engine)
        assert all(stage.within(engine) and stage.kind == INTERNAL for stage in stages)
        assert all(before.ended_ns <= after.begun_ns for before, after in pairwise(stages))
        lasted |= {stage.name: stage.lasted_ms for stage in stages}
    assert set(line.stages_ms) == {"p_queue", "prefill", "d_admit", "transfer", "first_decode"}
    assert {name: lasted[name] for name in line.stages_ms} == pytest.approx(line.stages_ms, abs=ROUNDING_MS)


def test_an_engine_that_computes_the_prompt_too(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    alone = "router.disaggregate_above_tokens=1000"
    with served(tmp_path, REFERENCE, *SMALL, alone, f"serve.traces={path}") as cluster:
        trio.run(ask, cluster, of_trace(1))
    traced = Traced(path)
    (root,) = (span for span in traced.of_trace(trace_id(1)) if span.parent_id == OF_CLIENT)
    engine = engine_of(traced, traced.child(root, "decode leg"))
    stages = traced.children(engine)
    assert [stage.name for stage in stages] == ["p_queue", "prefill", "decode"]
    assert all(stage.within(engine) for stage in stages)
    assert stages[0].begun_ns == engine.begun_ns


def test_each_request_has_one_trace(tmp_path: Path) -> None:
    """A request without traceparent begins a trace; one that is not sampled has none; several answers share one."""
    path = tmp_path / "spans.jsonl"
    with served(tmp_path, REFERENCE, *SMALL, f"serve.traces={path}") as cluster:
        trio.run(ask, cluster, of_trace(1, "00"))
        trio.run(ask, cluster, (JSON,))
        trio.run(lambda: ask(cluster, of_trace(2), n=2))
        trio.run(lambda: ask(cluster, of_trace(3), max_tokens=-1, expected=400))
        trio.run(cluster.exchange, "GET", "/health")
    traced = Traced(path)
    assert not traced.of_trace(trace_id(1))
    own = {span.trace_id for span in traced.spans} - {trace_id(2), trace_id(3)}
    assert len(own) == 1
    assert [span.name for span in traced.of_trace(own.pop()) if not span.parent_id] == ["POST /v1/completions"]
    (outer,) = (span for span in traced.of_trace(trace_id(2)) if span.parent_id == OF_CLIENT)
    assert sorted(span.name for span in traced.children(outer)) == ["decode leg"] * 2 + ["prefill leg"] * 2
    (invalid,) = traced.of_trace(trace_id(3))
    assert (invalid.attributes["http.response.status_code"], invalid.error) == (400, False)


def test_the_request_of_a_killed_engine_has_two_decode_legs(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with served(tmp_path, REFERENCE, *SMALL, f"serve.traces={path}") as cluster:
        trio.run(killed_halfway, cluster)
    traced = Traced(path)
    (root,) = (span for span in traced.of_trace(trace_id(1)) if span.parent_id == OF_CLIENT)
    assert (root.attributes["pdflow.attempts"], root.attributes["pdflow.resumed"]) == (2, True)
    first, second = (leg for leg in traced.children(root) if leg.name == "decode leg")
    assert first.attributes["pdflow.engine"] != second.attributes["pdflow.engine"]
    assert (first.error, second.error) == (True, False)
    assert (first.attributes.get("pdflow.resumes"), second.attributes["pdflow.resumes"]) == (None, True)
    assert first.attributes["pdflow.attempt"] != second.attributes["pdflow.attempt"]
    assert engine_of(traced, second).name == "decode engine"


async def killed_halfway(cluster: Served) -> None:
    """Kill the decode engine of a stream that has some tokens."""
    fields = {"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True, "stream": True}
    client, answer, killed = HttpClient(), b"", False
    request = client.request(
        "POST", cluster.host, cluster.port, "/v1/completions", of_trace(1), msgspec.json.encode(fields)
    )
    try:
        with trio.fail_after(60):
            async with request as response:
                async for data in response.pieces():
                    answer += data
                    if not killed and answer.count(b"data: ") > 10:
                        killed = True
                        os.kill(cluster.pid_of(await decoding(cluster)), signal.SIGKILL)
    finally:
        client.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-300:]


async def decoding(cluster: Served) -> str:
    """The engine that decodes the only request."""
    _, body = await cluster.exchange("GET", "/admin/state")
    engines = msgspec.json.decode(body)["engines"]
    (name,) = (name for name in ("decode-0", "decode-1") if engines[name]["requests"])
    return name


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector of OTLP over HTTP: its URL, and the spans that it has received."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            for of_resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                received.extend(span for of_scope in of_resource.scope_spans for span in of_scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_go_to_a_collector(tmp_path: Path, collector: tuple[str, list[Any]]) -> None:
    url, received = collector
    with served(tmp_path, REFERENCE, *SMALL, f"serve.traces={url}") as cluster:
        trio.run(ask, cluster, of_trace(1))
    assert {span.trace_id.hex() for span in received} == {trace_id(1)}
    assert sorted(span.name for span in received) == [
        "POST /v1/completions",
        "d_admit",
        "decode",
        "decode engine",
        "decode leg",
        "first_decode",
        "p_queue",
        "prefill",
        "prefill engine",
        "prefill leg",
        "transfer",
        "xfer_post",
        "xfer_wire",
    ]


def test_a_dead_collector_costs_spans_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    nobody = "http://127.0.0.1:9"
    with served(tmp_path, REFERENCE, *SMALL, f"serve.traces={nobody}") as cluster:
        for number in range(1, 4):
            trio.run(ask, cluster, of_trace(number))
            trio.run(trio.sleep, 1.5)
    lines = [line for line in cluster.log.read_text().splitlines() if nobody in line or "opentelemetry" in line]
    assert sum("component=router" in line for line in lines) == 1, lines
    assert all("spans cannot be exported" in line for line in lines)
    assert len(lines) <= 4, "one line of each process"
