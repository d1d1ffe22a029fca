from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdflow.results.records import FIRST_DECODE, NEVER, STAGES, Records, stage_durations_ns

INSTANTS = st.integers(min_value=0, max_value=10**15)


def test_there_is_a_constant_for_every_stage() -> None:
    from pdflow.results import records

    assert [getattr(records, stage.upper()) for stage in STAGES] == list(range(len(STAGES)))


def test_a_stage_lasts_from_the_latest_earlier_end() -> None:
    records = Records(1)
    records.arrival_ns[0] = 100
    for stage, end in {"route": 110, "p_queue": 130, "prefill": 200, "d_admit": 150, "xfer_wire": 260}.items():
        records.ends[STAGES.index(stage)][0] = end
    records.ends[FIRST_DECODE][0] = records.first_token_ns[0] = 275
    durations = dict(zip(STAGES, stage_durations_ns(records)[:, 0].tolist(), strict=True))
    assert durations == {
        "route": 10,
        "p_queue": 20,
        "prefill": 70,
        "handoff": 0,
        "d_admit": 0,  # hidden behind the prefill
        "handshake": 0,
        "xfer_post": 0,
        "xfer_wire": 60,
        "notify": 0,
        "first_decode": 15,
    }


def test_what_follows_the_first_token_is_not_in_ttft() -> None:
    records = Records(1)
    records.arrival_ns[0], records.first_token_ns[0] = 0, 50
    for stage, end in {"prefill": 50, "xfer_wire": 80, "first_decode": 95}.items():
        records.ends[STAGES.index(stage)][0] = end
    assert stage_durations_ns(records)[:, 0].sum() == 50


@given(st.lists(st.tuples(INSTANTS, st.lists(st.none() | INSTANTS, min_size=9, max_size=9), INSTANTS), max_size=5))
def test_stages_add_up_to_ttft(requests: list[tuple[int, list[int | None], int]]) -> None:
    records = Records(len(requests))
    for request, (arrival, offsets, ttft) in enumerate(requests):
        records.arrival_ns[request] = arrival
        for column, offset in zip(records.ends, offsets, strict=False):
            column[request] = NEVER if offset is None else arrival + offset
        records.ends[FIRST_DECODE][request] = records.first_token_ns[request] = arrival + ttft
    durations = stage_durations_ns(records)
    assert (durations >= 0).all()
    assert durations.sum(axis=0).tolist() == [ttft for _, _, ttft in requests]


def test_pre_sized_and_appended_columns_are_alike() -> None:
    sized, appended = Records(3), Records()
    for request in range(3):
        sized.arrival_ns[request], sized.input_tokens[request], sized.output_tokens[request] = request, 10, 20
        appended.add(request, 10, 20)
    assert [sized.record(request) for request in range(3)] == [appended.record(request) for request in range(3)]
    assert len(sized) == len(appended) == 3


def test_a_record_has_null_for_what_did_not_happen() -> None:
    records = Records()
    records.add(5, 1, 1)
    record = records.record(0)
    assert record["outcome"] is None
    assert record["first_token_ns"] is None
    assert record["ends_ns"] == dict.fromkeys(STAGES)
    assert not np.array([value == NEVER for value in record["ends_ns"].values()]).any()
