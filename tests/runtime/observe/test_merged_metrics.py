"""Pages of several processes on one: valid, whole, and with the label of each process."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdflow_runtime.observe.merged_metrics import MalformedPageError, MergedMetrics

ODD = 'a "b",engine="c"\\\n{}'


def page(label: str = "model") -> bytes:
    registry = CollectorRegistry()
    Counter("tokens", "Tokens", [label], registry=registry).labels(ODD).inc(3)
    Histogram("seconds", "Seconds", buckets=(1, 2), registry=registry).observe(1.5)
    text: bytes = generate_latest(registry)
    return text


def test_each_metric_is_described_once_and_keeps_its_samples() -> None:
    merged = MergedMetrics()
    for engine in ("decode-0", "decode-1"):
        merged.add(engine, page())
    text = merged.text().decode()
    assert text.count("# TYPE tokens_total counter") == 1
    assert text.count("# HELP seconds Seconds") == 1
    metrics = {metric.name: metric for metric in text_string_to_metric_families(text)}
    assert [(sample.labels, sample.value) for sample in metrics["tokens"].samples if sample.name == "tokens_total"] == [
        ({"engine": "decode-0", "model": ODD}, 3),
        ({"engine": "decode-1", "model": ODD}, 3),
    ]
    seconds = [sample for sample in metrics["seconds"].samples if sample.name == "seconds_bucket"]
    assert [(sample.labels["engine"], sample.labels["le"], sample.value) for sample in seconds] == [
        (engine, le, count)
        for engine in ("decode-0", "decode-1")
        for le, count in (("1.0", 0), ("2.0", 1), ("+Inf", 1))
    ]


def test_a_label_engine_of_the_process_itself() -> None:
    merged = MergedMetrics()
    merged.add("decode-0", page("engine"))
    merged.add("router", page("engine"), keeps_label=True)
    [tokens] = [metric for metric in text_string_to_metric_families(merged.text().decode()) if metric.name == "tokens"]
    assert [sample.labels for sample in tokens.samples if sample.name == "tokens_total"] == [
        {"engine": "decode-0", "exported_engine": ODD},
        {"engine": ODD},
    ]


@pytest.mark.parametrize(
    "bad", [b"<html>", b"\xff", b'name{label="open} 1', b"name", b'{"error": 1}', b"name 1 2 3", b'n{a="b" c="d"} 1']
)
def test_a_page_that_is_none_adds_nothing(bad: bytes) -> None:
    merged = MergedMetrics()
    with pytest.raises(MalformedPageError):
        merged.add("decode-0", b"fine 1\n" + bad)
    assert merged.text() == b""


def test_samples_without_a_description_and_with_a_time() -> None:
    merged = MergedMetrics()
    merged.add("decode-0", b"a 1 1700000000\n\nb{} NaN\n# EOF\n")
    assert merged.text() == b'a{engine="decode-0"} 1\nb{engine="decode-0"} NaN\n'
