"""S12 and L8 at live nodes: a driver that leaves out an effect is noticed, whatever comes of it later."""

from __future__ import annotations

from typing import Any

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation
from pdflow.serving.decode_request import DecodeStage
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.decode_node import LiveDecodeNode
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.nodes.prefill_node import LivePrefillNode
from pdflow_runtime.nodes.ranks import Rank
from pdflow_runtime.store.node import LiveStoreNode
from tests.runtime.support.live_pair import LivePair, cluster, live_pair, prompt

GREEDY = Sampling(max_tokens=4, ignore_eos=True)


def nothing(*_: Any) -> None:
    """Carry out nothing."""


async def cancelled(home: LivePair) -> None:
    """A request waits for KV and is aborted: its blocks are in quarantine until P has answered. Another waits for
    them."""
    leg = home.d.begin("r", KvParams(home.p.config.info, "x-r", "r", 0), prompt(100), GREEDY)
    with trio.fail_after(10):
        while home.d.decoding.stage_of("r") is not DecodeStage.ADMITTED or not home.d.links.links:
            await trio.sleep(0.001)
    home.d.begin_alone("s", prompt(100), GREEDY)
    await trio.sleep(0.01)
    home.d.abort(leg)
    with trio.fail_after(10):
        while home.d.pool.quarantined or "r" in home.d._cells:
            await trio.sleep(0.001)
    await trio.sleep(0.01)


SCARCE = cluster("pool.decode.kv_tokens=128")
"""D's blocks are enough for one request."""


@pytest.mark.trio
async def test_nodes_carry_out_what_their_endpoints_say(model: TorchModel) -> None:
    async with live_pair(SCARCE, model) as home:
        await cancelled(home)
        await home.quiet()


@pytest.mark.trio
async def test_a_quarantine_that_is_left_out_is_noticed(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveDecodeNode, "quarantine", nothing)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="blocks of r must be in quarantine")):
        async with live_pair(SCARCE, model) as home:
            await cancelled(home)


@pytest.mark.trio
async def test_an_engine_that_is_not_woken_is_noticed(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When blocks are freed."""

    def free(self: LiveDecodeNode, port: Any, effect: Any) -> None:
        self.pool.release(effect.allocation)

    monkeypatch.setattr(LiveDecodeNode, "free", free)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="at decode-0, the engine is idle, but the first")):
        async with live_pair(SCARCE, model) as home:
            await cancelled(home)


@pytest.mark.parametrize(
    ("method", "kind", "name", "message"),
    [
        ("nixl-pull", Rank, "expose", "the lease of x-r lasts, but readers do not find"),
        ("nixl-pull", LivePrefillNode, "bump", "at prefill-0.r0, no prompt has lease word"),
        ("kv-store", LiveStoreNode, "expose", "at store-0.get.r0, the lease of .* lasts, but readers do not find"),
        ("kv-store", LiveStoreNode, "bump", "at store-0.get.r0, no prompt has lease word"),
    ],
)
@pytest.mark.trio
async def test_a_lease_word_that_is_not_kept_is_noticed(
    method: str, kind: Any, name: str, message: str, model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, nothing)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match=message)):
        async with live_pair(cluster(f"transfer.method={method}"), model) as home:
            await home.ask("r", prompt(100), GREEDY)


@pytest.mark.trio
async def test_what_an_endpoint_keeps_at_rest_is_noticed(model: TorchModel) -> None:
    async with live_pair(cluster(), model) as home:
        assert (await home.ask("r", prompt(100), GREEDY)).code is Code.NONE
        await home.quiet()
        scheduler: Any = home.p.ports["prefill-0"].endpoint
        scheduler.begun_words["x-s"] = ()
        with pytest.raises(trio.TooSlowError, match="'lease words': 1"):
            await home.quiet(0.1)


@pytest.mark.trio
async def test_blocks_that_nobody_granted_are_noticed(model: TorchModel) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="2 blocks are in quarantine, but 0 must be")):
        async with live_pair(cluster(), model) as home:
            found = home.d.pool.allocate(2)
            assert isinstance(found, Allocation)
            home.d.pool.quarantine(found)
            await trio.sleep(0.01)
