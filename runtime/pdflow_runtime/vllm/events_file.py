"""The events file of one process of a vLLM instance: every event into its endpoints, and their effects.

`pdflow check --trace FOLDER` merges the files of all processes and feeds the events to fresh endpoints, which must
answer alike. The header has what these are made from. Lines have two times: the endpoint's own, and this host's wall
clock.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from pdflow.protocol.values import Address, Instant
from pdflow.results.files.events import EventsHeader, EventsWriter
from pdflow.results.files.write import EVENTS_NAME, make_folder
from pdflow.wiring.endpoints import EngineRecord
from pdflow_runtime.clock import wall_ns
from pdflow_runtime.vllm.instance import Instance

_UNSAFE: Final = re.compile(r"[^0-9A-Za-z._-]")


def events_file(instance: Instance, incarnation: int, address: Address) -> EventsFile | None:
    """Return the events file of the endpoint at this address, if the instance writes any. OutputError."""
    return None if instance.options.events is None else EventsFile(instance, incarnation, address)


class EventsFile:
    """The events file of the endpoint at this address, in the folder of the option `events`."""

    def __init__(self, instance: Instance, incarnation: int, address: Address) -> None:
        assert instance.options.events is not None
        info = instance.info
        record = EngineRecord(
            role=instance.role,
            info=info,
            incarnation=incarnation,
            num_blocks=instance.num_blocks,
            protocol=instance.protocol,
        )
        header = EventsHeader(
            world="vllm",
            scenario="",
            seed=0,
            incarnations={info.engine: incarnation},
            engines={info.engine: msgspec.to_builtins(record)},
        )
        folder = Path(instance.options.events)
        make_folder(folder)
        path = folder / f"{_UNSAFE.sub('_', address)}-{incarnation:016x}.{EVENTS_NAME}"
        self._stack: Final = ExitStack()
        file = self._stack.enter_context(path.open("wb", buffering=0))
        self._writer: Final = EventsWriter(file, header, path)

    def observe(self, address: Address, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
        """Write one event and its effects."""
        at = wall_ns()
        self._writer.event(now, address, event, at)
        self._writer.effects(now, address, effects, at)

    def close(self) -> None:
        self._stack.close()
