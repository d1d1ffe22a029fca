"""The versions of Python and the parts of CI are the same wherever they are named."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
RUNNER: Final = (ROOT / ".ci/run").read_text("utf-8")
RELEASE: Final = (ROOT / ".ci/release").read_text("utf-8")
HOSTED: Final = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
README: Final = (ROOT / "README.md").read_text("utf-8")

VERSION: Final = re.compile(r"\b3\.\d\d\b")


def test_every_supported_python_is_tested() -> None:
    classified = {each for line in PROJECT["classifiers"] for each in VERSION.findall(line)}
    (in_release,) = re.findall(r"for version in (.*); do", RELEASE)
    assert set(VERSION.findall(in_release)) == classified
    assert set(VERSION.findall(HOSTED)) == classified
    assert PROJECT["requires-python"] == f">={min(classified)}"
    assert all(version in README for version in classified)


def test_the_hosted_parts_are_parts_of_ci() -> None:
    defined = set(re.findall(r'^part "(\w+)"', RUNNER, re.M))
    asked = {name for line in re.findall(r"bash \.ci/run(.*)", HOSTED) for name in line.split()}
    assert asked <= defined
    (listed,) = re.findall(r"runs these parts only: (.*)\.", RUNNER)
    assert set(listed.split()) == defined
