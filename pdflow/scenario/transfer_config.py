"""The values of [transfer] and [network] from vLLM's --kv-transfer-config or mooncake.json.

What such a file may say, and what its originals take where it says nothing, is decided in `pdflow/methods/params`; a
file is here what its original would make of it. `without_effect.py` decides what is reported of the keys that mean
nothing to a scenario. Memory of one side is taken from that side's file only: vLLM's examples give a P that puts a
buffer of 10 bytes, which it never uses.

Of a protocol only tcp says something about the network, and that is our slowest preset of it: no file says a speed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import attrs

from pdflow.methods.params.config import EXTRA, KvTransferConfig, read_kv_transfer_config
from pdflow.methods.params.connectors import CpuExtra, MooncakeV0Extra, MooncakeV1Extra, NixlExtra, P2pNcclExtra
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.mooncake_json import File, PipeFile, StoreFile, devices_of, read_mooncake_json
from pdflow.methods.params.settings import loaded
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.reading.locate_json import json_key_lines
from pdflow.scenario.without_effect import keys_without_effect, notes_on

TCP_PRESET: Final = "tcp-25g"

_LOCATION: Final = "the file"
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_CONFIG_KEYS: Final = ("kv_connector", "kv_role", EXTRA)
_FILE_KEYS: Final = ("prefill_url", "decode_url", "master_server_address", "local_hostname")


class TransferConfigError(ValueError):
    """The file is wrong; the message has its first problem, with the line."""


class ConfigValue(NamedTuple):
    """A key of the scenario, its value, and the key of the file that it is from."""

    key: KeyPath
    value: Any
    source: KeyPath


@attrs.frozen
class TransferConfig:
    """The scenario values of a file, the lines of its keys, its keys that change nothing here and those that nothing
    reads, and what of the file a scenario does not honour."""

    values: tuple[ConfigValue, ...]
    lines: Mapping[KeyPath, int]
    without_effect: tuple[KeyPath, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[tuple[KeyPath, str], ...] = ()

    def line(self, value: ConfigValue) -> int | None:
        """Return the line of a value, None if the file leaves its key out."""
        return self.lines.get(value.source)

    def not_overridden_by(self, document: Mapping[str, Any]) -> TransferConfig:
        """Return the values whose keys the scenario's document does not have itself."""
        tables = {table: document.get(table, {}) for table in ("transfer", "network")}
        left = [
            value
            for value in self.values
            if isinstance(tables[str(value.key[0])], Mapping) and value.key[1] not in tables[str(value.key[0])]
        ]
        return attrs.evolve(self, values=tuple(left))

    def under(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with all values put in. None of them may be of a key that the document has itself."""
        changed = dict(document)
        for value in self.values:
            table, key = value.key
            changed[str(table)] = {**changed.get(str(table), {}), key: value.value}
        return changed

    def summary_lines(self) -> Iterator[str]:
        """Yield every value in words, as "transfer.method = kv-store (line 3)"."""
        for value in self.values:
            line = self.line(value)
            where = f"line {line}" if line is not None else f"no {value.source[-1]}"
            yield f"{'.'.join(map(str, value.key))} = {value.value} ({where})"
        if self.without_effect:
            yield f"no effect: {', '.join('.'.join(map(str, path)) for path in self.without_effect)}"
        if self.unread:
            yield f"not read: {', '.join(self.unread)}"


def read_transfer_config(text: str, document: Mapping[str, Any]) -> TransferConfig:
    """Read a file's text, for the engines of this scenario document. Raises TransferConfigError."""
    lines: Mapping[KeyPath, int] = {}
    try:
        found = loaded(text, _LOCATION)
        lines = json_key_lines(text)
        if any(key in found for key in _CONFIG_KEYS):
            config = read_kv_transfer_config(found)
            return _transfer_config(config, tuple(_of_config(config)), found, lines)
        if not any(key in found for key in _FILE_KEYS):
            expected = f"kv_connector, as in --kv-transfer-config, or mooncake.json's {', '.join(_FILE_KEYS[:3])}"
            raise ParamsError(_LOCATION, "is not a known format", expected)
        file = read_mooncake_json(found)
        ranks = _decode_ranks(document)
        if isinstance(file, PipeFile):
            file.check_ranks(ranks)
        return _transfer_config(file, tuple(_of_file(file, ranks)), found, lines)
    except ParamsError as error:
        raise TransferConfigError(f"line {_line_of(error, text, lines)}: {error}") from None


def _transfer_config(
    config: KvTransferConfig | File,
    values: tuple[ConfigValue, ...],
    found: Mapping[Any, Any],
    lines: Mapping[KeyPath, int],
) -> TransferConfig:
    used = frozenset(value.source for value in values)
    idle = keys_without_effect(config, found, used)
    return TransferConfig(values, lines, idle, config.unread, tuple(notes_on(config, idle)))


def _of_config(config: KvTransferConfig) -> Iterator[ConfigValue]:
    extra = config.kv_connector_extra_config
    yield ConfigValue(("transfer", "method"), config.method, ("kv_connector",))
    if isinstance(extra, P2pNcclExtra):
        yield from _of_p2p_nccl(config, extra)
    elif isinstance(extra, CpuExtra):
        yield ConfigValue(("transfer", "host_buffer_bytes"), extra.ring_bytes, (EXTRA, "size"))
    elif isinstance(extra, MooncakeV0Extra) and config.kv_role == "kv_producer":
        yield ConfigValue(("transfer", "kv_buffer_size"), config.kv_buffer_size, ("kv_buffer_size",))
    elif isinstance(extra, MooncakeV1Extra):
        if config.kv_role != "kv_consumer":
            yield ConfigValue(("transfer", "num_workers"), extra.num_workers, (EXTRA, "num_workers"))
        yield from _of_wire(extra.mooncake_protocol, devices_of(extra.device_name), EXTRA, "mooncake_protocol")
    elif isinstance(extra, NixlExtra):
        yield ConfigValue(("transfer", "kv_lease_duration_s"), extra.kv_lease_duration, (EXTRA, "kv_lease_duration"))
        key = "decoder_kv_blocks_ttl" if extra.push_registration_timeout is None else "push_registration_timeout"
        yield ConfigValue(("transfer", "push_registration_timeout_s"), extra.watchdog_s, (EXTRA, key))
    if isinstance(extra, NixlExtra | MooncakeV1Extra) and config.kv_buffer_device is not None:
        yield ConfigValue(("transfer", "kv_buffer_device"), config.kv_buffer_device, ("kv_buffer_device",))


def _of_p2p_nccl(config: KvTransferConfig, extra: P2pNcclExtra) -> Iterator[ConfigValue]:
    """Yield the NCCL channels of both sides, and the buffer of the side that has it: D's, or with GET P's."""
    gets = extra.send_type == "GET"
    if config.kv_role == ("kv_producer" if gets else "kv_consumer"):
        yield ConfigValue(("transfer", "kv_buffer_size"), config.kv_buffer_size, ("kv_buffer_size",))
        if not gets:
            whole = math.ceil(extra.mem_pool_size_gb)
            yield ConfigValue(("transfer", "mem_pool_size_gb"), whole, (EXTRA, "mem_pool_size_gb"))
    yield ConfigValue(("transfer", "nccl_num_channels"), extra.nccl_num_channels, (EXTRA, "nccl_num_channels"))


def _of_file(file: File, ranks: int) -> Iterator[ConfigValue]:
    """Yield the values of a mooncake.json. `ranks` are those of an engine like the store's nodes: each of them gives
    memory to 0.32.0's store."""
    if isinstance(file, PipeFile):
        yield ConfigValue(("transfer", "method"), "mooncake-v0", ("prefill_url",))
    else:
        yield ConfigValue(("transfer", "method"), "kv-store", ("master_server_address",))
        if file.global_segment_size:
            given = file.global_segment_size * (ranks if isinstance(file, StoreFile) else 1)
            yield ConfigValue(("transfer", "store_bytes"), given, ("global_segment_size",))
    yield from _of_wire(file.protocol, file.devices)


def _of_wire(protocol: str, devices: tuple[str, ...], *inside: str) -> Iterator[ConfigValue]:
    """Yield the values of the wire protocol. `inside` is the path of its key, if not the file's own `protocol`."""
    *location, key = inside or ("protocol",)
    if protocol == "tcp":
        yield ConfigValue(("network", "preset"), TCP_PRESET, (*location, key))
    elif devices:
        yield ConfigValue(("network", "nics_per_rank"), len(devices), (*location, "device_name"))


def _decode_ranks(document: Mapping[str, Any]) -> int:
    """Return the TP size of the first decode pool; 1 where that is not a sound one."""
    pools = document.get("pool")
    for pool in pools if isinstance(pools, list) else ():
        if isinstance(pool, Mapping) and pool.get("role") == "decode":
            tp = pool.get("tp", 1)
            return tp if type(tp) is int and tp > 0 else 1
    return 1


def _line_of(error: ParamsError, text: str, lines: Mapping[KeyPath, int]) -> int:
    """Return the line of the wrong key, of the object around a missing one, or of the first byte that is not JSON."""
    if error.field == _LOCATION and not lines:
        at = _BYTE.search(error.wrong)
        before = text.encode()[: int(at[1])] if at else text.rstrip().encode()
        return before.count(b"\n") + 1
    path: KeyPath = tuple(error.field.split("."))
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)
