"""The table of faults: python -m benchmarks.vllm.faults --connectors stock,pdflow --faults 1,2,3 --json FILE

Each fault is done to a real pair of vLLM instances. One row per fault: what pdflow must do, what each connector was
seen to do, and whether that is met. `--faults 4` means all rows of number 4, `--list` lists them. A connector is a name
(`stock-push`, ...) or a family (`stock`, `pdflow`), whose mode each fault chooses.

Results are kept in FILE after each fault; what is done is not done again without --again. The table is made of all
that FILE has; those of docs/vllm.md are in benchmarks/results/vllm_faults.json. Exits with 1 if a requirement is not
met by a connector of pdflow.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from benchmarks.vllm.cases import CASES, Case
from benchmarks.vllm.connectors import NAMES, origin_of
from benchmarks.vllm.instances import StartError, default_work
from benchmarks.vllm.reference import Reference
from benchmarks.vllm.scene import Scene

for _module in ("request_faults", "process_faults", "transfer_faults", "chaos"):
    import_module(f"benchmarks.vllm.{_module}")

FAMILIES: Final = ("stock", "pdflow")
CASE_S: Final = 1800.0


def chosen(faults: str | None) -> list[Case]:
    """Return the faults that the command line names. SystemExit for an unknown one."""
    if faults is None:
        return [each for _, each in sorted(CASES.items(), key=_by_number)]
    found: list[Case] = []
    for name in faults.split(","):
        those = [each for key, each in CASES.items() if key == name or key.startswith(f"{name}-")]
        if not those:
            raise SystemExit(f"no fault is called {name!r}; there are {', '.join(CASES)}")
        found += those
    return found


async def observe(connector: str, fault: Case, work: Path, reference: Reference) -> dict[str, Any]:
    """Do a fault to a fresh pair, and return what was seen."""
    scene = Scene(connector, fault.setup, work, reference)
    scene.p.label = scene.d.label = f"{fault.key}-"
    started = trio.current_time()
    try:
        with trio.fail_after(CASE_S):
            await scene.start()
            finding = await fault.run(scene)
        result = attrs.asdict(finding) | {"done": True}
    except* (AssertionError, StartError, OSError, trio.TooSlowError, KeyError) as errors:
        traceback.print_exception(errors)
        first = errors.exceptions[0]
        text = str(first).splitlines()[0] if str(first) else type(first).__name__
        result = {"met": False, "observed": f"not done: {text}", "facts": {}, "done": False}
    finally:
        with trio.CancelScope(shield=True):
            await scene.stop()
    return result | {"connector": connector, "seconds": round(trio.current_time() - started, 1)}


async def run(arguments: argparse.Namespace) -> int:
    results: dict[str, dict[str, Any]] = {}
    if arguments.json is not None and arguments.json.is_file():
        results = json.loads(arguments.json.read_text())
    reference = Reference(arguments.work)
    try:
        for fault in chosen(arguments.faults):
            for column in arguments.connectors.split(","):
                connector = f"{column}-{fault.mode}" if column in FAMILIES else column
                if connector not in NAMES:
                    raise SystemExit(f"no connector is called {connector!r}; there are {', '.join(NAMES)}")
                kept = results.setdefault(column, {})
                known = not arguments.again and kept.get(fault.key, {}).get("done")
                if known or origin_of(connector) not in fault.origins:
                    continue
                kept[fault.key] = await observe(connector, fault, arguments.work, reference)
                print(f"{connector} {fault.key}: {kept[fault.key]}", file=sys.stderr, flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(results, indent=2))
    finally:
        with trio.CancelScope(shield=True):
            await reference.stop()
    print(table(results))
    ours = [each for column, kept in results.items() if origin_of(column) == "pdflow" for each in kept.values()]
    return int(not all(each["met"] for each in ours))


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table as Markdown: a row per fault that a connector has a result for."""
    columns = list(results)
    heads = ["#", "fault", "pdflow must", *(f"{name} observed" for name in columns), "met"]
    rows = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for key, fault in sorted(CASES.items(), key=_by_number):
        if not any(key in results[name] for name in columns):
            continue
        cells = [results[name][key]["observed"].replace("|", "/") if key in results[name] else "" for name in columns]
        rows.append(f"| {' | '.join([key, fault.title, fault.must, *cells, verdict(results, key)])} |")
    return "\n".join(rows)


def _by_number(item: tuple[str, Case]) -> int:
    """Numbered rows first, in their order; then named ones, as they were registered."""
    number = item[0].partition("-")[0]
    return int(number) if number.isdigit() else len(CASES)


def verdict(results: dict[str, dict[str, Any]], key: str) -> str:
    """Return what the last cell of a row says: of pdflow whether it is met, of stock whether the fault shows."""
    found = []
    for name, kept in results.items():
        if key not in kept:
            continue
        met = kept[key]["met"]
        if not kept[key]["done"]:
            found.append(f"{name}: not done")
        elif origin_of(name) == "stock":
            found.append("not shown on stock" if met else "shown on stock")
        else:
            found.append(f"{name}: {'met' if met else 'NOT MET'}")
    return ", ".join(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default="stock,pdflow")
    parser.add_argument("--faults", help="keys or numbers, separated by commas; all by default")
    parser.add_argument("--json", type=Path, help="results are kept here")
    parser.add_argument("--again", action="store_true", help="do again what is kept")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--work", type=Path, default=default_work())
    arguments = parser.parse_args()
    if arguments.list:
        for _, each in sorted(CASES.items(), key=_by_number):
            print(f"{each.key:20} {each.title}: {each.must}")
        raise SystemExit
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))
