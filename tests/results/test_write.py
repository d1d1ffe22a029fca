from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdflow.results.files.write import OutputError, read_requests, replacing, write_requests, write_results
from pdflow.results.records import STAGES, Records
from pdflow.results.result import Result


def test_requests_come_back_as_they_went(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "requests.jsonl"
    write_requests(path, result.records)
    lines = list(read_requests(path))
    assert lines == [result.records.record(request) for request in range(5)]
    assert list(lines[0]["ends_ns"]) == list(STAGES)
    assert [path.name for path in path.parent.iterdir()] == ["requests.jsonl"]


def test_a_stream_is_written_as_the_list_it_is(tmp_path: Path) -> None:
    numbers = [index / 7 for index in range(1_000)]
    path = tmp_path / "results.json"
    write_results(path, {"a": iter(numbers), "none": iter(()), "lists": iter([[1.5], []]), "b": {"x": [1]}, "c": None})
    assert json.loads(path.read_bytes()) == {"a": numbers, "none": [], "lists": [[1.5], []], "b": {"x": [1]}, "c": None}


def test_a_long_stream_is_not_held(tmp_path: Path) -> None:
    def long() -> Iterator[list[float]]:
        for index in range(20_000):
            yield [index / 3] * 50

    tracemalloc.start()
    write_results(tmp_path / "results.json", {"itls": long()})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "results.json").stat().st_size > 10_000_000
    assert peak < 3_000_000


def test_a_failure_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("before")

    def run() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("requests", [1, 5_000], ids=["at the flush", "in the middle"])
def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path: Path, requests: int) -> None:
    path = tmp_path / "requests.jsonl"
    (tmp_path / "requests.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"requests\.jsonl: cannot write: No space left on device.*--out") as caught:
        write_requests(path, Records(requests))
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_at_the_last_sync_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_results(tmp_path / "results.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/results\.json: cannot write"):
        write_results(tmp_path / "file" / "results.json", {})


def test_same_run_same_bytes(result: Result, tmp_path: Path) -> None:
    for name in ("a", "b"):
        result.save(tmp_path / name, detailed=True)
    for file in ("results.json", "requests.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
