"""A link preset may be a file of one's own, as `pdflow calibrate` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import ScenarioError
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario

REFERENCE = (Path(__file__).resolve().parents[2] / "examples/reference.toml").read_text()
OURS = """\
summary = "between our racks"

[values]
bandwidth_bytes_per_s = 3_000_000_000
latency_s = 7e-6
per_message_s = 20e-6
per_descriptor_s = 1e-6
control_latency_s = 30e-6
handshake_s = 0.01
http_latency_s = 0.4e-3
poll = false
"""


def loaded(folder: Path, links: str | None, preset: str = "racks/links.toml", more: str = "") -> ResolvedScenario:
    (folder / "racks").mkdir(exist_ok=True)
    if links is not None:
        (folder / "racks/links.toml").write_text(links)
    file = folder / "s.toml"
    file.write_text(REFERENCE.replace('preset = "rdma-400g"', f'preset = "{preset}"\n{more}'))
    return load(file)


def test_values_of_the_file_apply_unless_the_scenario_sets_them(tmp_path: Path) -> None:
    network = loaded(tmp_path, OURS, more="latency_s = 9e-6").network
    assert network.preset == "racks/links.toml"
    assert (network.bandwidth_bytes_per_s, network.latency_s, network.poll) == (3_000_000_000, 9e-6, False)


def test_a_scenario_that_is_saved_elsewhere_finds_it(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, OURS)
    (tmp_path / "copies").mkdir()
    Scenario.load(scenario.path).save(tmp_path / "copies/s.toml")
    assert load(tmp_path / "copies/s.toml").network.latency_s == 7e-6


@pytest.mark.parametrize(
    ("links", "location", "message"),
    [
        (None, "s.toml:", '"racks/links.toml" cannot be read: No such file'),
        ("[values", "s.toml:", '"racks/links.toml" '),
        ("\N{SNOWMAN}", "s.toml:", "is not TOML"),
        ("latency_s = 1e-6", "s.toml:", "has no table [values]"),
        (OURS.replace("7e-6", "-1"), "racks/links.toml:5: ", "network.latency_s"),
        (OURS.replace("latency_s = 7e-6", "latncy_s = 7e-6"), "racks/links.toml:5: ", "did you mean latency_s"),
    ],
)
def test_an_error_is_reported_with_its_location(tmp_path: Path, links: str | None, location: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        loaded(tmp_path, links)
    lines = str(caught.value).splitlines()
    assert any(line.startswith(f"{tmp_path}/{location}") and message in line for line in lines), lines


def test_what_is_not_in_it_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"network\.poll"):
        loaded(tmp_path, OURS.replace("poll = false\n", ""))
