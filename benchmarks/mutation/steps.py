"""Records of every step of every endpoint in a search, by which a bug can be tried without the search.

A search's graph is decided by the steps of its endpoints and cores: `handle(event, now)`. If a bug changes none of the
steps that a search makes, the search finds the same states as before, and notices nothing. So each search is made once,
and each different step recorded: the endpoint and the event before it, a digest of the endpoint and the effects after
it, and the lines that it executed. A bug is tried on the steps that executed its lines. If one of them ends otherwise,
or if the search executed these lines outside steps, the search itself is made.

Both record and try from a copy of the endpoint that was unpickled, so that sets and shared objects are alike. A copy
that ends otherwise for no good reason costs a search, no more.
"""

from __future__ import annotations

import pickle
import sys
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

DIGEST_BYTES: Final = 8
Line = tuple[str, int]


def outcome(before: bytes) -> bytes:
    """Return a digest of how a step ends."""
    body, arguments = pickle.loads(before)
    try:
        result = body.handle(*arguments)
        after = pickle.dumps((body, result), 5)
    except Exception as error:
        after = f"{type(error).__name__}: {error}".encode()
    return blake2b(after, digest_size=DIGEST_BYTES).digest()


class Recorder:
    """Records the steps of the endpoints of this process, from `install` on."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.known: dict[bytes, int] = {}
        """By the step before, its number."""
        self.digests: list[bytes] = []
        self.executed = array("I")
        """By step, the number of its set of lines."""
        self.line_sets: dict[frozenset[Line], int] = {}
        self.depth = 0
        self.wrapped: set[type] = set()

    def install(self) -> None:
        """Wrap `handle` of each class of endpoint as soon as a search has one."""
        from pdflow_sim.check.state.space import StateSpace

        original = StateSpace.endpoint

        def endpoint(space: Any, node: Any, body: Any) -> int:
            self.wrap(type(body))
            return original(space, node, body)

        StateSpace.endpoint = endpoint  # type: ignore[method-assign]

    def wrap(self, kind: type) -> None:
        if kind in self.wrapped:
            return
        self.wrapped.add(kind)
        original: Callable[..., Any] = kind.handle  # type: ignore[attr-defined]

        def handle(body: Any, *arguments: Any) -> Any:
            if self.depth:
                return original(body, *arguments)
            tracer = sys.gettrace()
            sys.settrace(None)
            self.depth += 1
            try:
                self.record(pickle.dumps((body, arguments), 5))
                return original(body, *arguments)
            finally:
                self.depth -= 1
                sys.settrace(tracer)

        kind.handle = handle  # type: ignore[attr-defined]

    def record(self, before: bytes) -> None:
        if before in self.known:
            return
        lines: set[Line] = set()

        def within(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                lines.add((frame.f_code.co_filename, frame.f_lineno))
            return within

        def entered(frame: Any, _event: str, _argument: Any) -> Any:
            return within if frame.f_code.co_filename.startswith(self.folder) else None

        sys.settrace(entered)
        try:
            digest = outcome(before)
        finally:
            sys.settrace(None)
        prefix = len(self.folder)
        relative = frozenset([(file[prefix:], line) for file, line in lines])
        self.known[before] = len(self.known)
        self.digests.append(digest)
        self.executed.append(self.line_sets.setdefault(relative, len(self.line_sets)))

    def save(self, path: Path) -> dict[str, list[int]]:
        """Write the steps; return the lines that they executed, by file."""
        offsets = array("Q", [0])
        with path.with_suffix(".steps").open("wb") as out:
            for before in self.known:
                out.write(before)
                offsets.append(offsets[-1] + len(before))
        meta = [sorted(lines) for lines in self.line_sets], self.executed, offsets, b"".join(self.digests)
        path.with_suffix(".meta").write_bytes(pickle.dumps(meta, 5))
        by_file: dict[str, set[int]] = {}
        for lines in self.line_sets:
            for file, line in lines:
                by_file.setdefault(file, set()).add(line)
        return {file: sorted(lines) for file, lines in by_file.items()}


def differs(path: Path, changed: Iterable[Line]) -> bool:
    """Return whether a step that executed one of these lines ends otherwise than recorded."""
    wanted = set(changed)
    line_sets, executed, offsets, digests = pickle.loads(path.with_suffix(".meta").read_bytes())
    hit = {number for number, lines in enumerate(line_sets) if not wanted.isdisjoint(map(tuple, lines))}
    with path.with_suffix(".steps").open("rb") as steps:
        for step, number in enumerate(executed):
            if number in hit:
                steps.seek(offsets[step])
                before = steps.read(offsets[step + 1] - offsets[step])
                if outcome(before) != digests[step * DIGEST_BYTES : (step + 1) * DIGEST_BYTES]:
                    return True
    return False
