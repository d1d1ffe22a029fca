"""What the simulated node and the live one did differently once, each by the script that showed it."""

from __future__ import annotations

import pytest

from tests.serving.play import play
from tests.serving.script import Abort, Arrive, Do, FirstToken, Peer, Step, Store, Together, Wait
from tests.serving.setting import Setting

DECODE = Setting("nixl-push", "decode")
STAGED_DECODE = Setting("cpu-staged", "decode")
AWAITED = Setting("nixl-push", "decode", first_token="prefill")
PREFILL = Setting("nixl-push", "prefill")
STAGED_PREFILL = Setting("cpu-staged", "prefill")
STORE_PREFILL = Setting("kv-store", "prefill")
STORE_NODE = Setting("kv-store", "store")
PULLED_FROM = Setting("p2p-nccl-get", "prefill")

LONG = 3
"""The request that fits no engine."""
LOADED = (Arrive(0), Do("admit", 0), Peer("connected"), Peer("done", 0))
"""A decode leg whose KV is here."""
STAGED_LOADED = (Arrive(0), Peer("connected"), Peer("done", 0), Do("admit", 0))

PUTTING = (Arrive(0), Store("nothing", 0), Do("compute", 0, 6), Do("computed"))
"""A prompt that its store is to get."""

SAME: dict[str, tuple[Setting, tuple[Step, ...]]] = {
    "of_a_loaded_request": (
        DECODE,
        (*LOADED, Do("join", 0), Do("preempt", 0), Abort(0)),
    ),
    "of_a_decoding_request": (DECODE, (*LOADED, Do("join", 0), Do("token", 0), Abort(0))),
    "of_a_ready_request_that_was_staged": (STAGED_DECODE, (*STAGED_LOADED, Abort(0))),
    "of_an_aggregated_request": (
        Setting("nixl-push", "aggregated"),
        (Arrive(0, alone=True), Abort(0)),
    ),
    "two_that_waited_at_a_store": (
        STORE_NODE,
        (Arrive(0), Arrive(LONG), Arrive(1), Arrive(2), Peer("connected", side="put"), Peer("done", 0, side="put")),
    ),
    "two_that_waited": (
        STAGED_DECODE,
        (Arrive(2), Arrive(0), Arrive(1), Peer("unreachable")),
    ),
    "two_decode_legs": (DECODE, (Together((Arrive(LONG), Arrive(0))),)),
    "an_abort_and_an_admission": (DECODE, (Arrive(0), Together((Abort(0), Do("admit", 0))))),
    "a_landing_and_a_step": (
        DECODE,
        (*LOADED[:3], Together((Peer("done", 0), Do("join", 0))), Abort(0)),
    ),
    "two_from_a_store_of_p": (
        PULLED_FROM,
        (
            *(Arrive(0), Do("compute", 0, 6), Do("computed")),
            *(Arrive(1), Do("compute", 1, 8), Do("computed")),
            *(Arrive(2), Do("compute", 2, 11), Do("computed")),
        ),
    ),
    "of_two_names": (
        STORE_NODE,
        (
            Arrive(1),
            Peer("connected", side="put"),
            Arrive(0),
            Peer("done", 0, side="put"),
            Wait(16_000),
        ),
    ),
    "at_two_ranks": (
        Setting("nixl-push", "prefill", ranks=2),
        (
            Peer("register", 0, 1),
            Peer("register", 1, 0),
            Peer("connected", -1, 0),
            Peer("connected", -1, 1),
            Peer("register", 0, 1),
            Peer("register", 1, 0),
            Wait(41_000),
        ),
    ),
    "of_a_late_write": (
        STAGED_PREFILL,
        (Peer("register", 0), Arrive(0), Do("compute", 0, 6), Do("layer"), Peer("connected")),
    ),
    "of_a_prompt_that_is_read": (PULLED_FROM, (Arrive(0), Do("compute", 0, 6), Do("computed"))),
    "in_a_store_of_p": (
        PULLED_FROM,
        (
            Arrive(1, alone=True),
            Do("compute", 1, 8),
            Do("computed"),
            Arrive(0),
            Do("compute", 0, 6),
            Do("computed"),
        ),
    ),
    "at_plain_p": (PREFILL, (Arrive(LONG),)),
    "at_progressive_p": (Setting("mooncake-v1", "prefill", progressive=True), (Arrive(LONG),)),
    "a_prompt_that_arrives": (PREFILL, (Arrive(0),)),
    "a_registration_and_an_abort": (
        PREFILL,
        (Peer("register", 1), Peer("connected"), Arrive(0), Together((Peer("register", 0), Abort(0)))),
    ),
    "while_the_store_is_asked": (STORE_PREFILL, (Arrive(0), Abort(0))),
    "while_it_is_loaded": (
        STORE_PREFILL,
        (Arrive(0), Store("found", 0), Do("admit", 0), Abort(0)),
    ),
    "put_by_its_store": (STORE_PREFILL, (*PUTTING, Store("put", 0))),
    "refused_by_its_store": (STORE_PREFILL, (*PUTTING, Store("refused", 0))),
    "that_is_under_way": (STORE_PREFILL, (*PUTTING, Abort(0))),
    "that_is_over": (STORE_PREFILL, (*PUTTING, Store("put", 0), Abort(0))),
    "a_first_token_that_follows": (
        AWAITED,
        (Arrive(0, first="follows"), Do("admit", 0), Peer("connected"), Peer("done", 0), FirstToken(0)),
    ),
}
"""Each is decided in one place now."""


@pytest.mark.parametrize("which", SAME)
def test_what_drifted_once_is_the_same(which: str) -> None:
    setting, script = SAME[which]
    play(setting, *script)
