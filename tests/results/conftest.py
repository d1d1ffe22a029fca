"""A small run with every kind of ending, its figures easy to work out by hand."""

from __future__ import annotations

import pytest

from pdflow.results.files.bench_json import CostStatement, RunHeader
from pdflow.results.records import FIRST_DECODE, HANDOFF, P_QUEUE, PREFILL, ROUTE, XFER_WIRE, Records
from pdflow.results.result import Result
from pdflow.results.steps import Steps
from pdflow.results.totals import EngineTotals, LinkTotals, Totals
from pdflow.scenario.schema.scenario import Slo

MS = 1_000_000
S = 1_000 * MS


@pytest.fixture
def records() -> Records:
    """Arrivals every 100 ms; prefill takes 20 ms after a growing queue, the wire 5, the first decode step 10, and
    each of four further tokens 10. Request 2 fails, 3 is cancelled, 4 had not ended."""
    records = Records()
    for request in range(5):
        arrival = request * 100 * MS
        assert records.add(arrival, input_tokens=100 * (request + 1), output_tokens=5) == request
        records.attempts[request] = 1
        records.prefill_engine[request], records.decode_engine[request] = "prefill-0", "decode-0"
        records.ends[ROUTE][request] = arrival
        if request < 4:
            records.ends[P_QUEUE][request] = arrival + request * 10 * MS
            records.ends[PREFILL][request] = records.ends[P_QUEUE][request] + 20 * MS
        if request < 2:
            records.ends[HANDOFF][request] = records.ends[PREFILL][request]
            records.ends[XFER_WIRE][request] = records.ends[PREFILL][request] + 5 * MS
            first = records.ends[XFER_WIRE][request] + 10 * MS
            records.ends[FIRST_DECODE][request] = records.first_token_ns[request] = first
            records.last_token_ns[request] = first + 40 * MS
            records.outcome[request] = "completed"
    records.outcome[2], records.reason[2] = "failed", "lease_expired"
    records.outcome[3], records.reason[3] = "cancelled", "client_gone"
    return records


@pytest.fixture
def result(records: Records) -> Result:
    log = Steps()
    for request in range(2):
        log.add((records.first_token_ns[request] - 10 * MS) * 1_000, 10 * MS * 1_000, 0, 1, 0)
        log.add(records.first_token_ns[request] * 1_000, 10 * MS * 1_000, 0, 4, 1)
        records.token_steps[request] = (5 * request, 5 * request + 4)
    totals = Totals(
        duration_ns=2 * S,
        bytes_moved=39_321_600,
        transfers=2,
        messages=12,
        world_events=77,
        stranded_byte_ns=3 * 10**17,
        links=[
            LinkTotals(name="uplink", bytes=39_321_600, busy_ns=10 * MS, capacity_bytes_per_s=10**9),
            LinkTotals(name="spare", capacity_bytes_per_s=10**9),
        ],
        engines=[
            EngineTotals(name="prefill-0", role="prefill", busy_ps=S * 500, gpus=2, kv_blocks=1000, peak_kv_blocks=60),
            EngineTotals(name="decode-0", role="decode", busy_ps=S * 1_500, gpus=1, kv_blocks=1000, peak_kv_blocks=20),
        ],
        notes={"stale": 2, "duplicate": 1},
    )
    header = RunHeader(
        scenario_name="five",
        scenario_sha256="0" * 64,
        seed=7,
        version="0.1.0",
        command_line="pdflow simulate five.toml",
        model_id="llama-3.1-8b",
        request_rate_rps=10.0,
        slo=Slo(ttft_ms=40, tpot_ms=10),
        costs=tuple(
            CostStatement(pool=pool, model="constant", provenance="constant, as the scenario states", error_bar="exact")
            for pool in ("prefill", "decode")
        ),
    )
    return Result.of(header, records, {"decode-0": log}, totals)
