"""The files that a live run leaves, in the form of a simulated one: DIR/results.json and requests.jsonl, and if asked
for events.jsonl, a timeline and a page.

Each process writes files of its own, line by line, so that one that is killed leaves what it had written: its notes
(`observe/event_log.py`), and every event that went into an endpoint with what came out of it
(`results/files/events.py`). They are merged when the cluster has ended (`results/files/merge_events.py`). Times are
those of the process's clock moved to the wall's, so that processes of one host can be compared. The header of an
engine's file names its incarnation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import msgspec

from pdflow.protocol.values import Address, Instant
from pdflow.results.command_line import command_line
from pdflow.results.files.bench_json import RunHeader, content_sha256
from pdflow.results.files.events import EventsHeader, EventsWriter
from pdflow.results.files.merge_events import merge_events
from pdflow.results.files.timeline import timeline
from pdflow.results.files.write import (
    EVENTS_NAME,
    PAGE_NAME,
    TIMELINE_NAME,
    OutputError,
    guarding,
    make_folder,
    write_text,
    write_timeline,
)
from pdflow.results.page.page import page
from pdflow.results.result import Result
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.version import version
from pdflow_runtime.clock import wall_offset_ns, wall_s
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.observe.event_log import Noted, Page
from pdflow_runtime.observe.rows import Rows, rows

NOTES_NAME: Final = "notes.jsonl"


class NotesHeader(msgspec.Struct, frozen=True):
    node: str
    offset_ns: int


@attrs.frozen(kw_only=True)
class Record:
    """The files to keep of a run: none without a folder."""

    out: Path | None = None
    events: bool = False
    timeline: bool = False
    html: bool = False

    def begin(self) -> None:
        """Remove the files that a killed run has left in the folder. OutputError."""
        if self.out is None:
            return
        make_folder(self.out)
        with guarding(self.out):
            for name in (NOTES_NAME, EVENTS_NAME):
                for file in self.out.glob(f"*.{name}"):
                    file.unlink()

    def component_arguments(self) -> list[str]:
        """Return the command-line options that each component gets for this record."""
        return [] if self.out is None else ["--out", str(self.out), *(["--events"] if self.events else [])]

    @contextmanager
    def of(self, node: LiveNode, scenario: ResolvedScenario, incarnation: int) -> Iterator[None]:
        """Write this node's files while the context is open. OutputError."""
        if self.out is None:
            yield
            return
        make_folder(self.out)
        stem = self._stem(node.name, incarnation)
        offset = wall_offset_ns()
        with ExitStack() as stack:
            _note(node, stack.enter_context(_opened(self.out / f"{stem}.{NOTES_NAME}")), offset)
            if self.events:
                path = self.out / f"{stem}.{EVENTS_NAME}"
                # The router has no lives that anybody could tell apart.
                incarnations = {node.name: incarnation} if incarnation else {}
                header = EventsHeader(
                    world="live", scenario=scenario.name, seed=scenario.seed, incarnations=incarnations
                )
                _observe(node, EventsWriter(stack.enter_context(_opened(path)), header, path), offset)
            yield

    def _stem(self, name: str, incarnation: int) -> str:
        """Return the beginning of the names of a process's files. A router that was restarted, which has no
        incarnation, takes the next number, so that its predecessor's files stay."""
        assert self.out is not None
        while (self.out / f"{name}-{incarnation:016x}.{NOTES_NAME}").exists():
            incarnation += 1
        return f"{name}-{incarnation:016x}"

    def conclude(self, scenario: ResolvedScenario) -> Result | None:
        """Merge the files of all processes into those of one run, and remove them. OutputError."""
        if self.out is None:
            return None
        if self.events:
            merge_events(self.out)
        found = rows(read_notes(self.out), scenario)
        result = Result.of(run_header(scenario), found.records, found.steps, found.totals)
        self._write(result, found, scenario)
        for file in self.out.glob(f"*.{NOTES_NAME}"):
            file.unlink()
        return result

    def _write(self, result: Result, found: Rows, scenario: ResolvedScenario) -> None:
        assert self.out is not None
        result.save(self.out)
        if self.timeline:
            metadata = {"scenario": scenario.name, "seed": scenario.seed, "interrupted": False}
            write_timeline(self.out / TIMELINE_NAME, timeline(found.records, found.recording), metadata)
        if self.html:
            write_text(self.out / PAGE_NAME, page(result, text_of(scenario), found.recording))


def run_header(scenario: ResolvedScenario) -> RunHeader:
    """Return the header of the results. Traffic is what clients send, so it names no rate."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return RunHeader(
        scenario_name=scenario.name,
        scenario_sha256=content_sha256(content_of(scenario)),
        seed=scenario.seed,
        version=version(),
        command_line=command_line(sys.argv[1:]),
        world="live",
        model_id=scenario.model.name,
        burstiness=None,
        source_date_epoch=int(epoch) if epoch and epoch.isdigit() else wall_s(),
        # No process records when each token was sent: `pdflow bench` measures ITL.
        slo=attrs.evolve(scenario.slo, itl_ms=None),
        workload_note="what clients sent to the live cluster"
        + ("" if scenario.slo.itl_ms is None else "; itl_ms of [slo] is not judged, pdflow bench does that"),
    )


def text_of(scenario: ResolvedScenario) -> str:
    """Return the text of the scenario's file, for a page that shows it; empty if the file is gone."""
    try:
        return Path(scenario.path).read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError):
        return ""


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with guarding(path):
        file = path.open("wb", buffering=0)
    with file:
        yield file


def _note(node: LiveNode, file: BinaryIO, offset: int) -> None:
    encode, path = msgspec.json.Encoder().encode, Path(file.name)

    def line(value: Any) -> None:
        try:
            file.write(encode(value) + b"\n")
        except OSError as cause:
            raise OutputError(path, cause) from cause

    line(NotesHeader(node.name, offset))
    node.event_log.write = line


def _observe(node: LiveNode, writer: EventsWriter, offset: int) -> None:
    before = node.observe

    def observe(address: Address, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
        writer.event(now + offset, address, event)
        writer.effects(now + offset, address, effects)
        if before is not None:
            before(address, event, effects, now)

    node.observe = observe


def read_notes(folder: Path) -> list[Page]:
    """Read the notes of all processes. A line that a killed process had not finished is left out."""
    pages = []
    header, line = msgspec.json.Decoder(NotesHeader).decode, msgspec.json.Decoder(Noted).decode
    for file in sorted(folder.glob(f"*.{NOTES_NAME}")):
        lines = file.read_bytes().split(b"\n")[:-1]
        if lines:
            head = header(lines[0])
            pages.append(Page(head.node, head.offset_ns, [line(each) for each in lines[1:]]))
    return pages
