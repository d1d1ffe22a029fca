"""Who is there: engines that report to the router, fall silent, leave, die and come back; who is added, and removed."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from pdflow.protocol.values import S
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import EngineAddress, EngineGone, EngineLeaving
from pdflow_runtime.process.reports import PATH, Reporter, routers_at
from pdflow_runtime.router.admin import Admin
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.signed import UNSIGNED, Gate, Signer
from tests.runtime.http.world import LOCAL, serving
from tests.runtime.router.test_router_node import ENGINES, Town, settled, town
from tests.runtime.support.live_pair import cluster

SILENCE_NS = 5 * S


def engine_address(name: str, incarnation: int = 1, born_ns: int = 100, port: int = 1) -> EngineAddress:
    at = Coordinates(LOCAL, port)
    return EngineAddress(name, at, at, incarnation, born_ns)


def reporting() -> Town:
    """A router that nobody has reported to."""
    return Town(10.0, SILENCE_NS)


def apply_report(built: Town, *reports: EngineAddress | EngineLeaving | EngineGone) -> list[str]:
    answers = [built.node.members.apply_report(news) for news in reports]
    built.turn()
    return answers


def up(built: Town) -> list[str]:
    return [name for name in ENGINES if built.node.members.is_up(name)]


@pytest.mark.trio
async def test_who_reports_is_a_member_until_it_is_silent(autojump_clock: trio.testing.MockClock) -> None:
    built = reporting()
    assert not built.front.healthy()
    apply_report(built, engine_address("prefill-0"), engine_address("decode-1"))
    assert up(built) == ["prefill-0", "decode-1"]
    assert built.front.healthy()
    await trio.sleep(3)
    apply_report(built, engine_address("prefill-0"))
    await trio.sleep(3)
    assert up(built) == ["prefill-0"]
    assert not built.front.healthy()
    apply_report(built, engine_address("decode-1"))
    assert up(built) == ["prefill-0", "decode-1"]


@pytest.mark.trio
async def test_engines_that_do_both_need_nobody_who_decodes() -> None:
    built = reporting()
    built.node.decode.clear()
    assert not built.front.healthy()
    apply_report(built, engine_address("prefill-0"))
    assert built.front.healthy()


@pytest.mark.trio
async def test_a_known_death_is_not_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    built = reporting()
    apply_report(built, *map(engine_address, ENGINES))
    apply_report(built, EngineGone("decode-0"), EngineGone("decode-1", 7))
    assert up(built) == ["prefill-0", "prefill-1", "decode-1"], "no word of another life counts"
    apply_report(built, engine_address("decode-0", 2, 200))
    assert up(built) == list(ENGINES)
    assert not built.node.members.drained


@pytest.mark.trio
async def test_a_leaving_engine_gets_no_requests_and_its_next_incarnation_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    built = reporting()
    apply_report(built, *map(engine_address, ENGINES))
    apply_report(built, EngineLeaving("prefill-0", 1), EngineLeaving("prefill-1", 7))
    assert up(built) == list(ENGINES[1:])
    apply_report(built, engine_address("prefill-0"))
    assert up(built) == list(ENGINES[1:]), "it goes on reporting while it ends what it has"
    apply_report(built, EngineGone("prefill-0", 1))
    apply_report(built, engine_address("prefill-0", 2, 200))
    assert up(built) == list(ENGINES)


@pytest.mark.trio
async def test_of_two_processes_that_report_one_engine_the_younger_is_taken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    built = reporting()
    apply_report(built, engine_address("decode-0", 1, 100, port=1))
    assert apply_report(built, engine_address("decode-0", 2, 200, port=2)) == [""]
    assert built.node.members.addresses["decode-0"].http.port == 2
    assert apply_report(built, engine_address("decode-0", 1, 100, port=1)) == [
        f"another process started later as decode-0, at {LOCAL}:2: stop one of the two"
    ]
    assert built.node.members.addresses["decode-0"].http.port == 2
    await trio.sleep(6)
    assert apply_report(built, engine_address("decode-0", 1, 100, port=1)) == [""], "which is silent now"
    assert built.node.members.addresses["decode-0"].http.port == 1
    assert "unknown engine 'nobody-0'" in apply_report(built, engine_address("nobody-0"))[0]


@pytest.mark.trio
async def test_a_drained_engine_stays_drained_in_every_incarnation(autojump_clock: trio.testing.MockClock) -> None:
    built = reporting()
    apply_report(built, *map(engine_address, ENGINES))
    built.front.admin.change("decode-0", False)
    built.turn()
    for news in (
        engine_address("decode-0"),
        EngineLeaving("decode-0", 1),
        EngineGone("decode-0", 1),
        engine_address("decode-0", 2, 200),
    ):
        apply_report(built, news)
        assert "decode-0" not in up(built)
    assert built.node.members.drained == {"decode-0"}
    built.front.admin.change("decode-0", True)
    built.turn()
    assert up(built) == list(ENGINES)


@pytest.mark.trio
async def test_a_restarted_router_gets_drained_engines_from_their_reports(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """They got requests again, though an operator had drained them, and nobody had said otherwise."""
    built = reporting()
    drained = msgspec.structs.replace(engine_address("decode-0"), drained=True)
    apply_report(built, engine_address("prefill-0"), engine_address("decode-1"), drained)
    assert up(built) == ["prefill-0", "decode-1"]
    assert built.node.members.drained == {"decode-0"}
    built.front.admin.change("decode-0", True)
    apply_report(built, drained)
    assert up(built) == ["prefill-0", "decode-0", "decode-1"], "its report is older than the order"
    apply_report(built, EngineGone("decode-0"), drained)
    assert up(built) == ["prefill-0", "decode-0", "decode-1"]


@pytest.mark.trio
async def test_nodes_of_a_store_are_members_like_engines(autojump_clock: trio.testing.MockClock) -> None:
    built = Town(10.0, SILENCE_NS, ["store-0", "store-1"])
    apply_report(built, *map(engine_address, ENGINES), engine_address("store-0"))

    def there() -> list[int | None]:
        return [at and at.incarnation for at in built.node.members.stores.values()]

    assert there() == [1, None]
    assert not built.front.healthy()
    apply_report(built, engine_address("store-1", 2, 200), EngineLeaving("store-1", 2))
    assert there() == [1, 2]
    assert built.front.healthy()
    assert apply_report(built, engine_address("store-1", 1, 100)) == [
        f"another process started later as store-1, at {LOCAL}:1: stop one of the two"
    ]
    await trio.sleep(3)
    apply_report(built, *map(engine_address, ENGINES), engine_address("store-0", 3, 300))
    await trio.sleep(3)
    assert there() == [3, None]
    assert not built.front.healthy()
    apply_report(built, engine_address("store-1", 1, 100), EngineGone("store-0", 1))
    assert there() == [3, 1], "the silent one's word is believed again, and no word of a life that is over"
    apply_report(built, EngineGone("store-0", 3))
    assert there() == [None, 1]


# The engine's side.


@pytest.mark.trio
async def test_reports_come_evenly_and_heal_a_router_that_begins_anew() -> None:
    secret = Secret(b"what all parts of this cluster know")
    gate = Gate(secret, "router")
    received: list[tuple[str, int]] = []
    drained: list[bool] = []
    forgetful = False

    async def router(request: HttpRequest, responder: Responder) -> None:
        gate.check(request)
        news = msgspec.json.decode(request.body)
        received.append((news["type"], news["incarnation"]))
        drained.append(news.get("drained", True))
        await responder.reply(503 if forgetful else 200, (JSON,), b'{"drained":true}')

    async with serving(router) as server, trio.open_nursery() as nursery:
        reporter = Reporter(engine_address("decode-0", 9), Signer(secret), 0.05)
        nursery.start_soon(reporter.run)
        await settled()
        assert not received, "it has not been told to whom"
        reporter.set_router(Coordinates(LOCAL, server.port))
        with trio.fail_after(5):
            while len(received) < 3:
                await trio.sleep(0.005)
            assert set(received) == {("up", 9)}
            assert drained == [False, True, True], "what it was answered it says the next time"
            forgetful = True
            await reporter.leave()
            assert received[-1] == ("leaving", 9)
            count = len(received)
            while len(received) < count + 4:
                await trio.sleep(0.005)
            assert received[count : count + 4] == [("up", 9), ("leaving", 9)] * 2, "a new router hears of both"
        nursery.cancel_scope.cancel()
    await reporter.end()


@pytest.mark.trio
async def test_nothing_is_reported_behind_the_end() -> None:
    received: list[str] = []

    async def router(request: HttpRequest, responder: Responder) -> None:
        received.append(msgspec.json.decode(request.body)["type"])
        await responder.reply(200, (JSON,), b"{}")

    async with serving(router) as server:
        reporter = Reporter(engine_address("decode-0"), UNSIGNED, 0.01)
        reporter.set_router(Coordinates(LOCAL, server.port))
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reporter.run)
                while not received:
                    await trio.sleep(0.005)
                await reporter.end()
        assert received[-1] == "gone"


@pytest.mark.trio
async def test_an_unreachable_router_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        reporter = Reporter(engine_address("decode-0"), UNSIGNED, 0.01)
        reporter.set_router(Coordinates(LOCAL, 1))
        nursery.start_soon(reporter.run)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert len([record for record in caplog.records if "; retrying" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), [("127.0.0.1", 8000)]),
        (("serve.host=0.0.0.0", "serve.port=90"), [("127.0.0.1", 90)]),
        (("serve.router=10.0.0.1:8001",), [("10.0.0.1", 8001)]),
        (("serve.router=[fd00::1]:8001",), [("fd00::1", 8001)]),
        (("serve.router=a:1, b:2",), [("a", 1), ("b", 2)]),
    ],
)
def test_engines_know_where_the_router_is(overrides: tuple[str, ...], found: list[tuple[str, int]]) -> None:
    found_at = routers_at(cluster(*overrides))
    assert [(at.host, at.port) for at in found_at] == found


@pytest.mark.parametrize(
    "overrides", ["serve.router=here", "serve.router=a:b", "serve.router=:80", "serve.router=a:1,", "serve.port=0"]
)
def test_a_malformed_router_address_is_refused(overrides: str) -> None:
    with pytest.raises(Exception, match=r"serve\.router: is .*, expected HOST:PORT"):
        routers_at(cluster(overrides))


# What operators ask for.


async def admin(built: Town, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    async with built.client.request(method, LOCAL, built.port, path, (JSON,), body) as response:
        return response.status, await response.read()


@pytest.mark.trio
async def test_reports_are_taken_where_engines_report() -> None:
    report = msgspec.json.encode(engine_address("decode-0"))
    async with town() as built:
        assert (await admin(built, "POST", PATH, report))[0] == 409
    async with town(silence_ns=SILENCE_NS) as built:
        assert await admin(built, "POST", PATH, report) == (200, b'{"drained":false}')
        assert (await admin(built, "POST", f"{PATH}/decode-0/drain"))[0] == 200
        assert await admin(built, "POST", PATH, report) == (200, b'{"drained":true}'), "it says so in its next report"
        assert (await admin(built, "POST", f"{PATH}/decode-0/resume"))[0] == 200
        assert await admin(built, "POST", PATH, report) == (200, b'{"drained":false}')
        assert (await admin(built, "POST", PATH, msgspec.json.encode(engine_address("nobody-0"))))[0] == 409
        for wrong in (b"", b"[]", b'{"type":"up"}', b'{"type":"down","engine":"decode-0"}', b"\xff", b"[" * 100_000):
            assert (await admin(built, "POST", PATH, wrong))[0] == 400
        for host, port in (("", 1), ("a host", 1), ("h\r\nx: y", 1), ("h", 0), ("h", 65_536), ("h", -1)):
            nowhere = EngineAddress("decode-0", Coordinates(host, port), Coordinates(LOCAL, 1), 1, 1)
            assert (await admin(built, "POST", PATH, msgspec.json.encode(nowhere)))[0] == 400


@pytest.mark.trio
async def test_a_removed_engine_is_stopped_once_it_has_no_requests() -> None:
    async with town() as built, trio.open_nursery() as nursery:
        nursery.start_soon(built.front.admin.run)
        nursery.start_soon(built.ask)
        await settled()
        built.turn()
        await settled()
        assert sorted(built.asked) == ["decode-0", "prefill-0"]
        for name in ("decode-0", "decode-1"):
            assert (await admin(built, "DELETE", f"{PATH}/{name}"))[0] == 202
            built.turn()
            await settled()
        assert built.stopped == ["decode-1"], "the other one is at work"
        assert (await admin(built, "DELETE", f"{PATH}/nobody-1"))[0] == 404
        built.node.members.apply_report(EngineGone("prefill-0"))
        built.turn()
        await settled()
        built.turn()
        await settled()
        assert built.stopped == ["decode-1", "decode-0"]
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_engines_are_added_while_there_are_vacant_ones() -> None:
    async with town() as built:
        started: list[str] = []
        built.front.admin = Admin(built.node, ["decode-1"], started.append)  # type: ignore[misc]
        built.node.members.apply_report(EngineGone("decode-1"))
        built.turn()
        status, body = await admin(built, "POST", PATH, b'{"pool": "decode"}')
        assert (status, body) == (202, b'{"engine":"decode-1"}')
        assert started == ["decode-1"]
        for wrong in (b'{"pool": "decode"}', b'{"pool": "nobody"}'):
            status, body = await admin(built, "POST", PATH, wrong)
            assert status == 409
            assert b"serve.spare_engines" in body
        assert (await admin(built, "POST", PATH, b'{"pool": 7}'))[0] == 400
        nobody_starts = Admin(built.node, ["decode-1"], None)
        with pytest.raises(OpenAIError, match="pdflow serve FILE --role"):
            nobody_starts.add("decode")


@pytest.mark.trio
async def test_an_engine_that_was_stopped_may_be_added_again() -> None:
    """By whoever: it was started again by nobody, and could not be asked for."""
    async with town() as built:
        started: list[str] = []
        built.front.admin = Admin(built.node, [], started.append)  # type: ignore[misc]
        built.node.members.apply_report(EngineGone("decode-0"))
        built.turn()
        assert (await admin(built, "POST", PATH, b'{"pool": "decode"}'))[0] == 409, "it has died, and is started again"
        built.node.members.apply_report(EngineGone("decode-1", for_good=True))
        built.turn()
        status, body = await admin(built, "POST", PATH, b'{"pool": "decode"}')
        assert (status, body) == (202, b'{"engine":"decode-1"}')
        assert started == ["decode-1"]
