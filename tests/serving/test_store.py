"""What a store's node answers to an engine whose put has failed."""

from __future__ import annotations

import pytest

from pdflow.methods.store.memory import StoreMemory
from pdflow.protocol.effects import Enqueue, Outcome, Resolve
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.serving.effects import AnswerCall, AskForRoom, EndCall, Stored
from pdflow.serving.events import PutRequested
from pdflow.serving.store import StoreCore
from tests.serving.bench import Bench

PARAMS = KvParams(EngineInfo("p", Shards(1, 1, 4)), "x", "r", 8)


@pytest.mark.parametrize(("code", "answered"), [(Code.CANCELLED, Code.CANCELLED), (Code.NONE, Code.IO)])
def test_an_engine_is_told_why_its_put_has_failed(code: Code, answered: Code) -> None:
    core = StoreCore(StoreMemory(4, keeps=True), 4, lambda what, number: None)
    bench = Bench(core, (), (AnswerCall, AskForRoom, EndCall, Stored))
    core.begin(bench.port, bench.end("gets")[1])
    bench.role(PutRequested(PARAMS, ()))
    bench.protocol(Enqueue("r"))
    failed = bench.protocol(Resolve("r", Outcome.FAILED, code))
    assert failed == [AnswerCall("x", None, answered), EndCall("x")]
    assert not core.knows("r", "x")
