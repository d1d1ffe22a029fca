"""The simulated and the live router of one scenario are equal: what they are, and what they answer to equal events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")
pytest.importorskip("httptools", reason="needs httptools: pip install 'pdflow[live]'")

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.ids import KvParams
from pdflow.routing.effects import DispatchDecode, DispatchPrefill
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    EngineReported,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.router import Router
from pdflow.routing.watching import WatchingRouter
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.router.routing import router_of
from pdflow_runtime.transports.named import transport_named
from pdflow_sim.build import SimulationBuilder as SimBuilder

POLICIES = ("round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity")
ENGINES = ("p-0", "p-1", "p-2", "d-0", "d-1", "big-0")
FILE = Path(__file__).parent / "wired.toml"
SLOW = ("network.bandwidth_bytes_per_s=1e9", "network.per_descriptor_s=1e-6", "network.slice_bytes=65536")


def scenario(*overrides: str) -> ResolvedScenario:
    """Real engines may stall, and simulated ones only by a fault: so a rule about that must be asked for."""
    return load(FILE, overrides=("router.abandon_stalled=false", *overrides))


def both(resolved: ResolvedScenario) -> tuple[Router, Router]:
    """The simulated one, and the live one, whose engines have all come up."""
    simulated = SimBuilder(resolved).build().router.port.endpoint
    assert isinstance(simulated, Router)
    live = router_of(LiveBuilder(resolved, transport_named("shm")))
    assert not any(live.prefill_choice.up + live.decode_choice.up)
    for engine in ENGINES:
        live.handle(EngineChanged(engine, True), 0)
    if isinstance(live, GovernedRouter) and live.roll is not None:
        for role, infos in (("prefill", live.prefill), ("decode", live.decode)):
            for number, info in enumerate(infos):
                live.handle(EngineReported(role, number, info), 0)  # type: ignore[arg-type]
    return simulated, live


def anatomy(thing: Any) -> Any:
    """All that an endpoint is made of, also what is no state of it and in no fingerprint."""
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "__struct_fields__"):
        return [anatomy(item) for item in thing]
    if isinstance(thing, dict):
        return {key: anatomy(value) for key, value in thing.items()}
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    if hasattr(thing, "__struct_fields__") or not slots:
        return thing
    return type(thing), {slot: anatomy(getattr(thing, slot)) for slot in slots}


def same_answers(simulated: Router, live: Router) -> None:
    """Sessions that come back, a client that hangs up, an engine that is lost, and legs that end."""
    legs: list[Any] = []
    for number in range(40):
        session = number % 7
        names = tuple(range(100 * session, 100 * session + 2 + number // 7))
        events: list[Any] = [RequestArrived(number, False, 64 * len(names) + 10, names, session)]
        if number % 5 == 4:
            events.append(ClientGone(number - 3))
        if number == 20:
            events += [EngineLost("p-1"), EngineLost("d-0")]
        if number == 30:
            events += [EngineChanged("p-1", True), EngineChanged("d-0", True)]
        for leg in legs[::2]:
            if type(leg) is DispatchPrefill:
                params = KvParams(live.prefill[leg.engine], leg.xid, leg.request_id, 3)
                events.append(PrefillAnswered(leg.request_id, params))
            elif type(leg) is DispatchDecode:
                events.append(DecodeEnded(leg.request_id))
        legs = legs[1::2]
        for event in events:
            answers = live.handle(event, number)
            assert simulated.handle(event, number) == answers
            assert simulated.fingerprint() == live.fingerprint()
            legs += answers
    assert live.attempts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_routers_of_a_policy_are_equal(policy: str, method: str) -> None:
    simulated, live = both(scenario(f"router.policy={policy}", f"transfer.method={method}"))
    # With a store, D computes the prompt of the last attempt.
    assert type(simulated) is type(live) is (GovernedRouter if method == "kv-store" else Router)
    assert live.prefill_choice.policy == live.decode_choice.policy == policy
    assert anatomy(live) == anatomy(simulated)
    same_answers(simulated, live)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (("router.prefill_policy=prefix-aware", "router.prefix_weight=2", "router.prefix_memory_tokens=640"), Router),
        (("router.decode_policy=session-affinity", "router.affinity_most_load=2"), Router),
        (("router.dispatch=concurrent", "router.on_failure=retry"), Router),
        (("router.max_inflight=5", "router.max_queue_tokens=1000"), GovernedRouter),
        (("router.disaggregate_above_tokens=150", "router.decode_policy=prefix-aware"), GovernedRouter),
        (("router.disaggregate_above_tokens=auto",), GovernedRouter),
        (("router.disaggregate_above_tokens=auto", "router.dispatch=concurrent", *SLOW), GovernedRouter),
        (("router.on_failure=recompute", "router.max_attempts=3"), GovernedRouter),
        (("router.hedge_after_s=0.5",), HedgingRouter),
        (("router.abandon_stalled=true",), WatchingRouter),
        (("router.abandon_stalled=true", "router.stalled_after_s=2", "router.hedge_after_s=0.5"), HedgingRouter),
        (("router.heartbeat_s=1", "router.silent_after_s=4"), GovernedRouter),
    ],
    ids=lambda overrides: overrides[0].partition(".")[2] if isinstance(overrides, tuple) else "",
)
def test_the_routers_of_other_keys_are_equal(overrides: tuple[str, ...], kind: type[Router]) -> None:
    simulated, live = both(scenario(*overrides))
    assert type(simulated) is type(live) is kind
    assert anatomy(live) == anatomy(simulated)
    if kind is not HedgingRouter:
        same_answers(simulated, live)


def test_what_differs_is_found() -> None:
    """The control: another seed, another memory."""
    one, other = scenario("router.policy=two-choices"), scenario("router.policy=two-choices", "scenario.seed=8")
    assert anatomy(both(one)[0]) != anatomy(both(other)[1])
    one, other = (scenario("router.policy=prefix-aware", f"pool.big.kv_tokens={tokens}") for tokens in (8192, 16384))
    assert anatomy(both(one)[0]) != anatomy(both(other)[1])
