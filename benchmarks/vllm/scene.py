"""A running pair to which a fault is done, and what can be seen of it from outside.

`Setup` says how the pair is started, in words that both origins understand: each of them has its own key for a lease.
`Scene` keeps the pair, sends requests to it, judges tokens against one vLLM alone, counts blocks that are still held,
and restarts what a fault has broken.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import trio

from benchmarks.vllm.client import Legs, Reply, new_request_id, prompt_tokens_by_source, total, two_legs
from benchmarks.vllm.connectors import mode_of, origin_of
from benchmarks.vllm.instances import SIDE_PORT, Instance, Options
from benchmarks.vllm.model import prompt
from benchmarks.vllm.reference import Reference

Verdict: TypeAlias = Literal["right tokens", "WRONG tokens", "error", "hung", "broken"]
OUTCOMES: Final[dict[str, Verdict]] = {"error": "error", "hung": "hung", "broken": "broken"}
HELD_S: Final = 2.0
"""Blocks must be back so soon after a request has ended."""
MIDDLEWARE: Final = "pdflow_runtime.vllm.middleware.CheckParams"
WATCHDOG_S: Final = 20
"""Stock's push_registration_timeout: shorter than the client's timeout, in favour of stock."""


@attrs.frozen(kw_only=True)
class Setup:
    """How a pair is started for a fault."""

    policy: str = "recompute"
    """kv_load_failure_policy of D."""
    lease_s: int | None = None
    """How long P keeps a finished prompt; None for the default, 30 s in both."""
    static_ids: bool = False
    """The same engine_id and the same ports after a restart, as in a StatefulSet."""
    p_arguments: tuple[str, ...] = ()
    d_arguments: tuple[str, ...] = ()
    p_model_seed: int = 0
    middleware: bool = False
    """pdflow's middleware, which answers 400 to wrong parameters, in both API servers."""
    faulty_nixl: bool = False
    """NIXL inside both obeys `Scene.order`."""


@attrs.frozen
class Finding:
    """What a fault did: whether the requirement is met, in one line, and the facts behind it."""

    met: bool
    observed: str
    facts: dict[str, Any] = attrs.field(factory=dict)


def cell(value: Any) -> str:
    """Return what a cell of the table says of a value, or of a value for each side: `P 0, D 3`."""
    if isinstance(value, dict):
        return ", ".join(f"{side} {cell(each)}" for side, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


class Scene:
    """One pair and what is done to it. `p` and `d` run between `start` and `stop`."""

    def __init__(self, connector: str, setup: Setup, work: Path, reference: Reference) -> None:
        self.connector = connector
        self.setup = setup
        self.work = work
        self.reference = reference
        self.order_folder = work / "orders"
        self.order_folder.mkdir(parents=True, exist_ok=True)
        self.p = Instance(f"{connector}-p", "prefill", self._options("0", setup.p_arguments, "prefill-0"), work)
        self.d = Instance(f"{connector}-d", "decode", self._options("1", setup.d_arguments, "decode-0"), work)
        self.p.options = attrs.evolve(self.p.options, model_seed=setup.p_model_seed)

    @property
    def stock(self) -> bool:
        return origin_of(self.connector) == "stock"

    @property
    def push(self) -> bool:
        return mode_of(self.connector) == "push"

    def _options(self, core: str, arguments: tuple[str, ...], engine_id: str) -> Options:
        setup = self.setup
        extra: dict[str, Any] = {}
        if setup.middleware:
            arguments = (*arguments, "--middleware", MIDDLEWARE)
        if self.stock:
            extra["push_registration_timeout"] = WATCHDOG_S
            if setup.lease_s is not None:
                extra["kv_lease_duration"] = setup.lease_s
        else:
            if setup.lease_s is not None:
                extra["lease_s"] = setup.lease_s
            if setup.static_ids:
                extra |= {"allow_static_engine_id": True, "port": SIDE_PORT}
        return Options(
            connector=self.connector,
            core=core,
            policy=setup.policy,
            engine_id=engine_id if setup.static_ids else None,
            extra_config=extra,
            arguments=arguments,
            environment={"BENCH_FAULTS": str(self.order_folder)} if setup.faulty_nixl else {},
        )

    async def start(self) -> None:
        for file in self.order_folder.iterdir():
            file.unlink()
        self.p.start()
        self.d.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.p.ready)
            nursery.start_soon(self.d.ready)

    async def stop(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.p.stop)
            nursery.start_soon(self.d.stop)

    async def restart(self, instance: Instance) -> None:
        await instance.restart(same_ports=self.setup.static_ids)

    def order(self, fault: str) -> Path:
        """Order a fault of NIXL, by its name in `inside/nixl_faults.py`. Return the file that orders it."""
        file = self.order_folder / fault
        file.touch()
        return file

    async def send(self, tokens: list[int], max_tokens: int = 16, **named: Any) -> Legs:
        """Send one request through both legs."""
        return await two_legs(self.p.client, self.d.client, tokens, max_tokens, **named)

    async def prefill(self, tokens: list[int], request_id: str, **named: Any) -> dict[str, Any]:
        """Send the prefill leg alone, which must succeed, and return the parameters for its decode leg."""
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        reply = await self.p.client.complete(tokens, 1, request_id=request_id, params=params, **named)
        assert reply.params is not None, f"P answered a plain prefill leg with {reply}"
        return reply.params

    async def decode(
        self, tokens: list[int], params: Any, request_id: str, max_tokens: int = 16, **named: Any
    ) -> Reply:
        """Send the decode leg alone."""
        return await self.d.client.complete(tokens, max_tokens, request_id=request_id, params=params, **named)

    async def verdict_of(self, reply: Reply | Legs | None, tokens: list[int], max_tokens: int = 16) -> Verdict:
        """Compare an answer with that of one vLLM alone. A None, no decode leg, counts as an error."""
        if isinstance(reply, Legs):
            reply = reply.d
        if reply is None:
            return "error"
        if not reply.ok:
            return OUTCOMES[reply.outcome]
        right = await self.reference.agrees(reply.tokens, tokens, max_tokens)
        return "right tokens" if right else "WRONG tokens"

    async def sane(self, name: str, timeout_s: float = 20.0) -> bool:
        """Return whether a fresh request goes through both legs and is answered with the right tokens."""
        tokens = prompt(200, f"sane/{name}/{self.p.starts}/{self.d.starts}")
        return await self.verdict_of(await self.send(tokens, timeout_s=timeout_s), tokens) == "right tokens"

    async def loaded_tokens(self) -> int:
        """Return how many prompt tokens D has got from P so far, since it started."""
        sources = prompt_tokens_by_source(await self.d.client.metrics())
        return sources.get("external_kv_transfer", 0)

    async def alive(self) -> dict[str, bool]:
        """Return for each instance whether its engine core runs, by /health."""
        return {"P": await self.p.client.healthy(), "D": await self.d.client.healthy()}

    async def held(self, within_s: float = HELD_S) -> dict[str, int]:
        """Return the blocks that each instance still holds after `within_s`, or 0 as soon as they are back."""
        return {"P": await blocks_held(self.p, within_s), "D": await blocks_held(self.d, within_s)}

    async def retried(self, attempt: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        """Call `attempt` until it returns True; False if it does not within this time."""
        with trio.move_on_after(within_s):
            while not await attempt():
                await trio.sleep(0.5)
            return True
        return False


async def blocks_held(instance: Instance, within_s: float) -> int:
    """Return the blocks in use, once none is or `within_s` have passed; -1 where the instance does not answer.

    vLLM refreshes the gauge in engine steps only, so a plain request of one token is sent before it is read.
    """
    held = -1
    deadline = trio.current_time() + within_s
    with trio.move_on_after(within_s + 5.0):
        while held:
            if not (await instance.client.complete([2], 1, timeout_s=5.0)).ok:
                return -1
            metrics = await instance.client.metrics()
            config = next(sample for sample in metrics if sample.startswith("vllm:cache_config_info"))
            usable = int(config.partition('num_gpu_blocks="')[2].partition('"')[0]) - 1
            held = round(total(metrics, "vllm:kv_cache_usage_perc") * usable)
            if held and trio.current_time() > deadline:
                break
            await trio.sleep(0.1)
    return held


def unknown(params: dict[str, Any]) -> dict[str, Any]:
    """Return these parameters with the names of a prompt that P has never had."""
    changed = params | {"remote_request_id": f"cmpl-{new_request_id()}-0-{secrets.token_hex(4)}"}
    if "pdflow" in params:
        changed["pdflow"] = params["pdflow"] | {"xid": secrets.token_hex(16), "digest": 0}
    return changed


def in_advance(params: dict[str, Any], name: str) -> dict[str, Any]:
    """Return parameters of a decode leg that is sent before P has answered, as a router does that knows P's coordinates
    from an earlier answer. `name`: of the prompt, in both legs."""
    keys = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
    built: dict[str, Any] = {key: params[key] for key in keys} | {"do_remote_prefill": True, "remote_request_id": name}
    if "pdflow" in params:
        own = params["pdflow"]
        built["pdflow"] = {key: own[key] for key in ("block_size", "ranks") if key in own} | {"xid": name}
    return built
