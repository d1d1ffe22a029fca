"""`pdflow check --trace` without a scenario: a record whose header describes its engines is answered alike, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pdflow.cli import cli
from pdflow.protocol.values import S
from pdflow.results.files.events import EventsError
from pdflow.results.files.merge_events import merge_events
from pdflow_sim.check.counterexamples.trace import TraceDiffersError, follow_engines
from tests.runtime.vllm.support.pair import Pair


def recorded(folder: Path, pulls: bool = False) -> None:
    """A request between two instances, each endpoint of which writes a file."""
    pair = Pair(pulls, events=str(folder))
    pair.submit_prefill()
    pair.step(2)
    pair.submit_decode()
    pair.step(8)
    pair.idle(31 * S)
    pair.assert_at_rest()
    pair.close()


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
def test_a_record_of_two_instances_is_answered_alike(pulls: bool, tmp_path: Path) -> None:
    recorded(tmp_path, pulls)
    found = follow_engines(merge_events(tmp_path, remove=False))
    assert found.events > 10
    assert found.effects > 10


def test_the_command_takes_the_folder(tmp_path: Path) -> None:
    recorded(tmp_path)
    result = CliRunner().invoke(cli, ["check", "--trace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "S1 to S9 hold" in result.output


def changed(path: Path, change: Any) -> Path:
    lines = path.read_bytes().splitlines()
    header = msgspec.json.decode(lines[0])
    change(header, lines)
    path.write_bytes(msgspec.json.encode(header) + b"\n" + b"\n".join(lines[1:]) + b"\n")
    return path


def test_an_effect_that_is_left_out_is_found(tmp_path: Path) -> None:
    recorded(tmp_path)

    def drop(header: Any, lines: list[bytes]) -> None:
        lines.remove(next(line for line in lines if b'"PostWrite"' in line))

    with pytest.raises(TraceDiffersError, match="recorded: nothing more"):
        follow_engines(changed(merge_events(tmp_path), drop))


def test_a_lease_of_another_length_is_found(tmp_path: Path) -> None:
    recorded(tmp_path)

    def shorten(header: Any, lines: list[bytes]) -> None:
        for record in header["engines"].values():
            record["protocol"]["timers"]["no_request_ns"] = 0
            record["protocol"]["pulls"] = True

    with pytest.raises(TraceDiffersError):
        follow_engines(changed(merge_events(tmp_path), shorten))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, _: header.pop("engines"), "describes no engines"),
        (lambda header, _: header["engines"]["P"].pop("info"), "an engine has a configuration"),
        (lambda header, _: header["engines"]["P"]["protocol"]["shape"].update(num_layers=7), "several models"),
    ],
    ids=["no engines", "no info", "another model"],
)
def test_a_header_that_does_not_describe_engines_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(EventsError, match=message):
        follow_engines(changed(merge_events(tmp_path), change))


def test_both_engines_have_written(tmp_path: Path) -> None:
    recorded(tmp_path)
    names = {path.name.partition("-")[0] for path in tmp_path.glob("*.events.jsonl")}
    assert names == {"P", "P.r0", "D", "D.r0"}
