"""What every choice of an engine must satisfy, whatever the policy: it is up or on trial, it is not the one that just
failed if there is another, and it is as good as the policy promises."""

from __future__ import annotations

from math import ceil

from pdflow.protocol.values import RequestId
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.events import NO_SESSION, RequestArrived
from pdflow_sim.check.routers.account import Role
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.setting import BLOCK_TOKENS, NAMES
from pdflow_sim.check.routers.watched_account import RouterAccount
from pdflow_sim.check.search.forward import Violation


def check_choice(account: RouterAccount, role: Role, engine: int, name: RequestId, asked: RequestArrived) -> int:
    """Check the choice of an engine for a leg, and return the tokens that the leg adds to what waits there. Raises
    Violation."""
    tried = [each for each in account.engines(role) if account.may_try(role, each, name, asked)]
    up = sorted([*account.up(role), *tried])
    leg = f"the {role} leg of {name} goes to engine {engine}"
    if engine not in up:
        raise Violation(RouterFinding.ENGINE, f"{leg}, which is not in")
    before = avoided(account, role, asked.request)
    others = [each for each in up if each not in before] or [engine]
    if account.failed == (role, engine) and up != [engine]:
        raise Violation(RouterFinding.ENGINE, f"{leg}, where it failed before")
    better = _better(account, role, engine, others, asked)
    if better:
        raise Violation(RouterFinding.ENGINE, f"{leg}: {better}")
    account.last_choices[role] = engine, tuple(up)
    if account.setting.policy == "session-affinity" and asked.session != NO_SESSION:
        account.sessions[role, asked.session] = engine, asked.prompt_tokens
    weighs = _weighs(account, role, engine, asked)
    if account.setting.policy == "prefix-aware":
        account.known[role, engine] |= frozenset(asked.prefix)
    return weighs


def avoided(account: RouterAccount, role: Role, request: int) -> set[int]:
    """Return the engines of the request's attempts so far."""
    mine = [begun for begun in account.attempts.values() if begun.request == request]
    return {begun.p if role == "prefill" else begun.d for begun in mine}


def _better(account: RouterAccount, role: Role, engine: int, others: list[int], asked: RequestArrived) -> str:
    """Return why another engine should have been chosen, or ""."""
    loads = account.loads(role)
    fewest = min(loads[each] for each in others)
    match account.setting.policy:
        case "round-robin":
            last = account.last_choices.get(role)
            if len(others) > 1 and last == (engine, tuple(account.up(role))):
                return "it had the last leg, too"
        case "least-loaded":
            if loads[engine] > fewest:
                return f"another has fewer legs of {loads}"
        case "two-choices":
            if len(others) > 1 and all(loads[engine] > loads[each] for each in others if each != engine):
                return f"every other has fewer legs of {loads}"
        case "session-affinity":
            return _less_affine(account, role, engine, others, asked)
        case "prefix-aware" if account.setting.names >= NAMES:
            return _longer(account, role, engine, others, asked)
    return ""


def _less_affine(account: RouterAccount, role: Role, engine: int, others: list[int], asked: RequestArrived) -> str:
    loads, home = account.loads(role), account.sessions.get((role, asked.session), (-1, 0))[0]
    most = ceil(SessionAffinity(0).most_load * (1 + sum(loads[each] for each in others)) / len(others))
    if home in others and loads[home] < most:
        return "" if engine == home else f"its session is at {home}"
    return "another has fewer legs" if loads[engine] > min(loads[each] for each in others) else ""


def _longer(account: RouterAccount, role: Role, engine: int, others: list[int], asked: RequestArrived) -> str:
    def merits(each: int) -> tuple[int, int, int]:
        return found(account, role, each, asked), -waits(account, role, each), -account.loads(role)[each]

    mine = merits(engine)
    for each in others:
        its = merits(each)
        if its != mine and all(one >= other for one, other in zip(its, mine, strict=True)) and its[:2] != mine[:2]:
            return f"engine {each} knows more of the prompt or has less to do"
        if its[:2] == mine[:2] and its > mine:
            return f"engine {each} has fewer legs"
    return ""


def found(account: RouterAccount, role: Role, engine: int, asked: RequestArrived) -> int:
    """Return how many tokens of a prompt an engine has been sent before, as far as the policy looks at that."""
    most = max(0, asked.prompt_tokens - 1)
    if account.setting.policy == "session-affinity":
        home, tokens = account.sessions.get((role, asked.session), (-1, 0))
        return min(tokens, most) if home == engine else 0
    known, blocks = account.known[role, engine], 0
    for prefix in asked.prefix:
        if prefix not in known:
            break
        blocks += 1
    return min(blocks * BLOCK_TOKENS, most)


def waits(account: RouterAccount, role: Role, engine: int) -> int:
    """Return the tokens of the open legs at an engine."""
    mine = (leg for (which, _), leg in account.legs.items() if which == role and leg.engine == engine and leg.open)
    return sum(leg.weighs for leg in mine)


def _weighs(account: RouterAccount, role: Role, engine: int, asked: RequestArrived) -> int:
    return asked.prompt_tokens - (found(account, role, engine, asked) if role == "prefill" else 0)
