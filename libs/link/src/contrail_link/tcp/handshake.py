"""The handshake: both ends prove that they know the cluster secret, before any frame is read.

::

    server -> client   magic | server's nonce
    client -> server   magic | client's nonce | HMAC-SHA256(key, "client" | both nonces | digest)
    server -> client   HMAC-SHA256(key, "server" | both nonces | digest)

Each nonce is used once, so an overheard proof is worthless. The two labels differ, so a proof
cannot be reflected to its sender. The digest is that of the server's TLS certificate, and empty on
loopback, where the link is not encrypted: a man in the middle has another certificate.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

_NAME: Final = b"CTRLNK\x00"
_VERSION: Final = 2
"""Of everything that is sent on the link. Release 0.2 spoke 1."""
MAGIC: Final = _NAME + bytes([_VERSION])
NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
ONE_END: Final = "is there a tunnel with only one end on loopback?"
"""Then one end speaks TLS, and the other does not."""
SILENT: Final = f"it sent nothing: it hangs, or awaits TLS ({ONE_END})"
"""Of a peer that should have begun, and to which this end speaks no TLS."""
_TLS: Final = b"\x16\x03"
"""How a client of TLS begins."""
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

    def __init__(self, nonce: bytes, awaited_bytes: int) -> None:
        self.certificate = b""
        """The digest of the server's certificate, to be set before any bytes; empty without TLS."""
        self._nonce = nonce
        self._awaited_bytes = awaited_bytes
        # Bytes of the peer that are not handled yet; fewer than `_awaited_bytes`.
        self._read = b""
        self.done = False
        self.rest = b""

    @property
    def is_silent(self) -> bool:
        """True while the peer has sent nothing."""
        return not (self._read or self._magic_checked)

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
        elif not self._magic_checked:
            _check_magic(self._read)
        return answer

    def _proceed(self, given: bytes) -> bytes:
        raise NotImplementedError

    def _proof(self, key: bytes, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
        text = label + server_nonce + client_nonce + self.certificate
        return hmac.digest(key, text, hashlib.sha256)

    def _take_magic(self, given: bytes) -> bytes:
        _check_magic(given)
        self._magic_checked = True
        return given[len(MAGIC) :]


class ServerHandshake(Handshake):
    """The server's end. It sends its proof only after it has checked that of the client.

    The client may have any of the ``keys``.
    """

    def __init__(self, keys: Sequence[bytes], nonce: bytes) -> None:
        super().__init__(nonce, len(MAGIC) + NONCE_BYTES + _PROOF_BYTES)
        self._keys = keys

    @property
    def hello(self) -> bytes:
        """The first bytes to send."""
        return MAGIC + self._nonce

    def _proceed(self, given: bytes) -> bytes:
        given = self._take_magic(given)
        client_nonce, proof = given[:NONCE_BYTES], given[NONCE_BYTES:]
        for key in self._keys:
            # In constant time, so that the time of a refusal does not show how much of a guess is
            # right.
            if hmac.compare_digest(proof, self._proof(key, _CLIENT, self._nonce, client_nonce)):
                self.done = True
                return self._proof(key, _SERVER, self._nonce, client_nonce)
        raise HandshakeError("the peer has a different cluster secret")


class ClientHandshake(Handshake):
    """The client's end."""

    def __init__(self, key: bytes, nonce: bytes) -> None:
        super().__init__(nonce, len(MAGIC) + NONCE_BYTES)
        self._key = key
        self._server_nonce = b""

    @property
    def proof_sent(self) -> bool:
        """True once the client has sent its proof."""
        return bool(self._server_nonce)

    def _proceed(self, given: bytes) -> bytes:
        if not self._server_nonce:
            self._server_nonce = self._take_magic(given)
            self._awaited_bytes = _PROOF_BYTES
            proof = self._proof(self._key, _CLIENT, self._server_nonce, self._nonce)
            return MAGIC + self._nonce + proof
        expected = self._proof(self._key, _SERVER, self._server_nonce, self._nonce)
        if not hmac.compare_digest(given, expected):
            raise HandshakeError("the peer has a different cluster secret")
        self.done = True
        return b""


def _check_magic(read: bytes) -> None:
    """Raise HandshakeError if the bytes that the peer has sent so far do not begin with `MAGIC`."""
    if MAGIC.startswith(read[: len(MAGIC)]):
        return
    if read.startswith(_NAME):
        version = read[len(_NAME)]
        raise HandshakeError(
            f"the peer is of another release: it speaks version {version} of the link, and this "
            f"process version {_VERSION}"
        )
    raise HandshakeError(f"the peer {other_protocol(read)}")


def other_protocol(read: bytes) -> str:
    """What a peer does that has sent ``read``, which no handshake begins with."""
    if read.startswith(_TLS):
        return f"speaks TLS, and this end does not on loopback: {ONE_END}"
    return "does not speak this protocol"
