"""The options of the connector: `kv_connector_extra_config` of vLLM's --kv-transfer-config."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import S


class UnsupportedError(PdflowError, ValueError):
    """vLLM is configured in a way that the connector does not serve. The text is one sentence: what, and what to do."""

    exit_code = EXIT_BAD_INPUT


def _one_of(*values: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in values:
            raise UnsupportedError(f"{_path(attribute.name)} is {value!r}; it must be one of {', '.join(values)}")

    return check


def _is(kind: type | tuple[type, ...], expected: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UnsupportedError(f"{_path(attribute.name)} is {value!r}; it must be {expected}")

    return check


def _seconds(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise UnsupportedError(
            f"{_path(attribute.name)} is {value!r}; it must be a number of seconds, more than 0 and at most 86400"
        )


def _port(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not int or not 0 <= value <= 65_535:
        raise UnsupportedError(f"{_path(attribute.name)} is {value!r}; it must be a port, or 0 for any free port")


def _path(name: str) -> str:
    return f"kv_connector_extra_config.{name}"


_TIMERS: Final = Timers()


@attrs.frozen(kw_only=True)
class Options:
    """What `kv_connector_extra_config` may say."""

    transfer_mode: Literal["push", "pull"] = attrs.field(default="push", validator=_one_of("push", "pull"))
    """push: P writes into D's blocks once D has registered. pull: D reads P's blocks."""
    transport: Literal["nixl", "tcp", "shm"] = attrs.field(default="nixl", validator=_one_of("nixl", "tcp", "shm"))
    """How bytes move. shm is refused when memory is registered, with the reason."""
    host: str = attrs.field(default="127.0.0.1", validator=_is(str, "an address of this host"))
    """The address at which other instances reach the ranks of this one. Beyond loopback PDFLOW_SECRET must be set."""
    tls_cert: str | None = attrs.field(default=None, validator=attrs.validators.optional(_is(str, "a file")))
    """The certificate that ranks present to each other, of the authority in `tls_ca`. With all three, messages between
    ranks and KV over tcp use mutual TLS 1.3; KV over nixl does not."""
    tls_key: str | None = attrs.field(default=None, validator=attrs.validators.optional(_is(str, "a file")))
    tls_ca: str | None = attrs.field(default=None, validator=attrs.validators.optional(_is(str, "a file")))
    port: int = attrs.field(default=0, validator=_port)
    """The port of the first rank; each further rank, and each rank of the next data-parallel engine, has the next one.
    0: any free port, as peers learn ports from the answers."""
    progressive: bool = attrs.field(default=False, validator=_is(bool, "true or false"))
    """push: P sends the layers of a prompt while the prompt's last chunk is computed."""
    allow_static_engine_id: bool = attrs.field(default=False, validator=_is(bool, "true or false"))
    weights_version: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_is(str, "a text that is the same for the same weights"))
    )
    """Names the weights where they cannot be hashed, as in files other than *.safetensors."""
    events: str | None = attrs.field(default=None, validator=attrs.validators.optional(_is(str, "a folder")))
    """A folder to which each process writes every event into its endpoints, for `pdflow check --trace`."""
    lease_s: float = attrs.field(default=_TIMERS.lease_ns / S, validator=_seconds)
    """How long P keeps a finished prompt without a sign that a D will come for it."""
    dead_s: float = attrs.field(default=_TIMERS.dead_ns / S, validator=_seconds)
    """The silence of P after which D resolves the requests that wait for it."""
    deadline_s: float = attrs.field(default=_TIMERS.deadline_ns / S, validator=_seconds)
    """The time after which D resolves a request that waits, whatever P says."""

    @property
    def method(self) -> str:
        """The name of the transfer method, as in scenarios."""
        return f"nixl-{self.transfer_mode}"

    def timers(self) -> Timers:
        return Timers(
            lease_ns=int(self.lease_s * S), dead_ns=int(self.dead_s * S), deadline_ns=int(self.deadline_s * S)
        )


def read_options(given: Mapping[str, Any]) -> Options:
    """Return the options that vLLM was given. UnsupportedError for an unknown key, a value that is none, and options
    that exclude each other."""
    known = [field.name for field in attrs.fields(Options)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
            raise UnsupportedError(f"{_path(key)} is unknown: {hint}")
    options = Options(**given)
    if options.progressive and options.transfer_mode == "pull":
        raise UnsupportedError(f"{_path('progressive')} works with transfer_mode push only: remove it, or use push")
    return options
