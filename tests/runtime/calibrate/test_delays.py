"""Hops, messages and transfers are measured between the instants at which a simulation has them."""

from __future__ import annotations

import pytest

pytest.importorskip("trio", reason="needs trio: pip install 'pdflow[live]'")

from pdflow_runtime.calibrate.delays import MeasuredTransfer, api_server_s, delays, line, link_values, typical
from pdflow_runtime.observe.event_log import (
    TOKEN,
    FirstPiecePassed,
    Frame,
    Moved,
    Page,
    Passed,
    PeerConnected,
    RequestReceived,
    Sent,
)

US = 1_000


def one(number: int, at: int, nbytes: int) -> list[Page]:
    """A request whose hop takes 30 us, its doors 100 and 50 more, its control message 20, its transfer 4 ns a byte."""
    name = f"a{number}"
    prefilled = at + 900 * US
    posted = prefilled + 40 * US
    landed = posted + 10 * US + 4 * nbytes
    return [
        Page(
            "router",
            0,
            [
                RequestReceived(at, number, 100),
                Sent(at, number, name, "prefill", "prefill-0"),
                Sent(at, number, name, "decode", "decode-0"),
                FirstPiecePassed(landed + 530 * US, number),
            ],
        ),
        Page(
            "prefill-0",
            -5,
            [
                Passed(at + 130 * US + 5, name, "route"),
                Frame(at + 200 * US + 5, name, "Register", "decode-0.r0", "prefill-0.r0", True),
                Passed(prefilled + 5, name, "prefill"),
                Passed(posted + 5, name, "xfer_post"),
                Moved(prefilled + 8, name, 30 * US, 200 * US, nbytes, 8),
            ],
        ),
        Page(
            "decode-0",
            9,
            [
                PeerConnected(at - 9, "prefill-0.r0", 700 * US),
                Passed(at + 80 * US - 9, name, "handoff"),
                Passed(at + 90 * US - 9, name, "d_admit"),
                Frame(at + 180 * US - 9, name, "Register", "decode-0.r0", "prefill-0.r0", False),
                Passed(landed - 9, name, "xfer_wire"),
                Passed(landed + 500 * US - 9, name, TOKEN),
            ],
        ),
    ]


def test_each_delay_is_between_its_two_instants() -> None:
    pages = [page for number in range(1, 6) for page in one(number, number * 10**9, number * 100_000)]
    found = delays(pages)
    assert found.hop_ns == [30 * US] * 5
    assert found.control_ns == [20 * US] * 5
    assert found.transfers[0] == MeasuredTransfer(100_000, 8, 40 * US, 410 * US)
    links = link_values(found, found, synthetic=False)
    assert links.http_latency_s == pytest.approx(30e-6)
    assert links.control_latency_s == pytest.approx(20e-6)
    assert links.handshake_s == pytest.approx(700e-6)
    assert links.per_message_s == pytest.approx(40e-6)
    assert links.latency_s == pytest.approx(10e-6)
    assert links.bandwidth_bytes_per_s == 250_000_000
    assert api_server_s(found, ["prefill-0"], links.http_latency_s) == pytest.approx(100e-6)
    assert api_server_s(found, ["decode-0"], links.http_latency_s) == pytest.approx(50e-6)


def test_of_several_ranks_the_largest_shard_counts() -> None:
    pages = one(1, 10**9, 100_000)
    pages[1].notes.append(Moved(10**9, "a1", 5, 10, 40_000, 4))
    assert [(each.nbytes, each.descriptors) for each in delays(pages).transfers] == [(100_000, 8)]


def test_messages_that_are_of_no_request_are_timed_too() -> None:
    def taken(t: int, received: bool) -> Frame:
        return Frame(t, "", "Taken", "decode-0.r0", "prefill-0.r0", received)

    sent, received = [taken(t * US, False) for t in (10, 500)], [taken(t * US, True) for t in (5, 45, 520)]
    assert delays([Page("decode-0", 0, sent), Page("prefill-0", 0, received)]).control_ns == [35 * US, 20 * US]


def test_the_size_of_synthetic_kv_is_ignored() -> None:
    pages = [page for number in range(1, 4) for page in one(number, number * 10**9, number * 100_000)]
    found = delays(pages)
    links = link_values(found, found, synthetic=True)
    assert links.bandwidth_bytes_per_s is None
    assert links.latency_s == pytest.approx(810e-6)


def test_unmeasured_values_are_not_reported() -> None:
    nothing = delays([])
    links = link_values(nothing, nothing, synthetic=False)
    assert links.handshake_s is None
    assert links.latency_s == links.http_latency_s == 0


def test_a_line_has_no_side_below_nothing() -> None:
    assert line([(x, 10 + 2 * x) for x in range(1, 30)]) == pytest.approx((10, 2))
    at_0, rise = line([(1, 9), (2, 6), (3, 3)])
    assert rise == 0
    assert 3 <= at_0 <= 6
    assert line([(10, 10), (20, 40)]) == (0, pytest.approx(1.2))
    assert line([(5, 1), (5, 7), (5, 13)]) == (7, 0)
    assert line([]) == (0, 0)


def test_one_in_twenty_does_not_count() -> None:
    assert typical([10] * 19 + [9_000]) == 10
    assert typical([10, 30]) == 20
    assert typical([]) == 0
