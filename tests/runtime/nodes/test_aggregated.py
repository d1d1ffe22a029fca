"""An engine that does both answers as the others do, beside them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.results.comparison.runs import OneRun
from pdflow.results.files.read import read_runs
from tests.runtime.support.served import Completion, served

pytestmark = pytest.mark.slow


@pytest.mark.trio
async def test_aggregated_engines_share_the_requests_with_pairs(tmp_path: Path) -> None:
    prompts = [[(seed * 101 + at * 37) % 500 + 5 for at in range(60)] for seed in range(4)]
    out = tmp_path / "out"
    with served(tmp_path, Path(__file__).parents[1] / "aggregated.toml", out=out) as cluster:
        answers: list[list[Completion]] = []
        for stream in (False, True):
            asked = [
                await cluster.ask(prompt=tokens, max_tokens=8, ignore_eos=True, stream=stream) for tokens in prompts
            ]
            answers.append(asked)
        # Each in turn: every prompt was answered by one engine alone, or by a pair, whichever it was.
        assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
        # A prompt is scored by P alone, or by the engine that does both: three prompts, so each by the other one next.
        fields = {"prompt": prompts[:3], "echo": True, "logprobs": 1, "max_tokens": 0}
        body = msgspec.json.encode(fields)
        scored = [msgspec.json.decode((await cluster.exchange("POST", "/v1/completions", body))[1]) for _ in range(2)]
        assert scored[0]["choices"] == scored[1]["choices"]
        assert [len(choice["logprobs"]["token_logprobs"]) for choice in scored[0]["choices"]] == [60] * 3
        state = msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])
        with trio.move_on_after(0.2):
            await cluster.ask(prompt=prompts[0], max_tokens=4000, ignore_eos=True, stream=True)
        again = await cluster.ask(prompt=prompts[1], max_tokens=8, ignore_eos=True)
        assert again.tokens == answers[0][1].tokens
    assert set(state["engines"]) == {"both-0", "prefill-0", "decode-0"}
    assert isinstance(read_runs(out), OneRun)
    by = {row["prefill_engine"] for row in map(msgspec.json.decode, (out / "requests.jsonl").read_bytes().splitlines())}
    assert by >= {"both-0", "prefill-0"}
