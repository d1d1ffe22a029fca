"""Requests between the components of a cluster that share a secret: how one is signed, and how the signature is
checked.

    authorization: PDFLOW <time> <nonce> <mac>

The MAC is over the name of the request's receiver, its method, path and body, the headers that decide anything, the
second in which it was signed, and a nonce. So no request can be changed, sent to another component, or sent again: the
receiver remembers nonces for as long as it accepts their times, and accepts no time from before its own start, when it
remembered nothing. Hosts' clocks must agree within `WINDOW_S`.

Where a supervisor has made the secret for the processes of its own host (`local_secret.py`), nobody else can read what
they send each other, and a signature of each request would only cost the router time:

    authorization: PDFLOW-LOCAL <mac over the receiver's name and incarnation>

So a process that takes the port of an engine that has ended gets no secret, and nothing that the next incarnation
accepts. Requests whose sender does not know the receiver's incarnation are signed.

Answers are not signed, and nothing is encrypted. `authorization: Bearer SECRET` is accepted as well, for operators:
that sends the secret itself.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

from pdflow_runtime.clock import wall_s
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import Headers, HttpRequest, first
from pdflow_runtime.process.addresses import is_loopback
from pdflow_runtime.security.host_header import HostCheck
from pdflow_runtime.security.local_secret import operators_secret
from pdflow_runtime.security.secret import MAC_BYTES, VARIABLE, Secret

WINDOW_S: Final = 30
"""The most by which a request's time may differ from ours."""
SLACK_S: Final = 2
"""The most by which a request's time may precede our start. No component ends and is up again so soon."""
NONCE_BYTES: Final = 16
AUTHORIZATION: Final = b"authorization"
ORIGIN: Final = b"origin"
"""The header that browsers send along with whatever a page of another site requests."""
DECIDING: Final = (b"x-request-id",)
"""Headers that a component does not only pass on: a leg is known to the protocol by this name. `traceparent` and
`x-session-id`, which go along, decide nothing where a signature is asked for."""
_SCHEME: Final = b"PDFLOW"
_LOCAL: Final = b"PDFLOW-LOCAL "
_FOR: Final = b"pdflow request"
_TO: Final = b"pdflow local"

Clock = Callable[[], int]


class Signer:
    """Signs requests, if there is a secret. Args: `clock` returns seconds since 1970."""

    def __init__(self, secret: Secret | None, clock: Clock = wall_s) -> None:
        self._secret: Final = secret
        self._clock: Final = clock
        self._local: Final[dict[str, tuple[int, Headers]]] = {}
        """The incarnation of each receiver and the header for it, where the secret is local."""

    def sign(
        self, to: str, method: str, path: str, body: bytes, headers: Headers = (), incarnation: int | None = None
    ) -> Headers:
        """Return the headers that sign a request to the component of that name, for a request with these headers.
        `incarnation` is that of the component, if it is known."""
        if self._secret is None:
            return ()
        if self._secret.local and incarnation is not None:
            known = self._local.get(to)
            if known is None or known[0] != incarnation:
                token = local_token(self._secret, to.encode(), incarnation)
                known = self._local[to] = incarnation, ((AUTHORIZATION, token),)
            return known[1]
        signed_s, nonce = b"%d" % self._clock(), secrets.token_hex(NONCE_BYTES).encode()
        mac_input = (to.encode(), method.encode(), path.encode(), signed_s, nonce, body, *_deciding(headers))
        mac = self._secret.mac(_FOR, *mac_input)
        return ((AUTHORIZATION, b" ".join((_SCHEME, signed_s, nonce, mac.hex().encode()))),)


UNSIGNED: Final = Signer(None)


def operators_signer(host: str = "", port: int = 0) -> Signer:
    """Return the signer of commands that send requests to a cluster from outside: with the secret of the environment,
    if there is one, else, for a router on loopback, with the one that its supervisor has made."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        return Signer(Secret(os.fsencode(text).strip()))
    return Signer(operators_secret(host, port) if is_loopback(host) else None)


def local_token(secret: Secret, to: bytes, incarnation: int) -> bytes:
    """Return the value of the header that a local secret's holder sends to that incarnation of the component."""
    return _LOCAL + secret.mac(_TO, to, b"%d" % incarnation).hex().encode()


class Gate:
    """The authentication of requests to the component of that name. Without a secret all are accepted, but those of
    pages in a browser: on loopback none but these could come in unasked. Args: `hosts` checks the Host header of each
    request; `incarnation` is that of the component, if its senders know it."""

    def __init__(
        self,
        secret: Secret | None,
        me: str,
        clock: Clock = wall_s,
        hosts: HostCheck | None = None,
        incarnation: int | None = None,
    ) -> None:
        self._secret: Final = secret
        self._is_local: Final = secret is not None and secret.local
        self._token: Final = (
            local_token(secret, me.encode(), incarnation)
            if secret is not None and secret.local and incarnation is not None
            else None
        )
        self._hosts: Final = hosts or HostCheck()
        self._me: Final = me.encode()
        self._clock: Final = clock
        self._begun_s: Final = clock()
        self._nonces: set[bytes] = set()
        self._by_time: deque[tuple[int, bytes]] = deque()

    def check(self, request: HttpRequest) -> None:
        """Raise OpenAIError unless the request comes from a holder of the secret, and is meant for us, now, for the
        first time."""
        if self._secret is None:
            self._refuse_pages(request)
        else:
            problem = self._problem(self._secret, request)
            if problem:
                raise OpenAIError(401, problem, code="unauthorized")

    def check_reader(self, request: HttpRequest) -> None:
        """Raise OpenAIError for a request to read figures that are no secret on the host: a local secret is not
        asked for, as Prometheus does not have it."""
        if self._is_local:
            self._refuse_pages(request)
        else:
            self.check(request)

    def _refuse_pages(self, request: HttpRequest) -> None:
        self._hosts.check(request)
        if request.header(ORIGIN) is not None:
            raise OpenAIError(403, "requests from web pages (with an Origin header) are rejected", code="forbidden")

    def _problem(self, secret: Secret, request: HttpRequest) -> str:
        header = request.header(AUTHORIZATION) or b""
        if self._token is not None and hmac.compare_digest(header, self._token):
            return ""
        scheme, _, rest = header.partition(b" ")
        if scheme.lower() == b"bearer":
            return "" if secret.is_text(rest.strip()) else "wrong secret"
        tokens = rest.split(b" ")
        if scheme != _SCHEME or len(tokens) != 3:
            return (
                "authentication required: send the header `authorization: Bearer SECRET`, with the cluster's secret"
                + (" (the cluster's log names the file with this header, for curl -H @FILE)" if self._is_local else "")
            )
        signed, nonce, mac = tokens
        if not (signed.isdigit() and len(signed) <= 12 and len(nonce) == 2 * NONCE_BYTES and len(mac) == 2 * MAC_BYTES):
            return "the signature is malformed"
        asked = (request.method.encode(), request.path.encode())
        mac_input = (self._me, *asked, signed, nonce, request.body, *_deciding(request.headers))
        if not secret.is_mac(_bytes_of(mac), _FOR, *mac_input):
            return "wrong signature: the sender has another secret, or the request was meant for another component"
        return self._late(int(signed)) or self._again(nonce)

    def _late(self, signed_s: int) -> str:
        off_s = signed_s - self._clock()
        if abs(off_s) > WINDOW_S:
            side = "ahead" if off_s > 0 else "behind"
            return f"the sender's clock is {abs(off_s)} s {side}; at most {WINDOW_S} s are allowed"
        return "the request was signed before this component started" if signed_s < self._begun_s - SLACK_S else ""

    def _again(self, nonce: bytes) -> str:
        now_s = self._clock()
        while self._by_time and self._by_time[0][0] < now_s - 2 * WINDOW_S:
            self._nonces.discard(self._by_time.popleft()[1])
        if nonce in self._nonces:
            return "the request is a repetition: its nonce was used before"
        self._nonces.add(nonce)
        self._by_time.append((now_s, nonce))
        return ""


def _deciding(headers: Headers) -> tuple[bytes, ...]:
    """Return the first header of each name in DECIDING, as its receiver reads it."""
    return tuple(first(headers, name) or b"" for name in DECIDING)


def _bytes_of(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
