"""Holds transfer methods against what was published of each: python -m benchmarks.published [../shared/data]

Writes benchmarks/results/published.md, the pictures of docs/img/published-*.png, and section 6 of docs/validation.md,
which `benchmarks/validate.py` keeps. `--only PART` prints one part and writes nothing. The measurements are not in this
repository; what their sources state in a sentence is in these files. Needs matplotlib (`pip install
"pdflow[notebook]"`) and some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.published import cpu_connector, mooncake_a10, p2p_nccl, pieces
from benchmarks.published.common import HEADING, IMAGES, ROOT, Section
from benchmarks.validation.common import with_section

PAGE = ROOT / "docs/validation.md"
RESULTS = ROOT / "benchmarks/results/published.md"
INTRODUCTION = """\
`python -m benchmarks.published` writes this section, with all its figures; only the sentences are written by hand. Each
part compares published figures of one system with `dialect = "as-published"`. A star marks values that were fitted on,
at most a third of a table; errors are of the others.

None of this is a blind prediction. The behaviour of the methods (pages of 4 KiB, three tensors after P's step, hidden
states) is from the originals' code. Which parts of it matter was found by looking at all rows of these tables. So were
the threshold of saturation in 6.2, the two fitted cells in 6.1, and the rates of 6.3."""

SECTIONS: dict[str, tuple[object, Callable[[Path], Section]]] = {
    "cpu": (cpu_connector, lambda _: cpu_connector.report()),
    "mooncake": (mooncake_a10, mooncake_a10.report),
    "order": (p2p_nccl, lambda _: p2p_nccl.report_order()),
    "topologies": (None, lambda _: p2p_nccl.report_topologies()),
    "groups": (None, lambda _: p2p_nccl.report_groups()),
    "push-pull": (None, pieces.report_push_and_pull),
    "blocks": (None, lambda _: pieces.report_block_sizes()),
    "slices": (None, lambda _: pieces.report_slices()),
}
"""The module whose words introduce it, if it has one, and what is said."""


def written(number: int, module: object, section: Section) -> list[str]:
    """One part as Markdown."""
    lines = [f"### 6.{number} {section.title}", ""]
    if module is not None:
        lines += [str(module.__doc__).strip(), ""]
    lines += section.lines
    if section.image:
        lines += [f"![{section.caption}](img/{section.image})", ""]
    return lines


def text_of(sections: Sequence[tuple[object, Section]]) -> str:
    lines = [INTRODUCTION, ""]
    for number, (module, section) in enumerate(sections, 1):
        lines += written(number, module, section)
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str]) -> int:
    only = arguments[1] if arguments[:1] == ["--only"] else None
    given = arguments[2 if only else 0 :]
    folder = (Path(given[0]) if given else ROOT.parent / "shared/data") / "published"
    if not folder.is_dir():
        print(f"{folder} is not there: nothing to hold anything against")
        return 0
    if only is not None:
        print("\n".join(SECTIONS[only][1](folder).lines))
        return 0
    sections = []
    for name, (module, report) in SECTIONS.items():
        section = report(folder)
        sections.append((module, section))
        if section.figure is not None:
            section.figure.savefig(IMAGES / section.image, dpi=100)
        print(f"{name}: done", flush=True)
    text = text_of(sections)
    RESULTS.write_text(text, encoding="utf-8")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), HEADING, text), encoding="utf-8")
    print(f"{RESULTS} and {PAGE} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
