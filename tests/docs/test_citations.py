"""Every file, section of docs/spec.md and rule that a docstring, comment or document cites exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCUMENTS, ROOT, all_blocks

PYTHON = sorted(
    path
    for folder in ("pdflow", "sim", "runtime", "benchmarks", "docs", "tests", "examples")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
SCENARIOS = sorted(ROOT.glob("examples/**/*.toml"))

SECTION = re.compile(r"\b[Ss]pec (\d+(?:\.\d+)?)\b")
RULE = re.compile(r"(?<![\w.\-/])(?:R\d\d|[CMFHSL]\d{1,2})(?!\w|\.\d)")
FILE = re.compile(r"(?<![\w./{}*-])((?:[\w-]+/)*[\w-]+\.(?:md|py))(?![\w{}*/])")
LINK = re.compile(r"\]\(([\w./-]*\.md)?#([\w-]+)\)")
OUTSIDE = re.compile(r"\b(PROTOCOL|CORE_SHAPE|SEED_SYSTEMS|GPU_COST_MODELS|CHECKER|SIM_PEERS|LIVE_PEERS\w*)\b")
"""Notes that this repository was written from, and does not have."""

OTHER_PROJECTS = {
    "benchmarks/datasets.py": "vLLM",
    "block_pool.py": "vLLM",
    "kv_cache_interface.py": "vLLM",
    "push_worker.py": "vLLM 0.32.0",
    "p2p_nccl_engine.py": "vLLM #18242",
    "tensor_memory_pool.py": "vLLM #18242",
    "tests/test_kv_transfer_params.py": "vLLM #12957",
    "detokenizer_utils.py": "vLLM",
    "modeling_llama.py": "transformers",
    "modeling_rope_utils.py": "transformers",
    "time_estimator.py": "DistServe",
    "design/transfer-engine/efa_transport.md": "Mooncake",
    "01_real_traffic.py": "written by notebooks/text.py",
    "notebooks/01_real_traffic.py": "written by notebooks/text.py",
}
NO_RULES = {"H20": "a GPU", "F16": "a dtype", "F32": "a dtype", "F64": "a dtype"}


def texts(path: Path) -> Iterator[str]:
    """What a file says to its readers: docstrings and comments, or the whole document."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    if path.suffix == ".toml":
        yield from (line for line in source.splitlines() if line.startswith("#"))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def sections() -> frozenset[str]:
    spec = (ROOT / "docs/spec.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", spec, re.MULTILINE))


@cache
def rules() -> frozenset[str]:
    """The ids that the first cell of a row of docs/spec.md defines, or a heading of docs/invariants.md."""
    spec = (ROOT / "docs/spec.md").read_text(encoding="utf-8")
    invariants = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    in_rows = re.findall(r"^\| ([RCMFH]\d{1,2})(?: \w+)? \|", spec, re.MULTILINE)
    return frozenset([*in_rows, *re.findall(r"^### ([SL]\d{1,2}): ", invariants, re.MULTILINE)])


@cache
def files() -> frozenset[str]:
    """The name of every file, and each end of its path that begins at a folder."""
    names = set()
    ours = ("*.md", "*.py", "*/**/*.md", "notebooks/*.py")
    for path in (*PYTHON, *(path for pattern in ours for path in ROOT.glob(pattern))):
        names_on_path = path.relative_to(ROOT).parts
        names |= {"/".join(names_on_path[i:]) for i in range(len(names_on_path))}
    return frozenset(names)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The headings of a document, as GitHub makes anchors of them."""
    headings = re.findall(r"^#{1,6} (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return frozenset(plain)


def elsewhere(name: str) -> bool:
    """Whether a file is one of another project."""
    return name.startswith(("vllm/", "v1/")) or name in OTHER_PROJECTS


def dead_ends(text: str) -> list[str]:
    """The citations of a text that lead nowhere."""
    found = [f"spec {number}" for number in SECTION.findall(text) if number not in sections()]
    found += [rule for rule in RULE.findall(text) if rule not in rules() and rule not in NO_RULES]
    found += [name for name in FILE.findall(text) if name not in files() and not elsewhere(name)]
    return found + OUTSIDE.findall(text)


@pytest.mark.parametrize("path", [*PYTHON, *DOCUMENTS, *SCENARIOS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_citations_lead_somewhere(path: Path) -> None:
    written = {block.title for block in all_blocks(path.read_text(encoding="utf-8"))} if path.suffix == ".md" else ()
    assert [dead for text in texts(path) for dead in dead_ends(text) if dead not in written] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_headings_lead_to_headings(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [
        (target, anchor) for target, anchor in links if anchor not in anchors(path.parent / target if target else path)
    ] == []


def test_every_kind_of_rule_is_defined_whole() -> None:
    numbers = {"C": 13, "M": 18, "H": 6, "S": 12, "L": 12}
    expected = {f"{letter}{n}" for letter, count in numbers.items() for n in range(1, count + 1)}
    expected |= {f"R{n:02}" for n in range(1, 53)} | {f"F{n}" for n in range(11)}
    assert rules() == expected


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("as in spec 2.7 and spec 8", []),
        ("as in spec 2.77", ["spec 2.77"]),
        ("races R01, R52 (C13, F0; M18)", []),
        ("races R00 and R53, C14", ["R00", "R53", "C14"]),
        ("hazard H7, invariants S1 and L13", ["H7", "L13"]),
        ("an H20 computes in F32, an H100 too", []),
        ("docs/spec.md, spec.md and `producer/rules.py`", []),
        ("docs/wire.md", ["docs/wire.md"]),
        ("see pdflow/protocol/nothing.py", ["pdflow/protocol/nothing.py"]),
        ("consumer/nothing.py and nothing.py", ["consumer/nothing.py", "nothing.py"]),
        ("vllm/v1/metrics/loggers.py, vLLM's push_worker.py", []),
        ("PROTOCOL 7.3, SEED_SYSTEMS section 2", ["PROTOCOL", "SEED_SYSTEMS"]),
    ],
)
def test_a_citation_that_leads_nowhere_is_found(text: str, dead: list[str]) -> None:
    assert dead_ends(text) == dead


def test_docstrings_of_attributes_and_comments_are_read(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""spec 1."""\nX = "spec 9.1"\n"""spec 9.2"""\n\n\ndef f() -> None:\n    # spec 9.3\n    ...\n')
    assert [dead for text in texts(path) for dead in dead_ends(text)] == ["spec 9.2", "spec 9.3"]
