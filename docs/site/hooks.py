"""Hooks of the site of the documents (mkdocs.yml): which files it has, and how it shows diagrams and notebooks.

The site has the layout of the repository, so a relative link leads to the same file in both, and mkdocs checks it. A
linked file that is no document (a scenario, a script) is copied as it is. A link to a file that is not in `CONTENT`, or
to a folder, fails the strict build.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

CONTENT: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**/*.md",
    "docs/**/*.css",
    "docs/img/*.png",
    "benchmarks/README.md",
    "deploy/grafana/*.json",
    "deploy/prometheus/*.yml",
    "benchmarks/results/peers.md",
    "benchmarks/results/walks.json",
    "examples/README.md",
    "examples/**/*.toml",
    "examples/*.py",
    "notebooks/README.md",
    "notebooks/*.ipynb",
)
ARROW: Final = re.compile(r"(\S+) --> (\S+)")


class NotebookFile(File):
    """A notebook that becomes a page: its text and its code. Notebooks are stored without outputs."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def content_string(self) -> str:
        cells = json.loads(self.content_bytes)["cells"]
        return "\n\n".join(cell_text(cell) for cell in cells) + "\n"


def cell_text(cell: Mapping[str, Any]) -> str:
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set what plain YAML cannot name: anchors as a repository's view has them, and `state_diagram`."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    fence = {"name": "mermaid", "class": "mermaid", "format": state_diagram}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository under `CONTENT`, under their paths from its root."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    root = Path(config.config_file_path).parent
    for path in sorted({path for pattern in CONTENT for path in root.glob(pattern)}):
        kind = NotebookFile if path.suffix == ".ipynb" else File
        files.append(kind(path.relative_to(root).as_posix(), str(root), config.site_dir, config.use_directory_urls))
    return files


def state_diagram(source: str, *_: object, **__: object) -> str:
    """The HTML of a mermaid state diagram: a table of which state may follow which.

    mermaid's own drawing needs a script of 3 MB, which the theme loads from another host.
    """
    following: dict[str, list[str]] = {}
    for before, after in ARROW.findall(source):
        following.setdefault("(begin)" if before == "[*]" else before, []).append("(end)" if after == "[*]" else after)
    rows = "".join(
        f"<tr><td>{html.escape(before)}</td><td>{html.escape(', '.join(after))}</td></tr>"
        for before, after in following.items()
    )
    return f"<table><thead><tr><th>from</th><th>to</th></tr></thead><tbody>{rows}</tbody></table>"
