"""What is Mooncake's own: it is optional, and kept in a network of its own, where it passes what the others pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdflow_runtime.transports.base import MissingBackend, TransportError
from pdflow_runtime.transports.mooncake import INSTALL, MooncakeTransport
from pdflow_runtime.transports.named import caution_of, transport_named
from tests.runtime.transports.alone import command, is_permitted


def test_a_missing_library_is_one_sentence_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MissingBackend) as caught:
        transport_named("mooncake")
    assert str(caught.value).endswith(INSTALL)
    assert "\n" not in str(caught.value)


def test_serving_with_it_warns_that_it_listens_everywhere() -> None:
    assert "every address" in str(caution_of("mooncake"))
    assert caution_of("shm") is None


@pytest.mark.parametrize("address", [b"", b"127.0.0.1", b"host:", b"a b:1", b"h:1\n", b"\xff:1", b"h" * 300 + b":1"])
def test_a_peer_must_send_host_and_port_of_its_engine(address: bytes) -> None:
    with pytest.raises(TransportError, match="is not HOST:PORT"):
        MooncakeTransport("p.r0", lambda event: None)._add(address)


@pytest.mark.slow
@pytest.mark.mooncake
def test_it_passes_the_conformance_suite_in_a_network_of_its_own() -> None:
    pytest.importorskip("mooncake.engine", reason=f"no Mooncake: {INSTALL}")
    if not is_permitted():
        pytest.skip("no network of its own can be had here (unshare -n)")
    folder = "tests/runtime/transports"
    suite = [f"{folder}/test_{name}.py" for name in ("conformance", "death", "joint")]
    ran = subprocess.run(
        command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "mooncake", *suite),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
