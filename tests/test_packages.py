"""Which package may import which, that `pdflow` stays pure, and the sizes of folders.

Every import is found by walking the syntax tree, wherever it stands: at the top, in a function, under TYPE_CHECKING, or
as text given to `import_module`. What a file may import is a closed list, so that a clock, a thread or a socket that
nobody thought of is refused as well. The exceptions stand in EXCEPTIONS, once, by name, each with its reason.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOTS = {"pdflow": ".", "pdflow_sim": "sim", "pdflow_runtime": "runtime"}
"""Where each package lies: the folder that holds it."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PURE: Final = _names(
    """
    __future__ abc array ast attrs bisect cattrs collections contextlib copy difflib enum fractions functools hashlib
    heapq html itertools json math msgspec numpy operator pathlib pdflow re rich statistics string struct tomllib types
    typing
    """
)
"""What any file of pdflow may import. `pathlib` is for arithmetic: calls that touch a disk are found below."""

SIMULATED: Final = PURE | {"simpy", "pdflow_sim"}
CHECKED: Final = SIMULATED | _names("gc textwrap")
"""What sim/pdflow_sim/check may import besides: it looks for no cycles among millions of states, and draws."""
LIVE: Final = PURE | _names(
    """
    pdflow_runtime
    trio httptools argparse base64 ctypes errno fcntl gc hmac http importlib ipaddress logging mmap os outcome
    platform prometheus_client resource secrets select shlex shutil signal socket ssl stat subprocess sys tempfile
    textwrap threading urllib uuid weakref
    """
)
"""What the live world may import: it touches the world, but by trio, and reads the clock in one place."""
COMPUTING: Final = LIVE | _names("torch safetensors tokenizers jinja2")
"""What runtime/pdflow_runtime/engines may import besides: what computes tokens."""
MOVING: Final = LIVE | _names("nixl mooncake torch")
"""What runtime/pdflow_runtime/transports and gpu may import besides: what moves bytes."""
INSIDE_VLLM: Final = LIVE | _names("dataclasses huggingface_hub torch vllm")
"""What the connector's files may import besides, in vLLM's processes: those that VLLM_FREE does not name."""
VLLM_FREE: Final = ("runtime/pdflow_runtime/vllm/scheduler/", "runtime/pdflow_runtime/vllm/worker/")
"""The connector's halves, which are tested without vLLM."""
CLOCK: Final = "runtime/pdflow_runtime/clock.py"
CLOCKS: Final = _names("current_time perf_counter monotonic")


class Permit(NamedTuple):
    reason: str
    modules: str = ""
    touches_files: bool = False


EXCEPTIONS: Final = {
    "pdflow/__init__.py": Permit(
        "its public functions open sim/ when called", "importlib os ipywidgets pandas pdflow_sim"
    ),
    "pdflow/__main__.py": Permit("python -m pdflow"),
    "pdflow/cli/__init__.py": Permit(
        "prints; what cannot be printed becomes `?`, or goes nowhere",
        "click codecs errno io os sys",
        touches_files=True,
    ),
    "pdflow/cli/bench_options.py": Permit("options of a command", "click"),
    "pdflow/cli/checking.py": Permit("commands: opens sim/ when asked", "click importlib pdflow_sim"),
    "pdflow/cli/completion.py": Permit("of options of commands", "click"),
    "pdflow/cli/explaining.py": Permit(
        "a command: opens sim/ when asked, counts processors", "click importlib os pdflow_sim"
    ),
    "pdflow/cli/interrupts.py": Permit("SIGTERM", "signal threading"),
    "pdflow/cli/listings.py": Permit("commands: opens sim/ when asked", "click pdflow_sim"),
    "pdflow/cli/options.py": Permit("options of commands", "click"),
    "pdflow/cli/planning.py": Permit("a command: opens sim/ when asked", "click importlib os pdflow_sim"),
    "pdflow/cli/runs.py": Permit(
        "commands: opens sim/ or runtime/ when asked", "click importlib pdflow_runtime pdflow_sim sys"
    ),
    "pdflow/cli/serving.py": Permit("commands: opens runtime/ when asked", "click importlib pdflow_runtime sys"),
    "pdflow/cli/sweeping.py": Permit("a command: opens sim/ when asked", "click importlib pdflow_sim"),
    "pdflow/cli/traces.py": Permit("commands", "click"),
    "pdflow/version.py": Permit("asks the installation for its version", "importlib"),
    "pdflow/scenario/costs/aiconfigurator.py": Permit(
        "asks an extra, if it is installed", "aiconfigurator_core importlib logging"
    ),
    "pdflow/scenario/costs/step_costs.py": Permit(
        "reads cost files, and those that come with pdflow", "importlib", touches_files=True
    ),
    "pdflow/scenario/reading/editable.py": Permit("writes scenario files", "os", touches_files=True),
    "pdflow/scenario/reading/load.py": Permit("reads scenario files", "os", touches_files=True),
    "pdflow/scenario/costs/error_bars.py": Permit(
        "reads the error bars that come with pdflow", "importlib", touches_files=True
    ),
    "pdflow/scenario/presets.py": Permit("reads the presets that come with pdflow", "importlib", touches_files=True),
    "pdflow/workload/traces/command.py": Permit("quotes its own command", "shlex"),
    "pdflow/workload/traces/described.py": Permit("wraps lines", "textwrap"),
    "pdflow/workload/traces/readers.py": Permit("reads traces and bundled models", "importlib", touches_files=True),
    "pdflow/results/comparison/frame.py": Permit("makes tables, by an extra", "pandas"),
    "pdflow/results/plots.py": Permit("draws, by an extra; in memory", "base64 io matplotlib"),
    "pdflow/results/result.py": Permit("says that it hands out tables", "pandas"),
    "pdflow/results/command_line.py": Permit("quotes the arguments of a command", "shlex"),
    "pdflow/results/files/write.py": Permit("writes and reads result files", "gzip os", touches_files=True),
    "pdflow/results/files/read.py": Permit("reads result files", touches_files=True),
    "pdflow/results/files/events.py": Permit("writes and reads events.jsonl", touches_files=True),
    "pdflow/results/files/merge_events.py": Permit("merges events files", touches_files=True),
    "runtime/pdflow_runtime/clock.py": Permit("reads the clocks", "time"),
    "runtime/pdflow_runtime/engines/weight_hash.py": Permit("hashes files by several threads", "concurrent"),
    "runtime/pdflow_runtime/observe/spans.py": Permit("makes spans, by an extra", "opentelemetry"),
    "runtime/pdflow_runtime/store/server.py": Permit("asks a server, by an extra", "valkey"),
    "sim/pdflow_sim/check/search/campaign.py": Permit(
        "walks in processes, until the time is over", "concurrent multiprocessing time"
    ),
    "sim/pdflow_sim/check/command.py": Permit(
        "prints, counts processors, opens the part that was asked for", "importlib os sys time"
    ),
    "sim/pdflow_sim/check/search/host_resources.py": Permit(
        "reads the memory of this process and the number of CPUs", "mmap os resource sys", touches_files=True
    ),
    "sim/pdflow_sim/check/search/workers.py": Permit(
        "searches in processes, within limits of time and memory", "concurrent multiprocessing queue time"
    ),
    "sim/pdflow_sim/check/suites/methods.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/suites/mutants.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/suites/suite.py": Permit("a budget of time; writes stories", "time", touches_files=True),
    "sim/pdflow_sim/check/suites/races.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/suites/routers.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/suites/scenario.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/suites/walk.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/check/report.py": Permit("how long it has taken so far", "time"),
    "sim/pdflow_sim/check/counterexamples/counterexample.py": Permit(
        "reads and writes story files", touches_files=True
    ),
    "sim/pdflow_sim/observe/live_table.py": Permit("draws a few times a second", "time"),
    "sim/pdflow_sim/experiments/ray_cluster.py": Permit(
        "connects to Ray, an extra, or starts it",
        "logging os ray signal socket sys threading warnings",
        touches_files=True,
    ),
    "sim/pdflow_sim/experiments/ray_pool.py": Permit(
        "runs tasks by Ray, an extra, and looks for files on another host", "os platform ray", touches_files=True
    ),
    "sim/pdflow_sim/experiments/row_cache.py": Permit("keeps rows of sweeps", touches_files=True),
    "sim/pdflow_sim/run.py": Permit(
        "--out, SOURCE_DATE_EPOCH, a wall clock for the speed it prints, Ctrl-C",
        "os signal sys threading time",
        touches_files=True,
    ),
    "sim/pdflow_sim/plan/command.py": Permit("reads whether a folder has a plan", touches_files=True),
    "sim/pdflow_sim/plan/planner.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/plan/probes.py": Permit("a budget of time", "time"),
    "sim/pdflow_sim/plan/result.py": Permit("hands out tables, by an extra", "os pandas"),
    "sim/pdflow_sim/experiments/seen.py": Permit("reads what requests took", "csv io", touches_files=True),
    "sim/pdflow_sim/experiments/sweep.py": Permit("a table and a bar, by an extra", "os pandas tqdm warnings"),
    "sim/pdflow_sim/experiments/sweep_command.py": Permit("writes CSV, through `replacing`", "csv io"),
    "sim/pdflow_sim/plan/launch/script.py": Permit("writes a shell script", "shlex textwrap"),
    "sim/pdflow_sim/whatif.py": Permit("shows sliders, by an extra", "ipywidgets"),
    "sim/pdflow_sim/uncollected.py": Permit("runs without the search for cycles", "gc"),
    "sim/pdflow_sim/experiments/workers.py": Permit(
        "runs in processes, which end with it", "multiprocessing os subprocess sys threading"
    ),
}

MAY_IMPORT: Final = {
    "protocol": "",
    "memory": "protocol",
    "layout": "protocol",
    "methods": "protocol memory layout",
    "network": "protocol",
    "cost": "protocol",
    "routing": "protocol",
    "engine": "protocol memory cost",
    "serving": "protocol methods engine",
    "workload": "protocol scenario",
    "faults": "protocol",
    "scenario": "protocol cost layout workload faults methods",
    "results": "protocol workload scenario",
    "wiring": "protocol layout engine routing methods scenario",
    "cli": "scenario workload results methods sim",
}
"""Which packages each package of pdflow may import, besides `errors` and `version`. docs/architecture.md shows it."""

VOCABULARY: Final = _names(
    "dialect effects errors events geometry ids messages phases timers values wire.checks wire.limits"
)
"""What other packages may import of protocol: its vocabulary, not its endpoints. `wiring` makes these."""

DISK: Final = _names("""
    absolute chmod cwd exists expanduser glob home is_dir is_file iterdir lstat mkdir open read_bytes read_text
    rename resolve rglob rmdir samefile stat symlink_to touch unlink write_bytes write_text
    """)
"""Methods of Path (and of importlib's resources) that touch a disk, or ask where the process runs."""

NUMPY_IO: Final = _names("random load save savez loadtxt savetxt genfromtxt fromfile memmap datetime64")
BUILTINS: Final = _names("open print input breakpoint __import__ exec eval")


def violations(path: str, source: str) -> list[str]:
    """What a file at that place, with that text, does against the rules."""
    package = next(top for top, root in ROOTS.items() if path.startswith(f"{root}/{top}/".removeprefix("./")))
    permitted = EXCEPTIONS.get(path, Permit("none"))
    checks = path.startswith("sim/pdflow_sim/check/")
    live = COMPUTING if path.startswith("runtime/pdflow_runtime/engines/") else LIVE
    if path.startswith(("runtime/pdflow_runtime/transports/", "runtime/pdflow_runtime/gpu/")):
        live = MOVING
    elif path.startswith("runtime/pdflow_runtime/vllm/") and not path.startswith(VLLM_FREE):
        live = INSIDE_VLLM
    home = CHECKED if checks else {"pdflow": PURE, "pdflow_sim": SIMULATED, "pdflow_runtime": live}[package]
    allowed = home | _names(permitted.modules)
    tree = ast.parse(source)
    found = []
    for line, module, lazy in _imports(tree):
        top = module.partition(".")[0]
        if top not in allowed or (top == "numpy" and not NUMPY_IO.isdisjoint(module.split("."))):
            found.append(f"{path}:{line}: imports {module}")
        elif module.startswith("pdflow_sim.check.mutants") and not checks:
            found.append(f"{path}:{line}: imports {module}; only sim/pdflow_sim/check may")
        elif package == "pdflow" and top in ("pdflow_sim", "pdflow_runtime") and not lazy:
            found.append(f"{path}:{line}: imports {module} at module level; only inside a function")
        elif package == "pdflow" and top == "pdflow":
            found += [f"{path}:{line}: {problem}" for problem in _package_problem(path, module)]
    if package == "pdflow_runtime":
        found += [] if path == CLOCK else [f"{path}:{line}: reads a clock" for line in _clocks(tree)]
    elif package == "pdflow" or path not in EXCEPTIONS:
        found += [f"{path}:{line}: {what}" for line, what in _touches(tree, permitted.touches_files)]
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, module, inside a function or for type checkers alone) of every import; `from pdflow import x` is pdflow.x
    if that is a module."""
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef)
        or (isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING")
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module, id(node) in lazy
            for alias in node.names:
                below = ROOT.joinpath(ROOTS.get(module.partition(".")[0], "."), *module.split("."), alias.name)
                if module == "numpy" or below.is_dir() or below.with_suffix(".py").is_file():
                    yield node.lineno, f"{module}.{alias.name}", id(node) in lazy
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value, id(node) in lazy


def _package_problem(path: str, module: str) -> Iterator[str]:
    segments = module.split(".")
    home = PurePosixPath(path).parts[1].removesuffix(".py")
    if len(segments) < 2 or home in ("__init__", "__main__") or segments[1] == home:
        return
    if segments[1] in ("errors", "version") and home != "protocol":
        return
    if segments[1] not in MAY_IMPORT.get(home, "").split():
        yield f"{home} imports {module}; it may import {MAY_IMPORT.get(home) or 'no other package'}"
    elif (
        segments[1] == "protocol"
        and home != "wiring"
        and len(segments) > 2
        and ".".join(segments[2:]) not in VOCABULARY
    ):
        yield f"{home} imports {module}, which is not its vocabulary"


def _touches(tree: ast.AST, files: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _name(node.value) in ("np", "numpy") and node.attr in NUMPY_IO:
            yield node.lineno, f"uses numpy.{node.attr}"
        if not isinstance(node, ast.Call) or files:
            continue
        name = _name(node.func)
        if isinstance(node.func, ast.Name) and name in BUILTINS:
            yield node.lineno, f"calls {name}()"
        elif isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Call) and _name(node.func.value.func) == "super":
                continue
            moves = name == "replace" and len(node.args) == 1 and not node.keywords  # Path's; str's takes two
            if name in DISK or moves:
                yield node.lineno, f"calls .{name}(), which touches a disk"


def _clocks(tree: ast.AST) -> Iterator[int]:
    """Lines that read a clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CLOCKS:
            yield node.lineno


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _files() -> list[str]:
    return sorted(
        p.relative_to(ROOT).as_posix() for package, root in ROOTS.items() for p in (ROOT / root / package).rglob("*.py")
    )


def test_imports_run_one_way_and_the_core_is_pure() -> None:
    found = [problem for path in _files() for problem in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_exceptions_name_files_that_need_them() -> None:
    for path, exception in EXCEPTIONS.items():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        used = {module.partition(".")[0] for _, module, _ in _imports(tree)}
        assert _names(exception.modules) <= used, f"{path}: of {exception.modules}, not all is needed"
        if exception.touches_files:
            assert [*_touches(tree, False)] or "os" in exception.modules, f"{path} touches no file"


def test_packages_are_the_folders() -> None:
    folders = {path.name for path in (ROOT / "pdflow").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(MAY_IMPORT)


def test_architecture_shows_the_packages() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for package, imports in MAY_IMPORT.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{package}` |"))
        assert row.endswith(f"| {', '.join(imports.split()) or 'no other package'} |")


def test_tests_mirror_packages() -> None:
    packages = set(MAY_IMPORT) | {
        "check",
        "deploy",
        "serving",
        "sim",
        "runtime",
        "docs",
        "benchmarks",
        "notebooks",
        "vllm",
    }
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert folders <= packages, f"tests of no package: {sorted(folders - packages)}"
    bare = {*MAY_IMPORT, "sim"} - folders
    assert not bare, f"packages without tests: {sorted(bare)}"


def test_a_folder_has_at_most_twenty_files() -> None:
    """A wish is about fifteen; `__init__.py` is not counted."""
    counts = Counter(path.rpartition("/")[0] for path in _files() if not path.endswith("/__init__.py"))
    assert not {folder: count for folder, count in counts.items() if count > 20}


def test_a_class_name_is_defined_once() -> None:
    defined: dict[str, list[str]] = {}
    for path in _files():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_a_wheel_installs_only_names_that_begin_with_pdflow() -> None:
    """So that a `sim` or a `runtime` of somebody else, on the path or installed, is never taken for ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["tool"]["setuptools"]["packages"]["find"]
    assert set(found["where"]) == set(ROOTS.values())
    assert found["include"] == ["pdflow*"]
    for package, root in ROOTS.items():
        assert (ROOT / root / package / "py.typed").is_file()
    assert not [path for root in ("sim", "runtime") for path in (ROOT / root).glob("*.py")]


PLANTED = [
    ("pdflow/protocol/producer/lease.py", "import time"),
    ("pdflow/protocol/producer/lease.py", "from datetime import datetime"),
    ("pdflow/protocol/producer/lease.py", "def f():\n    import random"),
    ("pdflow/protocol/producer/lease.py", "if TYPE_CHECKING:\n    import simpy"),
    ("pdflow/protocol/producer/lease.py", "from pdflow.memory.paged import PagedPool"),
    ("pdflow/protocol/producer/lease.py", "from pdflow import memory"),
    ("pdflow/protocol/producer/lease.py", "from pdflow.errors import PdflowError"),
    ("pdflow/protocol/producer/lease.py", "import os.path"),
    ("pdflow/protocol/producer/lease.py", "from .values import S"),
    ("pdflow/protocol/producer/lease.py", "from pdflow_sim.clock import Clock"),
    ("pdflow/protocol/producer/lease.py", "def f():\n    import_module('pdflow_runtime.driver')"),
    ("pdflow/engine/engine.py", "import threading"),
    ("pdflow/engine/engine.py", "import asyncio"),
    ("pdflow/engine/engine.py", "import trio"),
    ("pdflow/engine/engine.py", "import torch"),
    ("pdflow/engine/engine.py", "from pdflow.protocol.producer.rank import ProducerRank"),
    ("pdflow/engine/engine.py", "from pdflow.protocol.producer import rank"),
    ("pdflow/engine/engine.py", "from pdflow.routing.router import Router"),
    ("pdflow/workload/rng.py", "import secrets, uuid"),
    ("pdflow/workload/rng.py", "import numpy as np\nnp.random.default_rng(1)"),
    ("pdflow/workload/rng.py", "import numpy.random"),
    ("pdflow/workload/rng.py", "from numpy import random"),
    ("pdflow/results/figures/metrics.py", "import socket"),
    ("pdflow/results/figures/metrics.py", "import subprocess"),
    ("pdflow/results/figures/metrics.py", "def f(path):\n    return open(path)"),
    ("pdflow/results/figures/metrics.py", "def f(path):\n    return path.read_text()"),
    ("pdflow/results/figures/metrics.py", "def f(path):\n    path.replace('b')"),
    ("pdflow/results/figures/metrics.py", "print(1)"),
    ("pdflow/scenario/reading/load.py", "import time"),
    ("pdflow/cli/runs.py", "from pdflow_sim.run import simulate"),
    ("pdflow/cli/runs.py", "import importlib\nrun = importlib.import_module('pdflow_sim.run')"),
    ("pdflow/cli/serving.py", "from pdflow_runtime.process.one_host import main"),
    ("sim/pdflow_sim/world.py", "import pdflow_runtime.driver"),
    ("sim/pdflow_sim/world.py", "import time"),
    ("sim/pdflow_sim/world.py", "import random"),
    ("runtime/pdflow_runtime/driver.py", "from pdflow_sim.clock import Clock"),
    ("runtime/pdflow_runtime/driver.py", "import time"),
    ("runtime/pdflow_runtime/driver.py", "import asyncio"),
    ("runtime/pdflow_runtime/driver.py", "import pickle"),
    ("runtime/pdflow_runtime/driver.py", "import torch"),
    ("runtime/pdflow_runtime/driver.py", "import trio\ntrio.current_time()"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "source"), PLANTED, ids=lambda text: text.splitlines()[-1].strip())
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pdflow/engine/engine.py", "from pdflow.protocol.values import Instant"),
        ("pdflow/engine/engine.py", "'a.b'.replace('.', '/')"),
        ("pdflow/engine/engine.py", "msgspec.structs.replace(cell, phase=1)"),
        ("pdflow/results/result.py", "from pathlib import Path\nPath('a') / 'b'"),
        ("pdflow/cli/runs.py", "def f():\n    importlib.import_module('pdflow_sim.run')"),
        ("sim/pdflow_sim/world.py", "import simpy\nfrom pdflow.protocol.producer.rank import ProducerRank"),
        ("runtime/pdflow_runtime/driver.py", "import trio\nfrom pdflow.protocol.producer.rank import ProducerRank"),
        ("runtime/pdflow_runtime/engines/model.py", "import torch\nopen('config.json')"),
        ("runtime/pdflow_runtime/clock.py", "import trio\ntrio.current_time()"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    assert violations(path, source) == []
