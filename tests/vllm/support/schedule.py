"""What may happen next in a duel.

Everything that a deployment can do to a connector, but for what docs/compat.md says is not in the machine:

- a completion reaches a D rank that has not shaken hands with P (it was written on its sibling's registration): vLLM
  raises on the engine's thread. `test_stock_is_vllm.py` shows it;
- the clock moves between the writer's pass and the results, or between a step's metadata and its work: what R03 needs;
- a reader is quicker than a P rank that has yet to hear that its prompt is leased: vLLM reports it sent at once, the
  machine when that rank hears of it.

Two requests of D never name one prompt of P in their heartbeats: vLLM would stop them for both with the first.
"""

from __future__ import annotations

from random import Random
from typing import Any, TypeAlias

from pdflow.protocol.ids import engine_of, rank_of
from pdflow.protocol.values import Address
from tests.vllm.support.duel import Duel
from tests.vllm.support.nixl_stub import NixlNotification
from tests.vllm.support.observed import HEARTBEATS, REGISTERS
from tests.vllm.support.parties import PROMPT_BLOCKS

Action: TypeAlias = tuple[Any, ...]
WEIGHTS = {"work": 6, "deliver": 3, "shaken": 2, "end": 2, "pass": 3, "finish": 2, "admit": 2}
"""Of 1: what carries a transfer on comes more often than what begins one."""
MOST_PROMPTS, MOST_DECODES = 6, 8
BASES = ("cmpl-u0-0", "cmpl-u1-0")
"""Few, so that they clash."""


def possible(duel: Duel, random: Random) -> Action:
    """One action, at random: first of which kind, among those that can happen at all."""
    found = {verb: choices for verb, choices in _choices(duel, random).items() if choices}
    verbs = sorted(found)
    (verb,) = random.choices(verbs, [WEIGHTS.get(verb, 1) for verb in verbs])
    return (verb, *random.choice(found[verb]))


def _choices(duel: Duel, random: Random) -> dict[str, list[Action]]:
    running = [i for i, p in enumerate(duel.prompts) if p.state == "running"]
    queued = [i for i, d in enumerate(duel.decodes) if d.state == "queued"]
    waiting = [i for i, d in enumerate(duel.decodes) if d.state == "admitted"]
    suffix = f"-{random.randrange(16**8):08x}"
    mailed = [(e, r) for e in "PD" for r in range(duel.tps[e]) if duel.vllm[e].mail[r]]
    under_way = range(len(duel.under_way))
    arriving = [(i,) for i in under_way if _bearable(duel, *duel.under_way[i][:2])]
    return {
        "prefill": [(random.choice(BASES) + suffix,)] if len(duel.prompts) < MOST_PROMPTS else [],
        "finish": [(i,) for i in running if min(duel.worked) > duel.prompts[i].step],
        "abort prefill": [(i,) for i in running] if random.random() < 0.3 else [],
        "decode": _new_decode(duel, random, suffix),
        "admit": [(i, random.randint(1, PROMPT_BLOCKS)) for i in queued],
        "abort": [(i,) for i in queued + waiting] if random.random() < 0.4 else [],
        "step": [(e, e == "D" and random.random() < 0.3) for e in "PD" if _keeps_up(duel, e)],
        "work": mailed,
        "deliver": arriving,
        "repeat": arriving if random.random() < 0.2 else [],
        "lose": [(i,) for i in under_way] if random.random() < 0.1 else [],
        "shaken": [(i, random.random() < 0.85) for i in range(len(duel.handshakes))],
        "end": [(i, random.random() < 0.85) for i in range(len(duel.transfers))],
        "refuse": [(random.randrange(duel.tps["P"]),)] if random.random() < 0.1 and not duel.pulls else [],
        "pass": [(random.choice([1, 5, 15, 31]),)] if not mailed and not duel.unshipped else [],
    }


def _keeps_up(duel: Duel, engine: str) -> bool:
    """A worker lags by two steps at most."""
    return all(len(box) < 2 for box in duel.vllm[engine].mail)


def _bearable(duel: Duel, notification: NixlNotification, to: Address) -> bool:
    if notification.body.startswith((REGISTERS, HEARTBEATS)):
        return True
    rank = rank_of(to)
    if engine_of(to) == "P":
        name = notification.body.decode().rpartition(":")[0]
        return duel.worked[rank] > next(prompt.step for prompt in duel.prompts if prompt.name == name)
    return duel.vllm["D"].shaken_with(rank, "P")


def _new_decode(duel: Duel, random: Random, suffix: str) -> list[Action]:
    """Its id: as a router with one X-Request-Id makes it, without a suffix, P's very own, or one that clashes."""
    if len(duel.decodes) >= MOST_DECODES or not duel.prompts:
        return []
    index = random.randrange(len(duel.prompts))
    prompt = duel.prompts[index]
    known = prompt.state == "finished" and not prompt.named
    if duel.pulls and not known:
        return []
    base = prompt.name.rpartition("-")[0]
    name = random.choice([base + suffix, base, prompt.name, random.choice(BASES) + suffix])
    if any(decode.name == name for decode in duel.decodes):
        return []
    return [(name, index, known and (duel.pulls or random.random() < 0.7))]
