"""A transport whose DONE says only that a WRITE's source may be reused: P flushes, settles, and only then says SENT.

The same transport stands beside it that declares its DONE to be remote, which is not so. There D decodes from KV that
has not come, and gives blocks away that are still written. So it is the declaration that makes the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.protocol.effects import Flush, PostWrite
from pdflow.protocol.events import WriteEnded
from pdflow.protocol.phases import ProducerPhase
from pdflow.protocol.producer.rank import ProducerRank
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.decode_node import DecodeLeg
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.transports.at_host import AtHost
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.nodes.test_hand_over import same_tokens
from tests.runtime.support.held import Held
from tests.runtime.support.live_pair import LivePair, cluster, live_pair, prompt
from tests.runtime.support.local import BoastfulTransport, ClosingTransport, LocalTransport

GREEDY = Sampling(max_tokens=6, ignore_eos=True)
PUSHED = ("nixl-push", "cpu-staged", "p2p-nccl-put", "mooncake-v1", "kv-store")
LATER_S = 0.5


def later(op: int) -> float:
    """Whatever is said of a WRITE is said before it has landed."""
    return LATER_S


def first_last(op: int) -> float:
    """Of the pieces of one prompt the last one, which brings the notice, lands first."""
    return 0.3 / op


class Late(LocalTransport):
    delay_s: ClassVar[Callable[[int], float]] = later


class LateAndBoasting(BoastfulTransport):
    delay_s: ClassVar[Callable[[int], float]] = later


class Overtaking(LocalTransport):
    delay_s: ClassVar[Callable[[int], float]] = first_last


class OvertakingAndBoasting(BoastfulTransport):
    delay_s: ClassVar[Callable[[int], float]] = first_last


def counted(home: LivePair) -> Counter[Any]:
    """From now on: what P's ranks ask for, and the phases that their cells are in behind each turn."""
    seen: Counter[Any] = Counter()

    def observe(address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        home.observe(address, event, effects, now)
        seen.update(map(type, effects))
        endpoint = home.p.ports[address].endpoint
        if isinstance(endpoint, ProducerRank):
            seen.update(cell.phase for cell in endpoint.cells.values())

    home.p.observe = observe
    return seen


@pytest.mark.parametrize("method", PUSHED)
@pytest.mark.trio
async def test_the_tokens_are_those_of_one_engine_alone(method: str, model: TorchModel) -> None:
    """And every WRITE is settled by a flush, under the oracle that knows what DONE says here."""
    async with live_pair(cluster(f"transfer.method={method}"), model, LocalTransport) as home:
        seen = counted(home)
        await same_tokens(home)
        assert seen[Flush] == seen[PostWrite] > 0
        assert seen[ProducerPhase.SETTLING]


@pytest.mark.trio
async def test_where_done_is_remote_nothing_is_flushed(model: TorchModel) -> None:
    async with live_pair(cluster(), model, "tcp") as home:
        seen = counted(home)
        await same_tokens(home)
        assert seen[PostWrite]
        assert not seen[Flush] + seen[ProducerPhase.SETTLING]


@pytest.mark.parametrize(("transport", "right"), [(Late, True), (LateAndBoasting, False)])
@pytest.mark.trio
async def test_a_write_that_has_only_left_is_not_reported_as_sent(
    transport: MakeTransport, right: bool, model: TorchModel
) -> None:
    """SYNC says SENT where no notice has come: D would take that for the KV, and decode from what its blocks held."""
    async with live_pair(cluster("transfer.sync_s=0.05"), model, transport) as home:
        alone = await home.ask_alone("alone", prompt(100), GREEDY)
        assert (await home.ask("r", prompt(100), GREEDY) == alone) == right


@pytest.mark.parametrize(("transport", "right"), [(Late, True), (LateAndBoasting, False)])
@pytest.mark.trio
async def test_no_block_is_free_while_it_may_still_be_written(
    transport: MakeTransport, right: bool, model: TorchModel
) -> None:
    """D hangs up between DONE and the bytes: CANCEL is answered SENT, and that frees its blocks."""
    async with live_pair(cluster(), model, transport) as home:
        leg = home.send("r", prompt(100), GREEDY)
        assert isinstance(leg, DecodeLeg)
        with trio.fail_after(60):
            while not any(type(event) is WriteEnded for _, event in home.events):
                await trio.sleep(0.01)
        home.d.abort(leg)
        with trio.fail_after(60):
            while home.d.pool.free < home.d.pool.num_blocks:
                await trio.sleep(0.01)
        (rank,) = home.d.ranks.values()
        rank.view[: rank.kv_bytes] = marks = b"\xa5" * rank.kv_bytes
        await trio.sleep(3 * LATER_S)
        assert (bytes(rank.view[: rank.kv_bytes]) == marks) == right


@pytest.mark.parametrize(("transport", "right"), [(Overtaking, True), (OvertakingAndBoasting, False)])
@pytest.mark.trio
async def test_a_notification_follows_every_piece(transport: MakeTransport, right: bool, model: TorchModel) -> None:
    """The last piece is posted when those before it have landed, and not when they have left."""
    async with live_pair(cluster("transfer.method=p2p-nccl-put"), model, transport) as home:
        alone = await home.ask_alone("alone", prompt(100), GREEDY)
        assert (await home.ask("r", prompt(100), GREEDY) == alone) == right


def test_an_endpoint_that_is_configured_otherwise_is_not_served(model: TorchModel) -> None:
    builder = LiveBuilder(cluster(), TcpTransport)
    assert builder.done_is_remote
    builder.transport = lambda me, on_event: Held(me, on_event, {}.__getitem__, "local")  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"prefill-0\.r0: the transport declares done_means = local"):
        builder.prefill_node("prefill-0", model)


def test_an_address_changes_nothing_of_what_is_declared() -> None:
    for made in (TcpTransport, LocalTransport, ClosingTransport):
        at = AtHost(made, "127.0.0.1")
        assert (at.done_means, at.fences) == (made.done_means, made.fences)
        assert isinstance(at("p.r0", lambda event: None), made)
