"""Opening a stream to a peer's agent: connect, greet, and wait to be welcomed."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.host import GREETING_S
from pdflow_runtime.transports.streams.messages import (
    MAX_HELLO_BYTES,
    AgentHello,
    ConnectionRefused,
    Description,
    Welcome,
    frame,
)
from pdflow_runtime.transports.streams.stream import OutgoingMessage, SocketStream, StreamBrokenError


class AgentGoneError(TransportError):
    """Raised when the agent that a description is of is surely gone: nobody listens there, or another agent does."""


async def open_stream(
    dial: Callable[[Description], Awaitable[socket.socket]],
    transport: str,
    peer: Address,
    description: Description,
    hello: AgentHello,
) -> SocketStream:
    """Open a stream to the agent of `description`, on which it has answered `hello`.

    Args: `dial` connects a socket; `transport` names it, for people. Raises AgentGoneError, or another TransportError.
    """
    stream: SocketStream | None = None
    problem: type[TransportError] = TransportError
    why = f"no answer within {GREETING_S:g} s"
    try:
        with trio.move_on_after(GREETING_S):
            stream = SocketStream(await dial(description))
            await stream.secure()
            stream.post(OutgoingMessage(frame(hello)))
            await stream.drain()  # With many segments it is more than a Unix socket takes at once.
            answer = await stream.message(MAX_HELLO_BYTES)
            if isinstance(answer, Welcome):
                welcomed, stream = stream, None
                return welcomed
            why = "unexpected answer to the greeting"
            if isinstance(answer, ConnectionRefused) and answer.incarnation != description.incarnation:
                problem, why = AgentGoneError, "another agent has this address now"
    except ConnectionRefusedError:
        problem, why = AgentGoneError, "connection refused"
    except (OSError, StreamBrokenError, TransportError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    finally:
        if stream is not None:
            stream.close()
    where = f"{description.host}:{description.port}" if description.port else description.host
    raise problem(f"cannot connect to {peer} over {transport} at {where}: {why}")
