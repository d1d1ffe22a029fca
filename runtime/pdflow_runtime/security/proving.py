"""Mutual proof of two ranks that they know the cluster's secret, before either accepts or sends a HELLO.

    opener                                acceptor
    MAGIC | nonce                 ->
                                  <-      nonce | proof(both nonces)
    proof(both nonces, HELLO) | HELLO ->
                                  <-      proof(both nonces, the opener's HELLO, HELLO) | HELLO

HELLOs hold addresses, incarnations and the token of a rank's memory, so none is sent to a peer that has not proved
itself: the acceptor does so first. Nonces are fresh on both sides, so no proof is of use a second time; each says which
side it is of. Frames that follow are not proved one by one: TLS protects a stream from being read or written by others.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from pdflow_runtime.security.secret import MAC_BYTES, Secret

MAGIC: Final = b"PDFLOW-1"
"""The first bytes of a stream with proofs. No frame begins so: it would be a length of more than a gigabyte."""
NONCE_BYTES: Final = 32

Take = Callable[[int], Awaitable[bytes]]
Send = Callable[[bytes], Awaitable[None]]
WRONG: Final = "the peer has another cluster secret"


class Proof:
    """The proofs of one stream's HELLOs at one side. `ours` and `check` are called with HELLOs, the opener's first."""

    def __init__(self, secret: Secret, opener: bool, nonces: tuple[bytes, bytes]) -> None:
        self._secret: Final = secret
        self._opener: Final = opener
        self._nonces: Final = nonces
        self._hello = b""
        """The opener's HELLO, once it is known."""

    def ours(self, hello: bytes) -> bytes:
        """Return the proof that is sent in front of our HELLO."""
        proof = self._secret.mac(*self._mac_input(self._opener, hello))
        self._hello = self._hello or hello
        return proof

    def check(self, claimed: bytes, hello: bytes) -> None:
        """Check the proof of the peer's HELLO. ValueError if it does not come from a peer that knows the secret."""
        if not self._secret.is_mac(claimed, *self._mac_input(not self._opener, hello)):
            raise ValueError(WRONG)
        self._hello = self._hello or hello

    def _mac_input(self, opener: bool, hello: bytes) -> tuple[bytes, ...]:
        who = b"pdflow opener" if opener else b"pdflow acceptor"
        return (who, *self._nonces, hello) if opener else (who, *self._nonces, self._hello, hello)


async def prove_as_opener(secret: Secret, send: Send, take: Take) -> Proof:
    """Exchange nonces as the stream's opener. ValueError if the acceptor does not know the secret."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await send(MAGIC + nonce)
    theirs = await take(NONCE_BYTES)
    if not secret.is_mac(await take(MAC_BYTES), b"pdflow challenged", nonce, theirs):
        raise ValueError(WRONG)
    return Proof(secret, True, (nonce, theirs))


async def prove_as_acceptor(secret: Secret, send: Send, take: Take) -> Proof:
    """Exchange nonces as the stream's acceptor. ValueError for a stream that does not begin with MAGIC."""
    if await take(len(MAGIC)) != MAGIC:
        raise ValueError("the peer did not authenticate: it has no cluster secret, or is not a pdflow component")
    theirs = await take(NONCE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    await send(nonce + secret.mac(b"pdflow challenged", theirs, nonce))
    return Proof(secret, False, (theirs, nonce))
