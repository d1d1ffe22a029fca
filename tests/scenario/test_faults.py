"""[[fault]]: what is wrong is told with its place, and what is right becomes a plan of names and nanoseconds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from pdflow.errors import ScenarioError
from pdflow.faults import plan
from pdflow.faults.plan import FaultTimes
from pdflow.protocol.messages import Message
from pdflow.scenario import load
from pdflow.scenario.plan import plan_of
from pdflow.scenario.schema.faults import FAULT_KINDS, Fault, Frame
from pdflow.scenario.schema.jsonschema import schema_json

GOOD = (Path(__file__).resolve().parents[2] / "examples/reference.toml").read_text()
VALIDATOR = Draft202012Validator(schema_json())
LINE = GOOD.count("\n") + 1
"""Of the first [[fault]] that is added."""


def load_result(tmp_path: Path, *faults: str, table: str = "", overrides: tuple[str, ...] = ()) -> Any:
    """What loading says, without the folder; or the plan."""
    file = tmp_path / "s.toml"
    file.write_text(GOOD + "".join(f"[[fault]]\n{fault}\n" for fault in faults) + f"[faults]\n{table}\n")
    try:
        scenario = load(file, overrides=overrides)
    except ScenarioError as error:
        return [line.replace(f"{tmp_path}/", "") for line in str(error).split("\n")]
    assert list(VALIDATOR.iter_errors(tomllib.loads(file.read_text()))) == []
    return plan_of(scenario)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ('kind = "drip"\nat_s = 1', f'{LINE + 1}: fault[0].kind: is "drip", expected one of drop, delay, duplicate, '),
        ("at_s = 1", f"{LINE}: fault[0].kind: is missing, expected one of drop, delay, duplicate"),
        ('kind = "drop"', f"{LINE}: fault[0]: has no time and no probability, expected probability, at_s or rate_"),
        (
            'kind = "drop"\nprobability = 1.5',
            f"{LINE + 2}: fault[0].probability: is 1.5, expected a number above 0 and ",
        ),
        ('kind = "drop"\nat_s = -1', f"{LINE + 2}: fault[0].at_s: is -1, expected a number of at least 0"),
        (
            'kind = "drop"\nat_s = 1\nevery_s = 2',
            f"{LINE}: fault[0]: for_s is missing: the duration of each occurrence",
        ),
        (
            'kind = "drop"\nprobability = 1\nmessages = ["DON"]',
            f'{LINE + 3}: fault[0].messages[0]: is "DON", expected o',
        ),
        (
            'kind = "drop"\nprobability = 1\nmesages = []',
            f"{LINE + 3}: fault[0].mesages: unknown key (did you mean mess",
        ),
        ('kind = "delay"\nprobability = 0.5', f"{LINE}: fault[0].delay_s: is missing"),
        (
            'kind = "partition"\nat_s = 1\nfor_s = 3\nevery_s = 2',
            f"{LINE + 3}: fault[0].for_s: is 3, expected less than every_s, which is 2",
        ),
        (
            'kind = "partition"\nevery_s = 2\nfor_s = 1',
            f"{LINE + 2}: fault[0].every_s: needs at_s, the time of the first beginning",
        ),
        (
            'kind = "partition"\nat_s = 1\nevery_s = 2\nrate_per_s = 1\nfor_s = 1',
            f"{LINE + 3}: fault[0].every_s: cannot be combined with rate_per_s; remove one of the two",
        ),
        (
            'kind = "partition"\nat_s = 1\nbetween = ["prefill-0"]',
            f"{LINE + 3}: fault[0].between: names 1 engines, expected two",
        ),
        (
            'kind = "partition"\nat_s = 1\nbetween = ["prefill-0", "prefill-*"]',
            f"{LINE + 3}: fault[0].between: these engines exchange nothing",
        ),
        (
            'kind = "partition"\nat_s = 1\nbetween = ["*", "*"]\nto = "decode-0"',
            f"{LINE + 3}: fault[0].between: cannot be combined with from or to",
        ),
        ('kind = "drop"\nat_s = 1\nfrom = "decode-7"', f'{LINE + 3}: fault[0].from: is "decode-7", expected an engine'),
        (
            'kind = "crash"\nat_s = 1\nengine = "router"',
            f"{LINE + 3}: fault[0].engine: is the router, which this fault cannot affect",
        ),
        (
            'kind = "partition"\nat_s = 1\nto = "router"',
            f"{LINE + 3}: fault[0].to: is the router, but no engine sends heartbeats: set router.heartbeat_s",
        ),
        (
            'kind = "delay"\nat_s = 1\ndelay_s = 1\nto = "router"',
            f"{LINE + 4}: fault[0].to: is the router, which only drop and partition can name",
        ),
        (
            'kind = "drop"\nat_s = 1\nfrom = "router"',
            f"{LINE + 3}: fault[0].from: is the router, which this fault cannot affect",
        ),
        ('kind = "crash"\nengine = "decode-0"', f"{LINE}: fault[0]: has no time, expected at_s or rate_per_s"),
        (
            'kind = "crash"\nat_s = 1\nengine = "decode-0"\nfor_s = 2',
            f"{LINE + 4}: fault[0].for_s: has no effect: this kind acts at one instant (did you mean restart_after_s?)",
        ),
        (
            'kind = "crash"\nat_s = 1\nengine = "decode-0"\nincarnation = "same"',
            f'{LINE + 4}: fault[0].incarnation: is "same", expected "new": in strict every restart has a new inc',
        ),
        (
            'kind = "crash"\nat_s = 1\nevery_s = 5\nengine = "decode-0"',
            f"{LINE}: fault[0]: restart_after_s is missing: an engine that is down cannot crash again",
        ),
        (
            'kind = "pause"\nat_s = 1\nengine = "decode-0"',
            f"{LINE}: fault[0]: for_s is missing: the duration of each",
        ),
        (
            'kind = "skew"\nat_s = 1\nengine = "decode-0"',
            f"{LINE}: fault[0]: does not change the clock, expected speed",
        ),
        (
            'kind = "slow"\nat_s = 1\nfactor = 2',
            f"{LINE}: fault[0]: expected either engine or link: whose bandwidth is divided",
        ),
        (
            'kind = "slow"\nat_s = 1\nfactor = 2\nlink = "spine"',
            f'{LINE + 4}: fault[0].link: is "spine", expected the name of a link: none is defined',
        ),
        ('kind = "hang-up"\nprobability = 0.5', f"{LINE}: fault[0]: has no time, expected at_s or rate_per_s"),
        (
            'kind = "hang-up"\nat_s = 20',
            f"{LINE + 2}: fault[0].at_s: is 20, expected less than faults.heal_s, which is ",
        ),
    ],
)
def test_what_is_wrong(tmp_path: Path, fault: str, expected: str) -> None:
    [line] = load_result(tmp_path, fault, table="heal_s = 20")
    assert line.startswith(f"s.toml:{expected}")


def test_every_error_of_every_fault_at_once(tmp_path: Path) -> None:
    lines = load_result(tmp_path, 'kind = "crash"\nengine = "x"\nat_s = -1', 'kind = "skew"', table="heal_s = -1")
    assert len(lines) == 3  # of a fault whose own keys are wrong nothing more is said


def test_nothing_to_divide_where_a_nic_is_unlimited(tmp_path: Path) -> None:
    slow = 'kind = "slow"\nat_s = 1\nfactor = 2\nengine = "prefill-*"'
    [line] = load_result(tmp_path, slow, overrides=("network.preset=ideal",))
    assert "NICs are unlimited" in line


def test_one_table_is_not_an_array(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(GOOD + '[fault]\nkind = "drop"\nat_s = 1\n')
    with pytest.raises(ScenarioError, match=r"fault: is a table, expected an array of tables: write \[\[fault\]\]"):
        load(file)


def test_a_plan_has_names_and_nanoseconds(tmp_path: Path) -> None:
    drop = 'kind = "drop"\nprobability = 0.01\nbetween = ["prefill-0", "decode-*"]\nmessages = ["DONE"]'
    crash = 'kind = "crash"\nengine = "prefill-*"\nat_s = 10\nrestart_after_s = 2'
    found = load_result(tmp_path, drop, crash, drop, table="heal_s = 60")
    first, second, third = found.faults
    assert (first.name, second.name, third.name) == ("drop/0", "crash/0", "drop/1")
    assert isinstance(first, plan.DropMessages)
    assert first.links.hold("prefill-0", "decode-3")
    assert first.links.hold("decode-3", "prefill-0")
    assert not first.links.hold("prefill-1", "decode-3")
    assert (first.probability, first.frames) == (0.01, frozenset({"DONE"}))
    assert second == plan.Crash(
        name="crash/0",
        when=FaultTimes(at_ns=10_000_000_000),
        engines=("prefill-0", "prefill-1", "prefill-2", "prefill-3"),
        restart_after_ns=2_000_000_000,
    )
    assert (found.heal_ns, found.transport_timeout_ns) == (60_000_000_000, 7_000_000_000)


def test_a_direction(tmp_path: Path) -> None:
    [partition] = load_result(tmp_path, 'kind = "partition"\nat_s = 1\nfrom = "decode-*"').faults
    assert partition.links.hold("decode-0", "prefill-2")
    assert not partition.links.hold("prefill-2", "decode-0")


def test_the_path_to_the_router(tmp_path: Path) -> None:
    reports = ("router.heartbeat_s=3",)
    found = load_result(tmp_path, 'kind = "partition"\nat_s = 1\nfrom = "prefill-*"\nto = "router"', overrides=reports)
    links = found.faults[0].links
    assert links.hold("prefill-0", "router")
    assert not links.hold("decode-0", "router")
    assert not links.hold("prefill-0", "decode-0")
    frames = 'kind = "drop"\nprobability = 1.0\nto = "router"\nmessages = ["REG"]'
    [line] = load_result(tmp_path, frames, overrides=reports)
    expected = 'cannot be combined with to = "router", which receives heartbeats only; remove it'
    assert line == f"s.toml:{LINE + 4}: fault[0].messages: {expected}"
    [line] = load_result(tmp_path, 'kind = "drop"\nat_s = 1\nfrom = "x"\nto = "router"', overrides=reports)
    assert line.startswith(f's.toml:{LINE + 3}: fault[0].from: is "x", expected an engine')
    named = load_result(tmp_path, 'kind = "partition"\nat_s = 1', overrides=reports)
    assert not named.faults[0].links.hold("prefill-0", "router"), "only where it is named"


def test_ten_thousand_engines_are_no_product(tmp_path: Path) -> None:
    many = ("pool.prefill.replicas=10000", "pool.decode.replicas=10000")
    [partition] = load_result(tmp_path, 'kind = "partition"\nat_s = 1', overrides=many).faults
    assert partition.links.hold("decode-9999", "prefill-9999")


def test_every_kind_and_every_frame_can_be_named() -> None:
    assert set(FAULT_KINDS.values()) == set(get_args(Fault))
    assert set(get_args(Frame)) == {kind.__struct_config__.tag for kind in get_args(Message)}
