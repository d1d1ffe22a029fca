"""Faults of processes: P or D killed, restarted, stopped or idle (rows 4 and 5, vllm#49238, and the tests of idle and
stalled engines)."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from benchmarks.vllm.cases import case
from benchmarks.vllm.client import Legs, Reply, new_request_id
from benchmarks.vllm.instances import Instance
from benchmarks.vllm.model import prompt
from benchmarks.vllm.request_faults import RESOLVED, line
from benchmarks.vllm.scene import HELD_S, Finding, Scene, Setup, cell

REFUSED_S: Final = 2.0
"""A killed process on this host refuses connections: requests are resolved so soon after."""
DEAD_S: Final = 15.0
"""`dead_ns`: a stopped P takes connections, and is silent. Blocks that a killed one might still write to stay in
quarantine for as long: a refusal proves nothing of a WRITE that a NIC has begun."""
LEASE_S: Final = 30.0
"""The default of a lease, in both."""
UNDER_WAY: Final = Setup(faulty_nixl=True)


def summary(verdicts: list[str]) -> str:
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))


async def _back(scene: Scene) -> tuple[int, str]:
    """Return the blocks that D holds `dead_ns` after P was killed, and what a cell says of them."""
    since = trio.current_time()
    held = (await scene.held(DEAD_S + HELD_S))["D"]
    return held, f"blocks held: D {held}" if held else f"blocks back after {trio.current_time() - since:.1f} s"


async def _p_again(scene: Scene) -> bool:
    """Start P anew after it was killed, and return whether the first request to it is right."""
    scene.p.start(same_ports=scene.setup.static_ids)
    await scene.p.ready()
    return await scene.sane("P again")


@case("4-before", "P killed before the WRITE", "resolved within 2 s; blocks back within 17 s; the next P serves")
async def killed_before(scene: Scene) -> Finding:
    """P is killed between the legs of a request. D has been connected to it."""
    await scene.sane("killed-before")
    tokens, request_id = prompt(300, "killed-before"), new_request_id()
    params = await scene.prefill(tokens, request_id)
    await scene.p.kill()
    reply = await scene.decode(tokens, params, request_id)
    verdict = await scene.verdict_of(reply, tokens)
    held, back = await _back(scene)
    again = await _p_again(scene)
    met = verdict in RESOLVED and reply.seconds <= REFUSED_S and not held and again
    facts = {"verdict": verdict, "seconds": reply.seconds, "held": held, "next P": again}
    return Finding(met, f"{line(verdict, reply)}; {back}; right with the next P: {cell(again)}", facts)


async def _killed_during(scene: Scene) -> tuple[list[str], float, Finding]:
    """Kill P while NIXL says of 8 transfers of 1,900 tokens that they are under way. Over tcp: 8 decode legs wait for a
    stopped P; it is woken, and killed at once. Return how the requests ended, how long after the kill the last did, and
    a finding of all but these."""
    await scene.sane("killed-during")
    prompts = [prompt(1900, f"killed-during/{index}") for index in range(8)]
    names = [new_request_id() for _ in prompts]
    params = [await scene.prefill(tokens, name) for tokens, name in zip(prompts, names, strict=True)]
    replies: dict[int, Reply] = {}
    killed_at = ended_at = 0.0

    async def one(index: int) -> None:
        nonlocal ended_at
        replies[index] = await scene.decode(prompts[index], params[index], names[index])
        ended_at = max(ended_at, trio.current_time())

    by_nixl = "+tcp" not in scene.connector
    async with trio.open_nursery() as nursery:
        if by_nixl:
            order = scene.order("hold-transfer")
        else:
            scene.p.suspend()
        for index in range(len(prompts)):
            nursery.start_soon(one, index)
        await trio.sleep(1.0)
        if not by_nixl:
            scene.p.resume()
        await scene.p.kill()
        killed_at = trio.current_time()
        if by_nixl:
            order.unlink()
    verdicts: list[str] = [await scene.verdict_of(replies[index], tokens) for index, tokens in enumerate(prompts)]
    held, back = await _back(scene)
    again = await _p_again(scene)
    seconds = max(ended_at - killed_at, 0.0)
    observed = f"{summary(verdicts)}, the last {seconds:.1f} s after the kill; {back}; next P: {cell(again)}"
    facts = {"verdicts": verdicts, "seconds": seconds, "held": held, "next P": again}
    return verdicts, seconds, Finding(not held and again, observed, facts)


@case("4-during", "P killed during WRITEs", "right tokens; blocks back within 17 s; the next P serves", UNDER_WAY)
async def killed_during(scene: Scene) -> Finding:
    """D computes the 8 prompts: how long that takes is the machine's matter, and the next row has the wait for P."""
    verdicts, _, finding = await _killed_during(scene)
    return attrs.evolve(finding, met=finding.met and set(verdicts) == {"right tokens"})


@case(
    "4-during-fail",
    "the same, policy fail",
    "errors within 2 s of the kill; blocks back within 17 s; the next P serves",
    attrs.evolve(UNDER_WAY, policy="fail"),
)
async def failed_during(scene: Scene) -> Finding:
    """Each request fails as soon as D knows that no KV will come."""
    verdicts, seconds, finding = await _killed_during(scene)
    return attrs.evolve(finding, met=finding.met and set(verdicts) == {"error"} and seconds <= REFUSED_S)


@case("4-after", "P killed after the WRITE", "the answer goes on, right; the next P serves")
async def killed_after(scene: Scene) -> Finding:
    """P is killed while D decodes what it has been sent."""
    tokens, request_id = prompt(300, "killed-after"), new_request_id()
    params = await scene.prefill(tokens, request_id)
    verdict = ""

    async def decode() -> None:
        nonlocal verdict
        verdict = await scene.verdict_of(await scene.decode(tokens, params, request_id, 400), tokens, 400)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(decode)
        await trio.sleep(0.5)
        await scene.p.kill()
    held = (await scene.held())["D"]
    again = await _p_again(scene)
    observed = f"{verdict}; blocks held: D {held}; right with the next P: {cell(again)}"
    met = verdict == "right tokens" and not held and again
    return Finding(met, observed, {"verdict": verdict, "held": held, "next P": again})


async def _restarts(scene: Scene) -> Finding:
    results: dict[str, str] = {}
    await scene.sane("restarts")
    for name, instance in (("D", scene.d), ("P", scene.p)):
        await instance.kill()
        instance.start(same_ports=scene.setup.static_ids)
        await instance.ready()
        tokens = prompt(300, f"restarts/{name}/{scene.setup.static_ids}")
        legs = await scene.send(tokens, timeout_s=30)
        verdict = await scene.verdict_of(legs, tokens)
        loaded = "" if await scene.loaded_tokens() else ", computed by D"
        results[name] = f"{verdict} after {legs.seconds:.1f} s{loaded}"
    met = all(result.startswith("right") for result in results.values())
    observed = "; ".join(f"{name} restarted: {result}" for name, result in results.items())
    return Finding(met, observed, {"results": results})


@case("5-fresh", "D, then P, killed and restarted, fresh engine_id", "the first request after it is right")
async def restarts_fresh(scene: Scene) -> Finding:
    """D is killed and started anew, then P, each with an engine_id of its own."""
    return await _restarts(scene)


@case("5-static", "the same, static engine_id", "the first request after it is right", Setup(static_ids=True))
async def restarts_static(scene: Scene) -> Finding:
    """D is killed and started anew, then P, each with the engine_id and the ports that it had."""
    return await _restarts(scene)


@case(
    "p-restart",
    "vllm#49238: P restarted under load, same engine_id and ports",
    "0 wrong, 0 hung, D alive, blocks back",
    Setup(static_ids=True),
)
async def p_restarted_under_load(scene: Scene) -> Finding:
    """16 requests at a time go through the pair; P is killed after 5 s and started anew; 10 s later the load ends."""
    await scene.sane("p-restart")
    ended: list[tuple[list[int], Legs]] = []
    stopping = False

    async def client(number: int) -> None:
        index = 0
        while not stopping:
            tokens = prompt(100 + 50 * (number % 16), f"p-restart/{number}/{index % 40}")
            ended.append((tokens, await scene.send(tokens, timeout_s=30)))
            await trio.sleep(0.1 if ended[-1][1].p.ok else 0.5)
            index += 1

    async with trio.open_nursery() as nursery:
        for number in range(16):
            nursery.start_soon(client, number)
        await trio.sleep(5.0)
        await scene.p.kill()
        scene.p.start(same_ports=True)
        await scene.p.ready()
        await trio.sleep(10.0)
        stopping = True
    through = [(tokens, legs.d) for tokens, legs in ended if legs.d is not None]
    verdicts = [await scene.verdict_of(reply, tokens) for tokens, reply in through]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    alive = await scene.alive()
    held = await scene.held()
    sane = await scene.sane("p-restart/after")
    met = set(counts) <= set(RESOLVED) and all(alive.values()) and not any(held.values()) and sane
    observed = (
        f"{summary(list(verdicts))}; alive {cell(alive)}; blocks held: {cell(held)}; next request right: {cell(sane)}"
    )
    facts = {"counts": counts, "alive": alive, "held": held, "sane": sane, "longest_s": longest(through)}
    return Finding(met, observed, facts)


def longest(replies: list[tuple[list[int], Reply]]) -> float:
    return max((reply.seconds for _, reply in replies), default=0.0)


@case("idle", "20 s without a request", "0 failed")
async def idle(scene: Scene) -> Finding:
    """Requests before and after 20 s in which none comes."""
    verdicts = []
    for index in range(4):
        if index % 2:
            await trio.sleep(20.0)
        tokens = prompt(300, f"idle/{index}")
        verdicts.append(await scene.verdict_of(await scene.send(tokens), tokens))
    return Finding(set(verdicts) == {"right tokens"}, summary(list(verdicts)), {"verdicts": verdicts})


async def _stopped(scene: Scene, instance: Instance, seconds: float, count: int = 4) -> tuple[list[Reply], list[str]]:
    """Stop an instance before the decode legs of `count` requests, which begin then, and wake it after `seconds`."""
    await scene.sane("stopped")
    prompts = [prompt(300, f"stopped/{instance.role}/{seconds}/{index}") for index in range(count)]
    names = [new_request_id() for _ in prompts]
    params = [await scene.prefill(tokens, name) for tokens, name in zip(prompts, names, strict=True)]
    replies: dict[int, Reply] = {}

    async def one(index: int) -> None:
        replies[index] = await scene.decode(prompts[index], params[index], names[index])

    async with trio.open_nursery() as nursery:
        instance.suspend()
        for index in range(count):
            nursery.start_soon(one, index)
        await trio.sleep(seconds)
        instance.resume()
    in_order = [replies[index] for index in range(count)]
    return in_order, [await scene.verdict_of(reply, tokens) for reply, tokens in zip(in_order, prompts, strict=True)]


async def _stopped_finding(
    scene: Scene, instance: Instance, seconds: float, within_s: float, held_s: float = HELD_S
) -> Finding:
    replies, verdicts = await _stopped(scene, instance, seconds)
    slowest = max(reply.seconds for reply in replies)
    sane = await scene.sane("woken")
    held = await scene.held(held_s)
    met = set(verdicts) == {"right tokens"} and slowest <= within_s and sane and not any(held.values())
    observed = (
        f"{summary(verdicts)}, the slowest after {slowest:.1f} s; next request right: {cell(sane)}; held: {cell(held)}"
    )
    return Finding(met, observed, {"verdicts": verdicts, "slowest_s": slowest, "sane": sane, "held": held})


@case("d-stopped", "D stopped for 20 s (SIGSTOP)", "0 failed")
async def d_stopped(scene: Scene) -> Finding:
    """D is stopped as four decode legs arrive, and woken after 20 s."""
    return await _stopped_finding(scene, scene.d, 20.0, 25.0)


@case("p-stopped-10", "P stopped for 10 s (SIGSTOP)", "0 failed")
async def p_stopped_short(scene: Scene) -> Finding:
    """P is stopped between the legs of four requests, and woken after 10 s."""
    return await _stopped_finding(scene, scene.p, 10.0, 12.0)


@case("p-stopped-20", "P stopped for 20 s", "those that wait resolve at 15 s; the first after SIGCONT is right")
async def p_stopped_long(scene: Scene) -> Finding:
    """P is stopped between the legs of four requests, and woken after 20 s. Policy recompute. P keeps the four prompts,
    for which nobody comes any more, until their leases are over."""
    return await _stopped_finding(scene, scene.p, 20.0, DEAD_S + 2.0, LEASE_S + HELD_S)
