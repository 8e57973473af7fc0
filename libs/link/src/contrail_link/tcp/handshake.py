"""The handshake: both ends prove that they know the cluster secret, before any frame is read.

::

    server -> client   magic | server's nonce
    client -> server   magic | client's nonce | HMAC-SHA256(key, "client" | both nonces)
    server -> client   HMAC-SHA256(key, "server" | both nonces)

Each nonce is used once, so an overheard proof is worthless. The two labels differ, so a proof
cannot be reflected to its sender. The frames that follow are neither encrypted nor authenticated:
use a tunnel on a network where others can read or change packets.
"""

import hashlib
import hmac
from typing import Final

MAGIC: Final = b"CTRLNK\x00\x01"
NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_CLIENT: Final = b"contrail link: client"
_SERVER: Final = b"contrail link: server"


class HandshakeError(Exception):
    """The peer does not speak this protocol, or has another secret."""


def derived_key(secret: bytes, label: str) -> bytes:
    """Return the key (32 bytes) for one purpose; the cluster secret itself is never a key."""
    return hmac.digest(secret, f"contrail: {label}".encode(), hashlib.sha256)


class Handshake:
    """One end of the handshake. Once it is ``done``, ``rest`` has the bytes that followed it."""

    _magic_checked = False

    def __init__(self, key: bytes, nonce: bytes, awaited_bytes: int) -> None:
        self._key = key
        self._nonce = nonce
        self._awaited_bytes = awaited_bytes
        # Bytes of the peer that are not handled yet; fewer than `_awaited_bytes`.
        self._read = b""
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the peer, and return the bytes to send. Raises HandshakeError."""
        self._read += data
        answer = b""
        while not self.done and len(self._read) >= self._awaited_bytes:
            given = self._read[: self._awaited_bytes]
            self._read = self._read[self._awaited_bytes :]
            answer += self._proceed(given)
        if self.done:
            self.rest, self._read = self._read, b""
        # Fail at the first wrong byte. A stranger, such as an HTTP client, may send fewer bytes
        # than the handshake awaits, and would wait until the handshake times out.
        elif not self._magic_checked and not MAGIC.startswith(self._read[: len(MAGIC)]):
            raise HandshakeError("the peer does not speak this protocol")
        return answer

    def _proceed(self, given: bytes) -> bytes:
        raise NotImplementedError

    def _take_magic(self, given: bytes) -> bytes:
        if not given.startswith(MAGIC):
            raise HandshakeError("the peer does not speak this protocol")
        self._magic_checked = True
        return given[len(MAGIC) :]

    def _proof(self, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
        return hmac.digest(self._key, label + server_nonce + client_nonce, hashlib.sha256)


class ServerHandshake(Handshake):
    """The server's end. It sends its proof only after it has checked that of the client."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        super().__init__(key, nonce, len(MAGIC) + NONCE_BYTES + _PROOF_BYTES)

    @property
    def hello(self) -> bytes:
        """The first bytes to send."""
        return MAGIC + self._nonce

    def _proceed(self, given: bytes) -> bytes:
        given = self._take_magic(given)
        client_nonce, proof = given[:NONCE_BYTES], given[NONCE_BYTES:]
        # In constant time, so that the time of a refusal does not show how much of a guess is
        # right.
        if not hmac.compare_digest(proof, self._proof(_CLIENT, self._nonce, client_nonce)):
            raise HandshakeError("the peer has a different cluster secret")
        self.done = True
        return self._proof(_SERVER, self._nonce, client_nonce)


class ClientHandshake(Handshake):
    """The client's end."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        super().__init__(key, nonce, len(MAGIC) + NONCE_BYTES)
        self._server_nonce = b""

    @property
    def proof_sent(self) -> bool:
        """True once the client has sent its proof."""
        return bool(self._server_nonce)

    def _proceed(self, given: bytes) -> bytes:
        if not self._server_nonce:
            self._server_nonce = self._take_magic(given)
            self._awaited_bytes = _PROOF_BYTES
            proof = self._proof(_CLIENT, self._server_nonce, self._nonce)
            return MAGIC + self._nonce + proof
        if not hmac.compare_digest(given, self._proof(_SERVER, self._server_nonce, self._nonce)):
            raise HandshakeError("the peer has a different cluster secret")
        self.done = True
        return b""
