"""What a rank measures is taken once, whole, by another thread."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from pdflow.protocol.values import MS
from pdflow_runtime.clock import now_ns
from pdflow_runtime.observe.metrics import TransferMeter
from pdflow_runtime.observe.transfer_samples import MOST_SAMPLES, NOTHING, Samples, Transferred, TransferSamples


@pytest.mark.trio
async def test_samples_are_taken_once(mock_clock: MockClock) -> None:
    samples = TransferSamples()
    begun = now_ns()
    mock_clock.jump(0.005)
    samples.moved(begun, begun + MS, 4096, 3)
    samples.failed()
    samples.failed()
    samples.unread()
    samples.expired()
    samples.unreached()
    assert samples.take() == Samples((Transferred(5 * MS, MS, 4096, 3),), 2, 1, 1, 1)
    assert samples.take() == NOTHING


@pytest.mark.trio
async def test_none_is_lost_or_taken_twice_between_threads() -> None:
    samples = TransferSamples()
    count, taken, over = 5000, list[Samples](), threading.Event()

    def take() -> None:
        while not over.is_set():
            taken.append(samples.take())

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(count):
        samples.moved(now_ns(), now_ns(), number, 1)
        samples.failed()
    over.set()
    thread.join()
    taken.append(samples.take())
    assert [each.nbytes for every in taken for each in every.transferred] == list(range(count))
    assert sum(every.failed for every in taken) == count


@pytest.mark.trio
async def test_what_nobody_takes_is_bounded() -> None:
    samples = TransferSamples()
    for number in range(MOST_SAMPLES + 7):
        samples.moved(0, 0, number, 1)
    taken = samples.take().transferred
    assert (len(taken), taken[0].nbytes) == (MOST_SAMPLES, 7), "the oldest are forgotten"


@pytest.mark.trio
async def test_a_process_of_its_own_has_the_same_as_metrics(mock_clock: MockClock) -> None:
    registry = CollectorRegistry()
    meter = TransferMeter(registry, "tiny")
    begun = now_ns()
    mock_clock.jump(0.5)
    meter.moved(begun, begun + 2 * MS, 4096, 3)
    meter.failed()

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"vllm:nixl_{name}", {"model_name": "tiny"})

    assert value("xfer_time_seconds_sum") == pytest.approx(0.5)
    assert value("post_time_seconds_sum") == pytest.approx(0.002)
    assert (value("bytes_transferred_sum"), value("num_descriptors_sum")) == (4096, 3)
    assert (value("xfer_time_seconds_count"), value("num_failed_transfers_total")) == (1, 1)
