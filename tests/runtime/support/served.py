"""A real cluster: `pdflow serve` as users start it, and a client that asks it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON, Headers
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.security.signed import operators_signer
from tests.runtime.support.tied import tied

ROOT = Path(__file__).resolve().parents[3]


class Completion(NamedTuple):
    status: int
    tokens: list[int]
    text: str
    body: bytes


class Served:
    """Args: of `pdflow serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()  # type: ignore[union-attr]
        self.port = int(port)
        self.log = log

    async def ask(self, **fields: Any) -> Completion:
        """One completion, as a stream or whole, with its token ids."""
        body = msgspec.json.encode({"return_token_ids": True, "temperature": 0, **fields})
        status, answer = await self.exchange("POST", "/v1/completions", body)
        if status != 200:
            return Completion(status, [], "", answer)
        if not fields.get("stream"):
            choice = msgspec.json.decode(answer)["choices"][0]
            return Completion(200, choice["token_ids"], choice["text"], answer)
        lines = [line[6:] for line in answer.split(b"\n\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]", answer
        choices = [event["choices"][0] for event in map(msgspec.json.decode, lines[:-1]) if event["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        return Completion(200, tokens, "".join(choice["text"] for choice in choices), answer)

    async def exchange(
        self, method: str, path: str, body: bytes = b"", headers: Headers | None = None
    ) -> tuple[int, bytes]:
        """One request, on a connection of its own; to the operators' API with the cluster's own secret, if it has
        one, unless there are headers."""
        client = HttpClient()
        operates = headers is None and path.startswith("/admin/")
        signed = operators_signer(self.host, self.port).sign(ROUTER, method, path, body) if operates else headers or ()
        try:
            async with client.request(method, self.host, self.port, path, (JSON, *signed), body) as response:
                return response.status, await response.read()
        finally:
            client.close()

    def pid_of(self, engine: str) -> int:
        """Of its process, by its command line."""
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) if command else 0
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and engine.encode() in command:
                return int(folder.name)
        raise LookupError(engine)


def running(first: str, folder: Path) -> dict[str, str]:
    """The environment in which every Python begins with this."""
    if not first:
        return {}
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(first)
    return {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, ROOT / "sim", ROOT / "runtime")))}


@cache
def caches() -> tempfile.TemporaryDirectory[str]:
    """One for all clusters of this process, for as long as it lives: a model that has been made, and hashed, once costs
    the next cluster's parent neither that nor an import of torch."""
    return tempfile.TemporaryDirectory(prefix="pdflow-served-")


@contextmanager
def served(
    folder: Path,
    scenario: Path,
    *overrides: str,
    events: Path | None = None,
    out: Path | None = None,
    first: str = "",
) -> Iterator[Served]:
    """It ends with us. `events`: where everything is written; `out`: where rows and results are, and nothing more;
    `first`: Python that each of its processes runs before anything else."""
    arguments = [arg for override in overrides for arg in ("--set", override)]
    arguments += [] if events is None else ["--out", str(events), "--events", "--timeline"]
    arguments += [] if out is None else ["--out", str(out)]
    os.environ.setdefault("XDG_RUNTIME_DIR", caches().name)  # where operators' commands look, too
    log = folder / "serve.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            tied(sys.executable, "-m", "pdflow", "serve", str(scenario), "--port", "0", *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": caches().name, **running(first, folder)},
        )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        yield Served(process, url, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
