"""The searches of `pdflow check`, in a copy of the packages: `reach` makes each and records its steps (steps.py) and
the lines that it executes; `hunt` makes those that a bug can change, until one notices the bug that the copy has.

Runs as a script in the folder of the copy, whose packages it imports: of any revision since the first that has
`pdflow_sim.check.search.workers`. It prints one JSON object. Both run with the same PYTHONHASHSEED.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steps import Recorder, differs  # The folder of this script comes first in sys.path.

Json = dict[str, Any]
WALKS = 6_400
"""Random walks of each dialect, as in `pdflow check all`."""
SLOW = 8
"""A search that uses this many times the CPU time that it uses without a bug, and START_S more, is stopped."""
START_S = 8.0
ENDLESS = 3
"""With so many searches stopped, a bug is noticed: `pdflow check all` does not end in time."""
NEVER_ENDS = "never ends"


def searches() -> dict[str, Callable[[], Json]]:
    """Return every search of `pdflow check all` by its name, but for mutants. Each returns what it noticed
    ("caught", "what"), or counts that tests assert."""
    from pdflow.methods.catalogue import METHODS
    from pdflow.protocol.dialect import STRICT, VLLM_COMPAT
    from pdflow_sim.check.datapath.rows import selected_rows
    from pdflow_sim.check.scopes.catalogue import SCOPES

    found: dict[str, Callable[[], Json]] = {}
    for named in SCOPES:
        if not named.nightly:
            found[f"scope {named.name}"] = _scope(named)
    for method, dialect in selected_rows(list(METHODS), None):
        found[f"data path {method.name}, {dialect}"] = _data_path(method, dialect)
    found |= _routers()
    for dialect in (STRICT, VLLM_COMPAT):
        found[f"walks {dialect.name}"] = _walks(dialect)
    found["races"] = _races
    return found


def _scope(named: Any) -> Callable[[], Json]:
    def searched() -> Json:
        from pdflow_sim.check.search.workers import SearchLimits, search

        found = search(named, SearchLimits(), lambda *_: None)
        if found.counterexample is not None:
            verdict = found.counterexample.verdict
            assert verdict is not None
            return {"caught": verdict.invariant, "what": verdict.what}
        if found.stopped_by:
            return {"stopped": found.stopped_by}
        if found.missed:
            return {"caught": "goal not reached", "what": ", ".join(found.missed)}
        return {"counts": [found.states, found.transitions]}

    return searched


def _data_path(method: Any, dialect: Any) -> Callable[[], Json]:
    def searched() -> Json:
        from pdflow_sim.check.datapath.rows import row

        found = row(method, dialect)
        if found.ok:
            return {"counts": [found.states, found.transitions]}
        findings = sorted(finding.value for finding in found.counterexamples)
        return {"caught": "data path", "what": ", ".join([*findings, *found.missed])}

    return searched


def _routers() -> dict[str, Callable[[], Json]]:
    """Return the searches of routers alone; none in a revision that has none."""
    try:
        from pdflow_sim.check.routers.catalogue import SETTINGS
    except ImportError:
        return {}
    return {f"router {setting.name}": _router(setting) for setting in SETTINGS}


def _router(setting: Any) -> Callable[[], Json]:
    def searched() -> Json:
        from pdflow_sim.check.routers.world import RouterWorld
        from pdflow_sim.check.search.forward import explore

        found = explore(RouterWorld(setting))
        if found.counterexamples:
            what = ", ".join(sorted(finding.value for finding in found.counterexamples))
            return {"caught": "router", "what": what}
        return {"counts": [found.states, found.transitions]}

    return searched


def _walks(dialect: Any) -> Callable[[], Json]:
    def walked() -> Json:
        from pdflow_sim.check.search.campaign import WalkTask, walks

        found = walks(WalkTask(dialect=dialect, first=True), range(1, WALKS + 1))
        for name, failure in found.failures.items():
            return {"caught": name, "what": f"seed {failure.seed}: {failure.what}"}
        return {"counts": [found.runs, found.moves]}

    return walked


def _races() -> Json:
    from pdflow_sim.check.races.catalogue import RACES
    from pdflow_sim.check.races.verdict import rows

    summaries = []
    for row in rows(float("inf"), list(RACES), [], time.monotonic):
        for dialect, outcome in row.found.items():
            if not outcome.ok:
                return {"caught": "race", "what": f"{row.race.number} in {dialect}: {outcome.summary}"}
            summaries.append(outcome.states)
    return {"counts": summaries}


def reach(folder: Path, only: str) -> Json:
    """Make every search with one of these texts, between commas, in its name, without a bug. Each has a process of its
    own, so that no cache hides a call from a later one. A search that was made before is not made again."""
    found: Json = {}
    for number, (name, made) in enumerate(searches().items()):
        if not any(text in name for text in only.split(",")):
            continue
        path = folder / f"{number:03d}.json"
        if not path.exists():
            sys.stderr.write(f"\r\033[K{number} {name[:100]}")
            sys.stderr.flush()
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(_forked(partial_of(made, path))))
            partial.rename(path)
        found[name] = json.loads(path.read_text()) | {"path": str(path)}
    sys.stderr.write("\n")
    return found


def partial_of(made: Callable[[], Json], path: Path) -> Callable[[], Json]:
    return lambda: _measured(made, path)


def _measured(made: Callable[[], Json], path: Path) -> Json:
    from coverage import Coverage

    folder = Path("pdflow").resolve()
    recorder = Recorder(folder)
    recorder.install()
    coverage = Coverage(source=[str(folder)], data_file=None, config_file=False)
    coverage.start()
    began = time.process_time()
    ended = made()
    seconds = time.process_time() - began
    coverage.stop()
    data = coverage.get_data()
    outside = {Path(file).relative_to(folder).as_posix(): data.lines(file) for file in data.measured_files()}
    lines = {"outside": outside, "inside": recorder.save(path)}
    return {"seconds": round(seconds, 3), "counts": ended["counts"], **lines}


def _forked(made: Callable[[], Json]) -> Json:
    """Return what a function returns in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            json.dump(made(), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as back:
        text = back.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a search failed in a process of its own: {status}"
    answer: Json = json.loads(text)
    return answer


class _StoppedError(BaseException):
    """A search has used its CPU time. Not an Exception, which searches would take for a crash of what they run."""


def _stop(_number: int, _frame: object) -> None:
    raise _StoppedError


def hunt(order: list[Json], file: str, lines: list[int]) -> Json:
    """Make the searches that a bug in these lines can change, until one notices something.

    Args:
        order: for each search {"name", "seconds", "counts", "path", "outside"}: as `reach` measured it, and whether it
            executes these lines outside steps.
    """
    began = time.process_time()
    made = searches()
    signal.signal(signal.SIGPROF, _stop)
    found: Json = {"tried": len(order), "made": 0, "other_counts": [], "stopped": []}
    for search in order:
        name = search["name"]
        if not search["outside"] and not differs(Path(search["path"]), [(file, line) for line in lines]):
            continue
        found["made"] += 1
        signal.setitimer(signal.ITIMER_PROF, SLOW * search["seconds"] + START_S)
        try:
            ended = made[name]()
        except _StoppedError:
            ended = {"stopped": "time"}
        except Exception as error:
            ended = {"caught": "crash", "what": f"{type(error).__name__}: {error}"[:200]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if "caught" in ended:
            return found | ended | {"by": name, "cpu_s": round(time.process_time() - began, 1)}
        if "stopped" in ended:
            found["stopped"].append(name)
            if len(found["stopped"]) == ENDLESS:
                return found | {"caught": NEVER_ENDS, "by": name, "cpu_s": round(time.process_time() - began, 1)}
        elif ended["counts"] != search["counts"]:
            found["other_counts"].append(name)
    return {"caught": "", **found, "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    import pdflow

    assert Path(str(pdflow.__file__)).is_relative_to(Path.cwd()), f"{pdflow.__file__} is not in this folder"
    answer = reach(Path(sys.argv[2]), sys.argv[3]) if sys.argv[1] == "reach" else hunt(**json.load(sys.stdin))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
