"""What the simulated node and the live one do differently today, each with what leaves it out of random scripts.

Each drift has a strict xfail in `test_drifts.py`, which shows it by a script of a few steps. When one is gone, its
xfail fails: remove it there and here. The list is to become empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from pdflow.engine.sequence import Phase
from pdflow.methods.catalogue import METHODS
from pdflow.protocol.ids import KvParams
from pdflow.protocol.values import Allocation
from tests.serving.play import Even, Pair, merged
from tests.serving.script import Abort, Arrive, Call, Step, Store, Together
from tests.serving.setting import BLOCK, BLOCKS, REQUESTS, STORE, Setting, request_id_of


class Drift(NamedTuple):
    """`where`: settings in which it shows. `forbids`: steps that would show it are not drawn. `even`: calls without
    what it makes differ, where it would show in every script."""

    name: str
    reason: str
    where: Callable[[Setting], bool]
    forbids: Callable[[Pair, Step], bool] | None = None
    even: Even | None = None


def decodes(setting: Setting) -> bool:
    return setting.role in ("decode", "aggregated")


def staged_prefill(setting: Setting) -> bool:
    return setting.role == "prefill" and METHODS[setting.method].staged_at_p


def staged_decode(setting: Setting) -> bool:
    return setting.role == "decode" and METHODS[setting.method].staged_at_d


def phase(pair: Pair, r: int) -> Phase | None:
    seq = pair.simulated.engine.seqs.get(r)
    return None if seq is None else seq.phase


# Aborts.


def _waits_for_first(pair: Pair, step: Step) -> bool:
    return isinstance(step, Arrive) and step.first == "follows"


FIRST_TOKEN_AWAITED = Drift(
    "p_first_token_is_awaited",
    "where P's first token is D's first input, live D loads a request when both the KV and the token are here; "
    "simulated D does not wait for the token, which is always there in time",
    lambda setting: setting.role == "decode" and setting.first_token == "prefill",
    forbids=_waits_for_first,
)

# Room beside the blocks.


def _pieces_last(calls: list[Call], step: Step) -> list[Call]:
    """What is copied and offered in a step behind everything else."""
    return merged(behind(calls, "copy", "offer"))


def behind(calls: list[Call], *kinds: str) -> list[Call]:
    last = [call for call in calls if call.kind in kinds]
    return [*(call for call in calls if call.kind not in kinds), *last]


PIECES_AT_ONCE = Drift(
    "pieces_are_copied_before_their_write_is_posted",
    "when a WRITE is posted for which P had no room so far, live P copies and offers at once what is computed already, "
    "and then posts the WRITE; simulated P posts it first, and copies when all else of that instant has happened",
    staged_prefill,
    even=_pieces_last,
)


def _blocks_last(calls: list[Call], step: Step) -> list[Call]:
    """What is given back to the pool in a step behind everything else."""
    return behind(calls, "release blocks")


FREED_BEFORE_TOLD = Drift(
    "blocks_are_free_before_the_protocol_is_told",
    "when the last copy of a prompt is made, simulated P tells the protocol that it is finished, and then gives back "
    "its blocks; live P gives them back first, and queues what it tells",
    staged_prefill,
    even=_blocks_last,
)


def _nowhere(calls: list[Call], step: Step) -> list[Call]:
    """Without where a prompt is said to lie."""
    return [call._replace(details=tuple(map(_without_place, call.details))) for call in calls]


def _without_place(detail: Any) -> Any:
    if isinstance(detail, KvParams):
        return msgspec.structs.replace(detail, blocks=())
    return None if isinstance(detail, Allocation) else detail


PULLED_PLACE = Drift(
    "where_pulled_kv_lies",
    "where D reads what P keeps beside its blocks, live P tells the protocol, and so D, where it lies there; simulated "
    "P names the KV blocks that it was computed in",
    lambda setting: staged_prefill(setting) and METHODS[setting.method].pulls,
    even=_nowhere,
)

# Prompts at P.


def prefills(setting: Setting) -> bool:
    return setting.role == "prefill"


def _never_fits(pair: Pair, step: Step) -> bool:
    return isinstance(step, Arrive) and REQUESTS[step.r].prompt > BLOCK * BLOCKS and not step.alone


def _queued_first(calls: list[Call], step: Step) -> list[Call]:
    """What the protocol is told of a prompt that has arrived, before the engine is."""
    found = [call for call in calls if not is_queued(call)]
    for call in filter(is_queued, calls):
        submit = [
            at for at, other in enumerate(found) if other.kind == "submit" and call.subject.startswith(other.subject)
        ]
        found.insert(submit[0] if submit else calls.index(call), call)
    return found


def is_queued(call: Call) -> bool:
    return is_told(call, "PrefillQueued")


def is_told(call: Call, event: str) -> bool:
    return call.kind == "tell" and call.details[0] == event


NEVER_FITS = Drift(
    "a_prompt_that_never_fits_p",
    "simulated P tells the protocol of it before it asks the engine, and then that it has ended, so that a "
    "registration meets a tombstone; live P answers REJECTED and tells the protocol nothing",
    lambda setting: prefills(setting) and not staged_prefill(setting) and not store_prefill(setting),
    forbids=_never_fits,
)
QUEUED_ORDER = Drift(
    "p_is_told_of_a_prompt_before_its_engine",
    "simulated P tells the protocol of a prompt and then submits it; live P submits it first",
    prefills,
    even=_queued_first,
)

# Prompts at P, on their way into a store and from there.


def store_prefill(setting: Setting) -> bool:
    return prefills(setting) and METHODS[setting.method].stores


def _end_answered(calls: list[Call], step: Step) -> list[Call]:
    """Without the answer to who has hung up on a prefill that ends."""
    ended = {call.subject.replace("x", "r") for call in calls if is_told(call, "PrefillAborted")}
    return [call for call in calls if not (cancels(call) and call.subject.partition(".")[0] in ended)]


def cancels(call: Call) -> bool:
    return call.kind == "answer" and call.details[0] == "CANCELLED"


ABORT_OF_LOAD_ANSWERED = Drift(
    "abort_before_the_engine_has_it_is_answered",
    "when a prompt is given up while the store is asked about it, or while it is loaded, live P answers CANCELLED to "
    "who has hung up; simulated P says nothing, as both do at any other time",
    store_prefill,
    even=_end_answered,
)


def _put_answered(calls: list[Call], step: Step) -> list[Call]:
    return [call for call in calls if not (call.kind == "answer" and of_store(call))]


def of_store(call: Call) -> bool:
    params = call.details[-1]
    return isinstance(params, KvParams) and params.prefill.engine.startswith(STORE)


PUT_ANSWERED = Drift(
    "what_is_put_is_answered_by_p",
    "when a store has a prompt, live P is told so and answers its leg; in simulations the store tells the router, and "
    "P hears nothing",
    store_prefill,
    even=_put_answered,
)


def _refused(pair: Pair, step: Step) -> bool:
    return isinstance(step, Store) and step.what == "refused"


PUT_REFUSED = Drift(
    "a_refused_put_is_withdrawn",
    "when a store does not take a prompt, live P withdraws it from the protocol and answers why; simulated P is not "
    "told, and keeps its blocks until the store's CANCEL or the end of the lease",
    store_prefill,
    forbids=_refused,
)


def _abort_of_put(pair: Pair, step: Step) -> bool:
    if not isinstance(step, Abort):
        return False
    return any(call.kind == "store put" and call.subject == request_id_of(step.r) for call in pair.calls)


ABORT_OF_PUT = Drift(
    "abort_of_a_put",
    "when a leg is taken back whose prompt is being put, simulated P withdraws it from the store, and does so still "
    "when the store has it; live P hangs up on the store, withdraws the prompt from the protocol as well and answers "
    "CANCELLED, and does nothing once the store has it",
    store_prefill,
    forbids=_abort_of_put,
)

# Turns.


def _of_several(pair: Pair, step: Step) -> bool:
    """Steps of more than one request that arrive together, or of which a live node does a part at once."""
    if not isinstance(step, Together):
        return False
    several = len({getattr(one, "r", None) for one in step.steps}) > 1
    if staged_prefill(pair.setting) or METHODS[pair.setting.method].stores:
        return True
    at_once = prefills(pair.setting) or staged_decode(pair.setting)
    return several or (at_once and any(isinstance(one, Arrive | Abort) for one in step.steps))


TURN_ORDER = Drift(
    "what_follows_from_one_input_comes_before_the_next",
    "of two inputs that arrive together simulated nodes carry out all that follows from the first before they look at "
    "the second; live nodes queue what follows from the first behind the second",
    lambda setting: prefills(setting) or setting.role == "store",
    forbids=_of_several,
)


DRIFTS = (
    FIRST_TOKEN_AWAITED,
    PIECES_AT_ONCE,
    FREED_BEFORE_TOLD,
    PULLED_PLACE,
    NEVER_FITS,
    QUEUED_ORDER,
    ABORT_OF_LOAD_ANSWERED,
    PUT_ANSWERED,
    PUT_REFUSED,
    ABORT_OF_PUT,
    TURN_ORDER,
)


def drifts_of(setting: Setting) -> list[Drift]:
    return [drift for drift in DRIFTS if drift.where(setting)]
