"""Faults of requests: names that never match, late or cancelled legs, malformed and foreign parameters (rows 1, 2, 3, 6
and 9), and the named cases of stale references and leases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio

from benchmarks.vllm.cases import case
from benchmarks.vllm.client import ASK_PREFILL, Reply, new_request_id
from benchmarks.vllm.model import MAX_MODEL_LEN, prompt
from benchmarks.vllm.scene import Finding, Scene, Setup, cell, in_advance, unknown

NO_REQUEST_S: Final = 12.0
"""`no_request` and 2 s."""
AT_ONCE_S: Final = 1.0
RESOLVED: Final = ("right tokens", "error")
LEASE_S: Final = 6
"""Short enough to wait for; stock's heartbeats are every sixth of it."""
SMALL_POOL: Final = ("--max-model-len", "512", "--num-gpu-blocks-override", "5")
"""4 blocks that hold one prompt of 480 tokens: the next prompt takes them in the opposite order."""


def line(verdict: str, reply: Reply, held: dict[str, int] | None = None, **more: Any) -> str:
    """Return what was observed of one request, in a cell of the table."""
    cells = [f"{verdict} after {reply.seconds:.1f} s"]
    if held is not None:
        cells.append(f"blocks held: P {held['P']}, D {held['D']}")
    return "; ".join([*cells, *(f"{name.replace('_', ' ')}: {cell(value)}" for name, value in more.items())])


async def _never_matches(scene: Scene) -> Finding:
    tokens = prompt(300, f"unmatched/{scene.setup.policy}")
    request_id = new_request_id()
    first = prompt(200, f"first/{scene.setup.policy}")
    params = await scene.prefill(first, request_id)
    await scene.decode(first, params, request_id)
    reply = await scene.decode(tokens, unknown(params), new_request_id())
    verdict = await scene.verdict_of(reply, tokens)
    held = await scene.held()
    met = verdict in RESOLVED and reply.seconds <= NO_REQUEST_S and not any(held.values())
    return Finding(met, line(verdict, reply, held), {"seconds": reply.seconds, "verdict": verdict, "held": held})


@case("1", "D registers with an id that never matches", "right tokens within 12 s; blocks back")
async def never_matches(scene: Scene) -> Finding:
    """D is sent a decode leg whose names P has never seen. Policy recompute."""
    return await _never_matches(scene)


@case("1-fail", "the same, policy fail", "an error within 12 s; blocks back", Setup(policy="fail"))
async def never_matches_fail(scene: Scene) -> Finding:
    """D is sent a decode leg whose names P has never seen. Policy fail."""
    return await _never_matches(scene)


@case("2", "D arrives after P's lease has ended", "resolved within 1 s", Setup(lease_s=LEASE_S))
async def late(scene: Scene) -> Finding:
    """The decode leg is sent 4 s after the lease of the prefill leg has ended. D has connected to P before."""
    await scene.sane("late")
    tokens, request_id = prompt(300, "late"), new_request_id()
    params = await scene.prefill(tokens, request_id)
    await trio.sleep(LEASE_S + 4)
    reply = await scene.decode(tokens, params, request_id)
    verdict = await scene.verdict_of(reply, tokens)
    held = await scene.held()
    met = verdict in RESOLVED and reply.seconds <= AT_ONCE_S and not any(held.values())
    return Finding(met, line(verdict, reply, held), {"seconds": reply.seconds, "verdict": verdict, "held": held})


@case("3", "the client of a waiting D hangs up", "0 blocks held after 2 s, EngineCore alive")
async def hang_up(scene: Scene) -> Finding:
    """5 decode legs wait for what never comes; their clients hang up after 2 s."""
    request_id = new_request_id()
    params = await scene.prefill(prompt(200, "hang-up"), request_id)
    await scene.decode(prompt(200, "hang-up"), params, request_id)
    async with trio.open_nursery() as nursery:
        for index in range(5):
            tokens = prompt(300, f"hang-up/{index}")
            leave = partial(scene.decode, tokens, unknown(params), new_request_id(), timeout_s=2.0)
            nursery.start_soon(leave)
    held = await scene.held()
    alive = await scene.alive()
    sane = all(alive.values()) and await scene.sane("hang-up")
    met = sane and not any(held.values())
    observed = (
        f"blocks held after 2 s: P {held['P']}, D {held['D']}; alive {cell(alive)}; next request right: {cell(sane)}"
    )
    return Finding(met, observed, {"held": held, "alive": alive, "sane": sane})


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda params: {name: value for name, value in params.items() if name != key}


def _with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda params: params | changes


MALFORMED: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "no tp_size": _without("tp_size"),
    "no remote_request_id": _without("remote_request_id"),
    "no remote_engine_id": _without("remote_engine_id"),
    "no remote_port": _without("remote_port"),
    "tp_size a text": _with(tp_size="two"),
    "tp_size 0": _with(tp_size=0),
    "remote_port -1": _with(remote_port=-1),
    "remote_engine_id a number": _with(remote_engine_id=7),
    "remote_block_ids a text": _with(remote_block_ids="abc"),
    "block ids out of range": _with(remote_block_ids=[[10**6, 10**6 + 1, 10**6 + 2]]),
    "pdflow's object a number": _with(pdflow=7),
}


async def _malformed(scene: Scene, allowed: Callable[[str, Reply], bool]) -> Finding:
    results: dict[str, str] = {}
    bad = 0
    for name, change in MALFORMED.items():
        tokens, request_id = prompt(300, f"malformed/{name}"), new_request_id()
        params = await scene.prefill(tokens, request_id)
        if name.startswith("pdflow") and scene.stock:
            continue
        reply = await scene.decode(tokens, change(copy.deepcopy(params)), request_id, timeout_s=20)
        verdict = await scene.verdict_of(reply, tokens)
        verdict_of_it = f"{verdict} {reply.status}" if verdict == "error" else verdict
        dead = [side for side, runs in (await scene.alive()).items() if not runs]
        sane = not dead and await scene.sane(f"malformed/{name}")
        if not allowed(verdict, reply) or not sane:
            bad += 1
        results[name] = verdict_of_it + (f", {'+'.join(dead)} DEAD" if dead else "" if sane else ", next request wrong")
        if not sane:
            for instance in (scene.p, scene.d):
                await scene.restart(instance)
    observed = "; ".join(f"{name}: {result}" for name, result in results.items())
    return Finding(not bad, observed, {"results": results})


@case("6", "malformed kv_transfer_params", "that request's error, or right tokens; others go on")
async def malformed(scene: Scene) -> Finding:
    """Decode legs whose parameters lack a field or have a wrong type, one after another; a plain request after each."""
    return await _malformed(scene, lambda verdict, _: verdict in RESOLVED)


@case("6-middleware", "the same, with --middleware", "400 for each", Setup(middleware=True), origins=("pdflow",))
async def malformed_with_middleware(scene: Scene) -> Finding:
    """The same parameters, with pdflow's middleware in front. Block ids that P does not have are well-formed."""
    return await _malformed(scene, lambda verdict, reply: reply.status == 400 or verdict == "right tokens")


@case(
    "6-model",
    "parameters of a P that has another model",
    "that request's error or right tokens; others go on",
    Setup(p_model_seed=1),
)
async def other_model(scene: Scene) -> Finding:
    """P serves other weights of the same shape. The decode leg is sent with its parameters."""
    tokens, request_id = prompt(300, "other model"), new_request_id()
    params = await scene.prefill(tokens, request_id)
    reply = await scene.decode(tokens, params, request_id)
    verdict = await scene.verdict_of(reply, tokens)
    alive = await scene.alive()
    plain = prompt(100, "other model/plain")
    others = await scene.verdict_of(await scene.d.client.complete(plain, timeout_s=20), plain)
    met = verdict in RESOLVED and others == "right tokens" and all(alive.values())
    return Finding(met, line(verdict, reply, plain_request=others), {"verdict": verdict, "seconds": reply.seconds})


@case("9-twice", "the same X-Request-Id twice, the first attempt cancelled", "right tokens")
async def twice(scene: Scene) -> Finding:
    """Two attempts with one X-Request-Id. The first ends after its prefill leg, or with a decode leg that is aborted at
    once; the second has another prompt."""
    verdicts: dict[str, str] = {}
    for name in ("no decode leg", "decode leg aborted"):
        old, new, request_id = prompt(300, f"twice/{name}/1"), prompt(300, f"twice/{name}/2"), new_request_id()
        params = await scene.prefill(old, request_id)
        if name == "decode leg aborted":
            await scene.decode(old, params, request_id, timeout_s=0.002)
        legs = await scene.send(new, request_id=request_id, timeout_s=30)
        verdicts[name] = await scene.verdict_of(legs, new)
    met = set(verdicts.values()) == {"right tokens"}
    return Finding(met, "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()), {"verdicts": verdicts})


async def _another_prompts_params(scene: Scene) -> Finding:
    a, b, request_id = prompt(300, f"A/{scene.push}"), prompt(300, f"B/{scene.push}"), new_request_id()
    params = await scene.prefill(a, request_id)
    reply = await scene.decode(b, params, request_id)
    verdict = await scene.verdict_of(reply, b)
    # D computes the last token of the prompt itself, whatever KV it has of the others.
    as_a = reply.ok and await scene.reference.agrees(reply.tokens, [*a[:-1], b[-1]], 16)
    facts = {"verdict": verdict, "answer of the other prompt": as_a, "seconds": reply.seconds}
    return Finding(verdict in RESOLVED, line(verdict, reply, answer_of_the_other_prompt=as_a), facts)


@case("9-params", "another prompt's parameters, push", "right tokens")
async def another_prompt_push(scene: Scene) -> Finding:
    """The decode leg of prompt B is sent with the parameters, and the request id, of prompt A."""
    return await _another_prompts_params(scene)


@case("9-params-pull", "another prompt's parameters, pull", "right tokens", mode="pull")
async def another_prompt_pull(scene: Scene) -> Finding:
    """The decode leg of prompt B is sent with the parameters, and the request id, of prompt A."""
    return await _another_prompts_params(scene)


@case(
    "stale-reference",
    "vllm#52234: a reference is used again after P's blocks hold another prompt",
    "never a 200 with wrong tokens",
    Setup(p_arguments=SMALL_POOL),
    mode="pull",
)
async def stale_reference(scene: Scene) -> Finding:
    """P has 4 blocks. Prompts A and B pass through them; prompt C is prefilled into them. Then D is sent a new prompt
    with A's parameters."""
    old, middle, current, new = (prompt(480, f"stale/{name}") for name in "ABCN")
    stale: dict[str, Any] = {}
    for tokens in (old, middle):
        request_id = new_request_id()
        params = await scene.prefill(tokens, request_id)
        stale = stale or copy.deepcopy(params)
        await scene.decode(tokens, params, request_id)
        await scene.held()
    await scene.prefill(current, new_request_id())
    reply = await scene.decode(new, stale, new_request_id())
    verdict = await scene.verdict_of(reply, new)
    as_current = reply.ok and await scene.reference.agrees(reply.tokens, [*current[:-1], new[-1]], 16)
    facts = {"verdict": verdict, "status": reply.status, "answer of the previous prompt": as_current}
    return Finding(verdict in RESOLVED, line(verdict, reply, answer_of_the_previous_prompt=as_current), facts)


@case(
    "read-after-lease",
    "aws-do-eks#84: a READ after the lease, P's blocks hold another prompt",
    "never a 200 with wrong tokens",
    Setup(p_arguments=SMALL_POOL, lease_s=LEASE_S),
    mode="pull",
)
async def read_after_lease(scene: Scene) -> Finding:
    """P has 4 blocks and prefills A; A's lease ends and B is prefilled. Then A's decode leg is sent."""
    await scene.sane("read-after-lease")
    a, b, request_id = prompt(480, "lease/A"), prompt(480, "lease/B"), new_request_id()
    params = await scene.prefill(a, request_id)
    await trio.sleep(LEASE_S + 4)
    await scene.prefill(b, new_request_id())
    reply = await scene.decode(a, params, request_id)
    verdict = await scene.verdict_of(reply, a)
    return Finding(verdict in RESOLVED, line(verdict, reply), {"verdict": verdict, "seconds": reply.seconds})


async def _many_leases(scene: Scene, concurrent: bool) -> Finding:
    count, max_tokens = 128, 64
    prompts = [prompt(150, f"leases/{concurrent}/{index}") for index in range(count)]
    params = await scene.prefill(prompt(100, "leases"), request_id := new_request_id())
    await scene.decode(prompt(100, "leases"), params, request_id)
    replies: dict[int, Reply] = {}
    longest = 0.0

    async def one(index: int) -> None:
        nonlocal longest
        name, tokens = new_request_id(), prompts[index]
        if concurrent:
            ask: dict[str, Any] = dict(ASK_PREFILL)
            known = in_advance(params, name)
            if "pdflow" in known:
                ask["pdflow"] = {"xid": name}
            leg = partial(scene.p.client.complete, tokens, 1, request_id=name, params=ask, timeout_s=LONG_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leg)
                replies[index] = await scene.decode(tokens, known, name, max_tokens, timeout_s=LONG_S)
        else:
            known = await scene.prefill(tokens, name, timeout_s=LONG_S)
            replies[index] = await scene.decode(tokens, known, name, max_tokens, timeout_s=LONG_S)
        longest = max(longest, replies[index].seconds)

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(one, index)
    verdicts = [await scene.verdict_of(replies[index], prompts[index], max_tokens) for index in range(count)]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    held = await scene.held()
    met = counts == {"right tokens": count} and not any(held.values())
    observed = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    facts = {"counts": counts, "longest_s": longest, "held": held}
    return Finding(met, f"{observed}; longest {longest:.0f} s, lease {LEASE_S} s; blocks held: {cell(held)}", facts)


LONG_S: Final = 240.0
"""64 pairs of requests, one pair after the other, at 64 tokens each: 20 to 80 s by the speed of the machine."""
LEASES: Final = Setup(lease_s=LEASE_S, d_arguments=("--max-num-seqs", "2"))
"""D decodes two requests at a time: the others wait for many times the lease."""


@case("leases", "vllm#53095: 128 transfers open for longer than the lease", "all right", LEASES)
async def leases(scene: Scene) -> Finding:
    """128 requests at once, each decode leg sent after its prefill leg; D takes two at a time."""
    return await _many_leases(scene, concurrent=False)


@case("leases-concurrent", "the same, both legs sent at once", "all right", LEASES)
async def leases_concurrent(scene: Scene) -> Finding:
    """128 requests at once, both legs of each at the same time, as by vLLM's proxy for push."""
    return await _many_leases(scene, concurrent=True)


@case(
    "prefill-4xx",
    "sglang#40606: a prefill ends with 4xx while its decode waits",
    "status kept; 0 blocks held after 2 s",
    Setup(p_arguments=("--max-model-len", "512")),
)
async def prefill_4xx(scene: Scene) -> Finding:
    """Both legs are sent at once; P answers 400, as the prompt is too long for it, and the decode leg is ended."""
    params = await scene.prefill(prompt(100, "4xx"), request_id := new_request_id())
    await scene.decode(prompt(100, "4xx"), params, request_id)
    name, tokens = new_request_id(), prompt(MAX_MODEL_LEN // 2, "4xx/long")
    status = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.decode, tokens, in_advance(params, name), name)
        await trio.sleep(0.5)
        reply = await scene.p.client.complete(tokens, 1, request_id=name, params=ASK_PREFILL)
        status = reply.status
        nursery.cancel_scope.cancel()
    held = await scene.held()
    sane = await scene.sane("4xx")
    met = status == 400 and sane and not any(held.values())
    observed = (
        f"{status} at once; blocks held after 2 s: P {held['P']}, D {held['D']}; next request right: {cell(sane)}"
    )
    return Finding(met, observed, {"status": status, "held": held, "sane": sane})
