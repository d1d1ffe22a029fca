"""Faults of what lies between: garbage on a rank's port, a WRITE that fails, missing telemetry (rows 7 and 8)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any, Final

import attrs
import trio

from benchmarks.live_cuts import disconnect, wires
from benchmarks.vllm.cases import case
from benchmarks.vllm.client import Reply, new_request_id
from benchmarks.vllm.instances import HOST
from benchmarks.vllm.model import prompt
from benchmarks.vllm.request_faults import AT_ONCE_S, line
from benchmarks.vllm.scene import Finding, Scene, Setup, cell

GARBAGE: Final[tuple[bytes, ...]] = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\x00" * 4096,
    bytes(range(256)) * 4096,
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48 + b"\x04\x7fgarbage",
)
"""Nothing; HTTP; a length that is too large; zeros; a megabyte; ZMQ's greeting with a broken frame behind it."""


def rank_ports(scene: Scene, params: dict[str, Any]) -> list[int]:
    """Return the ports that P says it listens on for D, and stock's side channel of D."""
    ranks = (params.get("pdflow") or {}).get("ranks") or ()
    ports = [params["remote_port"], *(port for _, port in ranks)]
    return list(dict.fromkeys(ports + ([scene.d.side_port] if scene.stock else [])))


def _throw(port: int) -> list[socket.socket]:
    """Send each piece of garbage to the port. Return 20 further connections, which stay open and say nothing."""
    for data in GARBAGE:
        with suppress(OSError), socket.create_connection((HOST, port), 2.0) as sock:
            sock.settimeout(1.0)
            sock.sendall(data)
            while sock.recv(4096):
                pass
    silent = []
    for _ in range(20):
        with suppress(OSError):
            silent.append(socket.create_connection((HOST, port), 2.0))
    return silent


def _throw_zmq(port: int) -> None:
    """Send well-formed ZMQ requests whose content is garbage, as stock's side channel may get them."""
    import zmq

    with zmq.Context() as context:
        for data in (b"garbage", b"\xc1", b"\x93\xa3get\x01\x02", os.urandom(1000)):
            with context.socket(zmq.REQ) as sock:
                sock.setsockopt(zmq.LINGER, 0)
                sock.setsockopt(zmq.RCVTIMEO, 1000)
                sock.connect(f"tcp://{HOST}:{port}")
                with suppress(zmq.ZMQError):
                    sock.send(data)
                    sock.recv()


@case("7", "garbage on the rank port", "that peer closed; service goes on, for new peers too")
async def garbage(scene: Scene) -> Finding:
    """Bytes that are no frames, and frames without sense, are sent to the ports on which ranks listen; 20 connections
    stay open and say nothing. Then a request is sent, and one through a D that has started since."""
    request_id, tokens = new_request_id(), prompt(200, "garbage")
    params = await scene.prefill(tokens, request_id)
    await scene.decode(tokens, params, request_id)
    silent: list[socket.socket] = []
    for port in rank_ports(scene, params):
        silent += await trio.to_thread.run_sync(_throw, port)
        if scene.stock:
            await trio.to_thread.run_sync(_throw_zmq, port)
    known = await scene.sane("garbage")
    await scene.restart(scene.d)
    new = await scene.sane("garbage/new D")
    loaded = await scene.loaded_tokens() > 0
    alive = await scene.alive()
    for sock in silent:
        sock.close()
    observed = f"next request right: {cell(known)}; first of a new D right: {cell(new)}, with KV from P: {cell(loaded)}"
    observed += f"; alive {cell(alive)}"
    facts = {"known": known, "new": new, "loaded": loaded, "alive": alive}
    return Finding(known and new and loaded and all(alive.values()), observed, facts)


async def _write_fails(scene: Scene) -> tuple[Reply, str, Finding]:
    """Have NIXL report ERR for one transfer, which it has not begun. Over tcp: all connections between P and D are cut
    while the decode leg of a long prompt waits. Return the answer, how the request ended, and a finding of all but
    these."""
    await scene.sane("write-fails")
    tokens, request_id = prompt(1900, "write-fails"), new_request_id()
    params = await scene.prefill(tokens, request_id)
    if "+tcp" in scene.connector:
        reply = await _with_cut(scene, tokens, params, request_id)
        failed = True
    else:
        order = scene.order("fail-transfer")
        reply = await scene.decode(tokens, params, request_id)
        failed = not order.exists()
    verdict = await scene.verdict_of(reply, tokens)
    held = await scene.held()
    facts = {"verdict": verdict, "seconds": reply.seconds, "held": held, "failed": failed}
    observed = line(verdict, reply, held) + ("" if failed else "; no transfer failed")
    return reply, verdict, Finding(failed and not any(held.values()), observed, facts)


@case("8", "one WRITE fails", "right tokens; both sides free", Setup(faulty_nixl=True))
async def write_fails(scene: Scene) -> Finding:
    """D computes the prompt: how long that takes is the machine's matter, and the next row has the wait for P."""
    _, verdict, finding = await _write_fails(scene)
    return attrs.evolve(finding, met=finding.met and verdict == "right tokens")


@case("8-fail", "the same, policy fail", "an error within 1 s; both sides free", Setup(faulty_nixl=True, policy="fail"))
async def failed_write(scene: Scene) -> Finding:
    """The request fails as soon as D knows that no KV will come."""
    reply, verdict, finding = await _write_fails(scene)
    return attrs.evolve(finding, met=finding.met and verdict == "error" and reply.seconds <= AT_ONCE_S)


async def _with_cut(scene: Scene, tokens: list[int], params: dict[str, Any], request_id: str) -> Any:
    reply = None
    async with trio.open_nursery() as nursery:

        async def decode() -> None:
            nonlocal reply
            reply = await scene.decode(tokens, params, request_id)

        scene.p.suspend()
        nursery.start_soon(decode)
        await trio.sleep(0.5)
        scene.p.resume()
        for wire in wires([*scene.p.worker_pids, *scene.d.worker_pids]):
            disconnect(wire)
    return reply


async def _without_telemetry(scene: Scene) -> Finding:
    await scene.sane("telemetry")
    order = scene.order("no-telemetry")
    tokens = prompt(300, f"telemetry/{scene.push}")
    legs = await scene.send(tokens)
    verdict = await scene.verdict_of(legs, tokens)
    held = await scene.held()
    order.unlink()
    assert legs.d is not None
    loaded = legs.d.seconds <= AT_ONCE_S
    met = verdict == "right tokens" and loaded and not any(held.values())
    return Finding(met, line(verdict, legs.d, held), {"verdict": verdict, "seconds": legs.seconds, "held": held})


@case(
    "telemetry",
    "nixl#2266, vllm#58038: optional NIXL telemetry is missing, push",
    "fails nothing",
    Setup(faulty_nixl=True, policy="fail"),
)
async def telemetry_push(scene: Scene) -> Finding:
    """NIXL has no telemetry of a transfer that has ended well. Policy fail, so that a failure shows."""
    return await _without_telemetry(scene)


@case(
    "telemetry-pull",
    "the same, pull",
    "fails nothing",
    Setup(faulty_nixl=True, policy="fail"),
    mode="pull",
)
async def telemetry_pull(scene: Scene) -> Finding:
    """NIXL has no telemetry of a transfer that has ended well. Policy fail, so that a failure shows."""
    return await _without_telemetry(scene)
