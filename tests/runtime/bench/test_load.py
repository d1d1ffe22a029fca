"""When requests go out and what is measured of them, held against a server whose timings are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from pdflow.protocol.values import S
from pdflow.results.records import Records
from pdflow.scenario.reading.load import load
from pdflow.workload.build import requests
from pdflow_runtime.bench.sender import CANCELLED, NO_FIRST_TOKEN, TIMED_OUT
from pdflow_runtime.http.responder import Responder
from pdflow_sim.clients import client_timeouts
from tests.runtime.bench.stub import FIRST_NS, FIRST_S, GAP_NS, GAP_S, break_off, give_up, refuse, run, stub

QUICKSTART = str(Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml")
SESSIONS = str(Path(__file__).resolve().parents[3] / "examples/sessions.toml")
SHORT = ("workload.requests=20",)

pytestmark = pytest.mark.trio


def answered_in_time(records: Records) -> bool:
    """To a few ns, which are lost where trio counts in seconds."""
    rows = zip(records.arrival_ns, records.first_token_ns, records.last_token_ns, records.output_tokens, strict=True)
    return all(
        abs(first - arrival - FIRST_NS) < 10 and abs(last - first - GAP_NS * (tokens - 1)) < 10
        for arrival, first, last, tokens in rows
    )


async def test_a_scenarios_requests_go_out_at_their_instants_and_are_measured(autojump_clock: MockClock) -> None:
    async with stub() as (server, port):
        ran = await run(port, scenario=QUICKSTART, overrides=SHORT)
    records, scenario = ran.ledger.records, load(QUICKSTART, overrides=SHORT)
    drawn = list(requests(scenario.workload, scenario.seed, scenario.base_dir))
    assert records.outcome == ["completed"] * 20
    assert [(r.arrival_ns, r.input_tokens, r.output_tokens) for r in drawn] == list(
        zip(records.arrival_ns, records.input_tokens, records.output_tokens, strict=True)
    )
    assert answered_in_time(records)
    assert ran.late.max_ms < 1e-3
    for number, request in enumerate(drawn):
        itls = ran.ledger.itls_ns[number]
        assert len(itls) == request.output_tokens - 1
        assert all(abs(itl - GAP_NS) < 10 for itl in itls)
    assert all(asked["ignore_eos"] and asked["temperature"] == 0.0 for asked in server.asked)
    assert ran.metrics.itl.count == sum(request.output_tokens - 1 for request in drawn)
    assert ran.metrics.duration_ns == pytest.approx(max(records.last_token_ns), abs=1000)


async def test_without_a_rate_all_go_at_once(autojump_clock: MockClock) -> None:
    async with stub() as (server, port):
        ran = await run(port, num_prompts=30, random_input_len=8, random_output_len=4)
    assert server.most_open == 30
    assert ran.ledger.records.arrival_ns == [0] * 30
    assert answered_in_time(ran.ledger.records)
    assert ran.metrics.peak_concurrent_requests == 30


async def test_waiting_for_the_concurrency_limit_is_measured_apart(autojump_clock: MockClock) -> None:
    async with stub() as (server, port):
        ran = await run(port, num_prompts=9, random_input_len=8, random_output_len=1, max_concurrency=3)
    waves = sorted(round(queued / FIRST_NS) for queued in ran.ledger.queued_ns)
    assert server.most_open == 3
    assert waves == [0] * 3 + [1] * 3 + [2] * 3
    assert answered_in_time(ran.ledger.records)


async def test_closed_users_send_again_when_they_are_answered(autojump_clock: MockClock) -> None:
    closed = ('workload.arrival={process="closed", concurrency=4}', "workload.output_tokens=1", *SHORT)
    async with stub() as (server, port):
        ran = await run(port, scenario=QUICKSTART, overrides=closed)
    assert server.most_open == 4
    assert [round(at / FIRST_NS) for at in ran.ledger.records.arrival_ns] == [n // 4 for n in range(20)]


async def test_a_turn_follows_its_answer_after_the_think_time_and_repeats_the_conversation(
    autojump_clock: MockClock,
) -> None:
    overrides = ("workload.requests=24", "workload.sessions.think_s=1.0", "workload.sessions.system_prompt_tokens=100")
    async with stub() as (server, port):
        ran = await run(port, scenario=SESSIONS, overrides=overrides)
    records = ran.ledger.records
    assert len(records) == 24
    assert answered_in_time(records)
    asked = {each: server.asked[number]["prompt"] for number, each in enumerate(records.sessions)}
    answers = {
        each: [1000 + token for token in range(records.output_tokens[number])]
        for number, each in enumerate(records.sessions)
    }
    later = [(session, turn) for session, turn in records.sessions if turn > 1]
    assert later
    for session, turn in later:
        before = asked[session, turn - 1] + answers[session, turn - 1]
        assert asked[session, turn][: len(before)] == before
        assert len(asked[session, turn]) > len(before)
        first, second = (records.sessions.index((session, each)) for each in (turn - 1, turn))
        assert records.arrival_ns[second] > records.last_token_ns[first]
    assert len({tuple(prompt[:100]) for prompt in asked.values()}) == 1


async def test_an_error_is_recorded_for_its_own_request(autojump_clock: MockClock) -> None:
    oddities = {1: refuse, 2: break_off, 3: give_up}

    async def odd(number: int, responder: Responder) -> bool:
        if number in oddities:
            await oddities[number](responder)
        return number in oddities

    async with stub(odd) as (_, port):
        ran = await run(port, num_prompts=6, request_rate=10.0, burstiness=float("inf"), random_output_len=3)
    records = ran.ledger.records
    assert records.outcome == ["completed", "failed", "failed", "failed", "completed", "completed"]
    assert records.reason[1] == "HTTP 503: nobody is up"
    assert records.reason[2] is not None
    assert "the response ended early" in records.reason[2]
    assert records.reason[3] == "the request failed: peer_dead"
    assert ran.metrics.completed == 3
    assert ran.metrics.output_tokens == 9
    assert ran.metrics.itl.count == 6


@pytest.mark.parametrize(
    ("client", "reason", "at_s"),
    [
        ("timeout_s=0.145", TIMED_OUT, 0.145),
        ("first_token_timeout_s=0.05", NO_FIRST_TOKEN, 0.05),
        ("cancel_probability=1.0, cancel_after_s=0.12", CANCELLED, 0.12),
    ],
)
async def test_clients_cancel_at_the_times_of_the_workload(
    autojump_clock: MockClock, client: str, reason: str, at_s: float
) -> None:
    overrides = (f"workload.client={{{client}}}", "workload.output_tokens=20", "workload.requests=3")
    async with stub() as (server, port):
        ran = await run(port, scenario=QUICKSTART, overrides=overrides)
        await trio.sleep(0)
        assert server.open == 0
    records = ran.ledger.records
    assert records.outcome == ["cancelled"] * 3
    assert records.reason == [reason] * 3
    assert ran.ledger.last_end_ns == pytest.approx(records.arrival_ns[2] + at_s * S, abs=1000)


async def test_a_client_that_has_its_first_token_in_time_waits_for_the_rest(autojump_clock: MockClock) -> None:
    overrides = ("workload.client={first_token_timeout_s=0.11}", "workload.output_tokens=20", "workload.requests=3")
    async with stub() as (_, port):
        ran = await run(port, scenario=QUICKSTART, overrides=overrides)
    assert ran.ledger.records.outcome == ["completed"] * 3


async def test_the_contents_are_those_of_the_simulation() -> None:
    assert (client_timeouts.TIMED_OUT, client_timeouts.NO_FIRST_TOKEN, client_timeouts.CANCELLED) == (
        TIMED_OUT,
        NO_FIRST_TOKEN,
        CANCELLED,
    )


async def test_warm_ups_come_first_and_are_in_no_figure(autojump_clock: MockClock) -> None:
    async with stub() as (server, port):
        ran = await run(port, num_prompts=2, random_input_len=8, random_output_len=3, num_warmups=2)
    assert len(server.asked) == 4
    assert len(ran.ledger.records) == 2
    took_s = FIRST_S + 2 * GAP_S
    assert server.at[2] - server.at[0] == pytest.approx(2 * took_s)
    assert len({tuple(asked["prompt"]) for asked in server.asked}) == 4


async def test_texts_of_a_dataset_are_sent_as_they_are(autojump_clock: MockClock, tmp_path: Path) -> None:
    dataset = tmp_path / "custom.jsonl"
    dataset.write_text(
        '{"prompt": "Say \u00e9.", "output_tokens": 3}\n'
        '{"prompt": "And?", "prompt_len": 70, "output_len": 2}\n'
        '{"prompt_len": 6, "output_len": 2}\n'
    )
    async with stub() as (server, port):
        ran = await run(port, dataset_name="custom", dataset_path=str(dataset), request_rate=10.0)
    first, also, made_up = server.asked
    assert (first["prompt"], first["max_tokens"]) == ("Say é.", 3)
    assert (also["prompt"], also["max_tokens"]) == ("And?", 2)
    assert len(made_up["prompt"]) == 6
    assert ran.ledger.records.input_tokens == [6, 4, 6]
    assert "texts of the file" in ran.header.workload_note


async def test_a_chat_is_asked_for_by_messages(autojump_clock: MockClock) -> None:
    async with stub() as (server, port):
        ran = await run(port, backend="openai-chat", num_prompts=2, random_input_len=8, random_output_len=3)
    assert [len(asked["messages"][0]["content"].split()) for asked in server.asked] == [8, 8]
    assert ran.ledger.records.input_tokens == [7, 7]
    assert answered_in_time(ran.ledger.records)
