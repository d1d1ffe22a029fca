"""The site of the documents (mkdocs.yml): complete, and built without a broken link or a resource of another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import pdflow

ROOT: Final = Path(__file__).resolve().parents[2]
NAV: Final = re.findall(
    r"^ +- [^:\n]+: (\S+)$", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2], re.M
)
"""The paths under `nav`, from the root of the repository. It is the last key."""

MISSING: Final = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if find_spec(name) is None]


def test_every_document_is_in_the_nav_once() -> None:
    documents = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert documents, "no documents found"
    assert not documents - set(NAV), "add these to nav in mkdocs.yml"
    assert [path for path, times in Counter(NAV).items() if times > 1] == []


def test_every_entry_of_the_nav_exists() -> None:
    assert [path for path in NAV if not (ROOT / path).is_file()] == []


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/site/api.md").read_text("utf-8")
    assert [name for name in pdflow.__all__ if not re.search(rf"(::: .*\.|[\[ ]){name}(,|\]|$)", reference, re.M)] == []


class Resources(HTMLParser):
    """What a browser loads for a page without a click."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.urls += [value for name, value in attrs if name in ("href", "src") and value]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install -e '.[docs]'")
def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text("utf-8")
        assert 'class="mermaid"' not in text  # for which the theme loads a script
        urls = Resources(text).urls
        assert [url for url in urls if "//" in url] == []
        if page.name != "404.html":  # is served at any path, so its URLs begin at the root
            assert [url for url in urls if not (page.parent / re.split("[?#]", url)[0]).exists()] == []
    assert "the path of a TOML file" in (tmp_path / "docs/site/api.html").read_text("utf-8")
    assert (tmp_path / "examples/serve-quickstart.toml").read_bytes() == (
        ROOT / "examples/serve-quickstart.toml"
    ).read_bytes()
