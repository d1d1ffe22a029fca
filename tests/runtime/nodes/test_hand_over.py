"""KV goes from engine to engine, and the tokens are those of one engine alone: by each method and transport."""

from __future__ import annotations

from typing import Any

import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.engine.sequence import Phase
from pdflow.methods.catalogue import METHODS
from pdflow.protocol.events import Received
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code, Done
from pdflow.serving.decode_request import DecodeStage
from pdflow_runtime.clock import now_ns
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpRequest
from pdflow_runtime.nodes.decode_api import DecodeApi
from pdflow_runtime.nodes.decode_node import DecodeLeg
from pdflow_runtime.nodes.engine_api import EngineApi
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import TorchModel
from pdflow_runtime.nodes.prefill_api import PrefillApi
from pdflow_runtime.security.signed import Gate
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.named import transport_named
from tests.runtime.support.live_pair import LOCAL, Answer, LivePair, answer_of, cluster, live_pair, prompt

LENGTHS = (1, 2, 15, 16, 17, 33, 100, 700)


async def same_tokens(home: LivePair) -> None:
    """Several at once, of many lengths; D computes of each prompt its last token, and no more."""
    answers: dict[int, tuple[object, object]] = {}

    async def one(length: int) -> None:
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        alone = await home.ask_alone(f"a{length}", prompt(length), sampling)
        answers[length] = (alone, await home.ask(f"r{length}", prompt(length), sampling))

    async with trio.open_nursery() as nursery:
        for length in LENGTHS:
            nursery.start_soon(one, length)
    for length, (alone, handed) in answers.items():
        assert handed == alone, length
    assert home.d.engine.prompt_tokens_computed <= len(LENGTHS)
    await home.quiet()


@pytest.mark.parametrize(
    ("method", "transport"),
    [*((method, "shm") for method in METHODS), ("nixl-push", "tcp"), ("nixl-pull", "tcp")],
)
@pytest.mark.trio
async def test_the_tokens_are_those_of_one_engine_alone(method: str, transport: str, model: TorchModel) -> None:
    async with live_pair(cluster(f"transfer.method={method}"), model, transport) as home:
        await same_tokens(home)


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "p_block", "d_block"), [(2, 1, 16, 16), (1, 2, 16, 16), (2, 2, 16, 32), (1, 2, 32, 16)]
)
@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.trio
async def test_engines_may_shard_their_kv_differently(
    method: str, p_tp: int, d_tp: int, p_block: int, d_block: int, model: TorchModel
) -> None:
    tps = (f"pool.prefill.tp={p_tp}", f"pool.decode.tp={d_tp}")
    blocks = (f"pool.prefill.block_size={p_block}", f"pool.decode.block_size={d_block}")
    async with live_pair(cluster(f"transfer.method={method}", *tps, *blocks), model) as home:
        await same_tokens(home)


async def mixed_up(home: LivePair) -> Answer:
    """P computes one prompt, D decodes from another under the same name."""
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    home.p.begin("r", "x-r", prompt(100, 1))
    return await answer_of(home.d.begin("r", KvParams(home.p.config.info, "x-r", "r", 0), prompt(100), sampling))


@pytest.mark.trio
async def test_kv_of_another_prompt_is_refused(model: TorchModel) -> None:
    async with live_pair(cluster(), model) as home:
        assert await mixed_up(home) == ([], Code.CONTENT)
        with trio.fail_after(40):
            await home.quiet()


@pytest.mark.trio
async def test_tokens_depend_on_the_transferred_kv(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all tests here: were D to compute the prompt itself, whatever KV it got would do."""
    for node in ("prefill_node", "decode_node"):
        monkeypatch.setattr(f"pdflow_runtime.nodes.{node}.digest_of", lambda tokens, weights: 7)
    async with live_pair(cluster(), model) as home:
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        handed = await mixed_up(home)
        own = await home.ask_alone("own", prompt(100), sampling)
        theirs = await home.ask_alone("theirs", [*prompt(100, 1)[:-1], prompt(100)[-1]], sampling)
        assert handed != own
        assert handed == theirs


@pytest.mark.parametrize(("method", "whose"), [("nixl-push", "p"), ("nixl-push", "d"), ("nixl-pull", "d")])
@pytest.mark.trio
async def test_a_lost_memory_is_reconnected(method: str, whose: str, model: TorchModel) -> None:
    """Though the stream of frames lives: READs of a peer whose transport had broken failed for good."""
    async with live_pair(cluster(f"transfer.method={method}"), model, "tcp") as home:
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        alone = await home.ask_alone("alone", prompt(40), sampling)
        assert await home.ask("before", prompt(40), sampling) == alone
        (rank,) = (home.p if whose == "p" else home.d).ranks.values()
        assert isinstance(rank.transport, StreamAgent)
        for link in tuple(rank.transport._links.values()):
            rank.transport._lose(link)
        with trio.fail_after(60):
            while any(rank.peers for node in (home.p, home.d) for rank in node.ranks.values()):
                await trio.sleep(0.01)
        assert await home.ask("after", prompt(40), sampling) == alone
        await home.quiet()


@pytest.mark.trio
async def test_an_engine_that_gives_blocks_to_a_request_that_has_just_ended_gets_them_back(model: TorchModel) -> None:
    """The client's hang-up waits in the queue as the engine admits: found by a cluster whose clients hung up."""
    home = LivePair(cluster(), model, transport_named("shm"))
    node = home.d
    leg = node.begin("r", KvParams(home.p.config.info, "x-r", "r", 0), prompt(100), Sampling())
    node.turn(now_ns())
    assert leg.job.seq.phase is Phase.WAITING
    node.abort(leg)
    assert not node.engine._compose()
    assert leg.receive_channel.receive_nowait() is Code.CANCELLED
    assert node.pool.free == node.pool.num_blocks
    assert not node.known()
    for built in (home.p, home.d, home.alone):
        for rank in built.ranks.values():
            await rank.transport.aclose()


@pytest.mark.trio
async def test_an_id_too_long_for_a_frame_is_refused_on_arrival(model: TorchModel) -> None:
    """It would have ended the engine's process when it was to be said to a peer."""
    async with live_pair(cluster(), model) as home:
        args = model.prompts, "nixl-push", Coordinates(LOCAL, 1), Gate(None, "an engine"), lambda: None
        apis: list[EngineApi[Any]] = [PrefillApi(home.p, *args), DecodeApi(home.d, *args)]
        for api in apis:
            asked = HttpRequest(
                "POST", "/v1/completions", "", ((b"x-request-id", b"r" * 600),), b'{"prompt": "a"}', True, True
            )
            with pytest.raises(OpenAIError, match="600 bytes, 512 are allowed"):
                await api._answer(asked, None)  # type: ignore[arg-type]
            assert not api.node.known()


@pytest.mark.trio
async def test_a_prefill_rank_of_mooncake_writes_with_so_many_workers(model: TorchModel) -> None:
    async with live_pair(cluster("transfer.method=mooncake-v1", "transfer.num_workers=1"), model) as home:
        (rank,) = home.p.ranks.values()
        most = 0
        write = rank.transport.write

        def watched(*args: Any) -> None:
            nonlocal most
            write(*args)
            most = max(most, len(rank.transfers._in_flight))

        rank.transport.write = watched  # type: ignore[method-assign]
        await same_tokens(home)
        assert most == rank.transfers.rules.writes == 1


@pytest.mark.trio
async def test_who_hangs_up_as_the_last_bytes_come_is_not_decoded_for(model: TorchModel) -> None:
    """DONE waits in the queue, and the hang-up behind it: the protocol is done with the request by then."""
    async with live_pair(cluster(), model) as home:
        (rank,) = home.d.ranks.values()
        put = rank._put
        leg: DecodeLeg

        def watched(event: Any) -> None:
            put(event)
            if type(event) is Received and type(event.message) is Done:
                home.d.abort(leg)

        rank._put = watched
        sampling = Sampling(max_tokens=4000, ignore_eos=True)
        sent = home.send("r", prompt(100), sampling)
        assert isinstance(sent, DecodeLeg)
        leg = sent
        assert await answer_of(leg) == ([], Code.CANCELLED)
        await home.quiet()
        assert not home.d.known()
        assert not home.d.notes


@pytest.mark.trio
async def test_a_request_whose_blocks_are_in_quarantine_is_here_still(model: TorchModel) -> None:
    """Its name is taken, which whoever asks again is told; the engine lives on."""
    async with live_pair(cluster(), model) as home:
        params = KvParams(home.p.config.info, "x-r", "r", 0)
        leg = home.d.begin("r", params, prompt(100), Sampling())
        with trio.fail_after(10):
            while home.d.decoding.stage_of("r") is not DecodeStage.ADMITTED or not home.d.links.links:
                await trio.sleep(0.001)
        home.d.abort(leg)
        home.d.settle()
        assert leg.receive_channel.receive_nowait() is Code.CANCELLED
        assert home.d.pool.quarantined
        with pytest.raises(KeyError, match="is already open"):
            home.d.begin("r", params, prompt(100), Sampling())
        await home.quiet()
        assert (await home.ask("r", prompt(20), Sampling(max_tokens=4, ignore_eos=True))).code is Code.NONE


@pytest.mark.parametrize("method", ["nixl-push", "nixl-pull"])
@pytest.mark.trio
async def test_a_prefill_engine_that_has_started_anew_elsewhere_is_served_from_at_once(
    method: str, model: TorchModel
) -> None:
    """Though D has tried where it was before, and would not try again for a while."""
    async with live_pair(cluster(f"transfer.method={method}"), model) as home:
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        (at,) = home.d.links.book.values()
        home.d.links.book["prefill-0"] = ("127.0.0.1", 1)
        assert await home.ask("r", prompt(20), sampling) == ([], Code.UNREACHABLE)
        await home.d.links.update_address("prefill-0", *at)
        assert (await home.ask("s", prompt(20), sampling)).code is Code.NONE
