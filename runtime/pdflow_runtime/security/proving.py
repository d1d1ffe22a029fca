"""How two ranks prove to each other that they know the cluster's secret, before either believes or says a HELLO.

    opener                                acceptor
    MAGIC | nonce                 ->
                                  <-      nonce | proof(both nonces)
    proof(both nonces, HELLO) | HELLO ->
                                  <-      proof(both nonces, the opener's HELLO, HELLO) | HELLO

HELLOs hold addresses, incarnations and the token of a rank's memory, so none is said to anybody who has not proved
itself: the acceptor does so first. Nonces are fresh on both sides, so no proof is of use a second time; each says which
side it is of. Frames that follow are not proved one by one: whoever can write into a stream of others', or read it, is
kept out by TLS.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from pdflow_runtime.security.secret import MAC_BYTES, Secret

MAGIC: Final = b"PDFLOW-1"
"""No frame begins so: it would be a length of more than a gigabyte."""
NONCE_BYTES: Final = 32

Take = Callable[[int], Awaitable[bytes]]
Send = Callable[[bytes], Awaitable[None]]
WRONG: Final = "it does not know the secret"


class Proof:
    """What one stream's two sides prove. `ours` and `theirs` are of HELLOs, the opener's first."""

    def __init__(self, secret: Secret, opener: bool, nonces: tuple[bytes, bytes]) -> None:
        self._secret: Final = secret
        self._opener: Final = opener
        self._nonces: Final = nonces
        self._hello = b""
        """The opener's, once it is known."""

    def ours(self, hello: bytes) -> bytes:
        """What goes out in front of our HELLO."""
        proof = self._secret.mac(*self._mac_input(self._opener, hello))
        self._hello = self._hello or hello
        return proof

    def check(self, claimed: bytes, hello: bytes) -> None:
        """ValueError if their HELLO is not from somebody who knows the secret."""
        if not self._secret.is_mac(claimed, *self._mac_input(not self._opener, hello)):
            raise ValueError(WRONG)
        self._hello = self._hello or hello

    def _mac_input(self, opener: bool, hello: bytes) -> tuple[bytes, ...]:
        who = b"pdflow opener" if opener else b"pdflow acceptor"
        return (who, *self._nonces, hello) if opener else (who, *self._nonces, self._hello, hello)


async def prove_as_opener(secret: Secret, send: Send, take: Take) -> Proof:
    """ValueError if whoever answers does not know the secret."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await send(MAGIC + nonce)
    theirs = await take(NONCE_BYTES)
    if not secret.is_mac(await take(MAC_BYTES), b"pdflow challenged", nonce, theirs):
        raise ValueError(WRONG)
    return Proof(secret, True, (nonce, theirs))


async def prove_as_acceptor(secret: Secret, send: Send, take: Take) -> Proof:
    """ValueError for a stream that does not begin so."""
    if await take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not prove that it knows the secret")
    theirs = await take(NONCE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    await send(nonce + secret.mac(b"pdflow challenged", theirs, nonce))
    return Proof(secret, False, (theirs, nonce))
