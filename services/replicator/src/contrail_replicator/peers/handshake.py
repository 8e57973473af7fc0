"""The handshake between nodes: both prove that they know the cluster secret, and say who they are.

::

    listener -> dialler   magic | nonce
    dialler -> listener   magic | nonce | u16 bytes | hello | u8 count | proofs
    listener -> dialler   0 | u8 bytes | hello | proof
                       or 1 | u8 bytes | the reason of the refusal

A proof is HMAC-SHA256 over a label, both nonces, the digest of the listener's TLS certificate as
this end sees it, and the hellos. So a proof is worthless on any other connection: an overheard one
is not for this nonce, and one that was passed on by a man in the middle is not for his certificate.
Two secrets may be valid while they are changed: the dialler sends a proof for each of its own.

The listener reads at most 256 bytes, and acts on none of them, before it has seen a proof.
"""

import hashlib
import hmac
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from contrail_link.tcp.handshake import other_protocol
from contrail_replicator.peers.frames import Channel

_MAGIC_NAME: Final = b"CTRLPR\x00"
_VERSION: Final = 1
"""Of the handshake; what follows it has the protocol that the hellos agree on."""
MAGIC: Final = _MAGIC_NAME + bytes([_VERSION])
NONCE_BYTES: Final = 32
DIGEST_BYTES: Final = 32
UNPROVEN_BYTES_MAX: Final = 256
"""Bytes of a dialler's whole part of the handshake."""
PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1
NODE_NAME_BYTES_MAX: Final = 48
NO_CLUSTER: Final = bytes(16)
"""The cluster id of a node that has none yet."""
PLAIN: Final = bytes(DIGEST_BYTES)
"""The digest of the certificate on a connection without TLS."""

_SECRETS_MAX: Final = 2
_PROOF_BYTES: Final = 32
_DIALLER: Final = b"contrail peer: dialler"
_LISTENER: Final = b"contrail peer: listener"
_HELLO: Final = struct.Struct("<BBBBHHQQQ16s")
_U16: Final = struct.Struct("<H")
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NODE_NAME_BYTES_MAX - 1}}}")
# More than the listener's whole part of the handshake can have.
_LISTENER_BYTES_MAX: Final = 512
_WELCOME: Final = 0
_REFUSED: Final = 1
_NOT_THIS_PROTOCOL: Final = "it does not speak this protocol"


class HandshakeError(Exception):
    """The connection must end; the text says what is wrong with the other end."""


class RefusedError(HandshakeError):
    """The listener has refused this node; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One end of a connection.

    ``boots`` counts the starts of the node and ``process`` is random per process, so that two
    processes with copies of one folder can be told apart. ``target`` is the node that is meant to
    be at the other end. ``level`` is reserved for the formats that a node can write.
    """

    name: str
    target: str
    channel: Channel
    cluster_id: bytes
    incarnation: int
    boots: int
    process: int
    node_number: int = 0
    level: int = 0
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX

    def encoded(self) -> bytes:
        """Return the bytes of the hello."""
        head = _HELLO.pack(
            self.protocol_min,
            self.protocol_max,
            self.channel,
            0,
            self.node_number,
            self.level,
            self.incarnation,
            self.boots,
            self.process,
            self.cluster_id,
        )
        names = [name.encode() for name in (self.name, self.target)]
        return head + b"".join(bytes([len(name)]) + name for name in names)


def is_node_name(name: str) -> bool:
    """True for a name of 1 to 48 letters, digits and ``_.-`` that starts with neither of these."""
    return bool(_NAME.fullmatch(name))


def decode_hello(data: bytes) -> Hello:
    """Return the hello. Raises HandshakeError."""
    at, names = _HELLO.size, list[str]()
    try:
        low, high, channel, zero, number, level, *rest = _HELLO.unpack_from(data)
        incarnation, boots, process, cluster_id = rest
        for _ in range(2):
            end = at + 1 + data[at]
            names.append(data[at + 1 : end].decode())
            at = end
        whole = at == len(data) and not zero and all(map(is_node_name, names))
        which = Channel(channel)
    except (struct.error, IndexError, ValueError):
        whole = False
    if not whole:
        raise HandshakeError(_NOT_THIS_PROTOCOL)
    name, target = names
    return Hello(
        name, target, which, cluster_id, incarnation, boots, process, number, level, low, high
    )


def common_protocol(one: Hello, other: Hello) -> int:
    """Return the highest protocol that both ends speak. Raises HandshakeError if there is none."""
    version = min(one.protocol_max, other.protocol_max)
    if version < max(one.protocol_min, other.protocol_min):
        raise HandshakeError(
            f"{other.name} is of another release: it speaks protocol {other.protocol_min} to "
            f"{other.protocol_max}, and {one.name} {one.protocol_min} to {one.protocol_max}"
        )
    return version


class _Part:
    """What both ends have in common: bytes that are not handled yet, and proofs."""

    def __init__(self, keys: Sequence[bytes], nonce: bytes, certificate: bytes) -> None:
        if not 1 <= len(keys) <= _SECRETS_MAX:
            raise ValueError(f"1 or {_SECRETS_MAX} keys are needed, not {len(keys)}")
        self._keys = keys
        self._nonce = nonce
        self._certificate = certificate
        self._read = b""
        self.peer: Hello | None = None
        """The other end, once it has proved itself."""

    @property
    def rest(self) -> bytes:
        """Received bytes after the handshake."""
        return self._read

    def _takes_magic(self) -> bool:
        # Fails at the first wrong byte: a stranger, such as an HTTP client, may send fewer bytes
        # than are awaited, and would wait for the time limit.
        if not self._read.startswith(MAGIC[: len(self._read)]):
            if self._read.startswith(_MAGIC_NAME):
                version = self._read[len(_MAGIC_NAME)]
                raise HandshakeError(
                    f"it is of another release: it speaks version {version} of the handshake, and "
                    f"this node version {_VERSION}"
                )
            raise HandshakeError(f"it {other_protocol(self._read)}")
        return len(self._read) >= len(MAGIC) + NONCE_BYTES

    def _proof(self, key: bytes, label: bytes, nonces: bytes, hellos: bytes) -> bytes:
        return hmac.digest(key, label + nonces + self._certificate + hellos, hashlib.sha256)


class ListenerHandshake(_Part):
    """The end that accepted. ``admit`` decides on a dialler that knows the secret.

    It returns the own hello, or raises HandshakeError with the sentence for both ends.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        nonce: bytes,
        certificate: bytes,
        admit: Callable[[Hello], Hello],
    ) -> None:
        super().__init__(keys, nonce, certificate)
        self._admit = admit

    @property
    def first(self) -> bytes:
        """The bytes to send first."""
        return MAGIC + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the dialler, and return the bytes to send. Raises HandshakeError."""
        self._read += data
        start = len(MAGIC) + NONCE_BYTES + _U16.size
        if not self._takes_magic() or len(self._read) < start:
            return b""
        (size,) = _U16.unpack_from(self._read, start - _U16.size)
        end = start + size + 1
        count = self._read[end - 1] if len(self._read) >= end else 1
        proofs_end = end + count * _PROOF_BYTES
        if not 1 <= count <= _SECRETS_MAX or proofs_end > UNPROVEN_BYTES_MAX:
            raise HandshakeError(_NOT_THIS_PROTOCOL)
        if len(self._read) < proofs_end:
            return b""
        encoded = self._read[start : end - 1]
        proofs = self._read[end:proofs_end]
        nonces = self._nonce + self._read[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        self._read = self._read[proofs_end:]
        key = self._key_of(proofs, nonces, encoded)
        hello = decode_hello(encoded)
        own = self._admit(hello)
        self.peer = hello
        answer = own.encoded()
        proof = self._proof(key, _LISTENER, nonces, encoded + answer)
        return bytes([_WELCOME, len(answer)]) + answer + proof

    def _key_of(self, proofs: bytes, nonces: bytes, encoded: bytes) -> bytes:
        found = None
        for key in self._keys:
            expected = self._proof(key, _DIALLER, nonces, encoded)
            for at in range(0, len(proofs), _PROOF_BYTES):
                # In constant time, so that a refusal does not show how much of a guess is right.
                if hmac.compare_digest(proofs[at : at + _PROOF_BYTES], expected):
                    found = key
        if found is None:
            raise HandshakeError("it has a different cluster secret")
        return found


def refusal(reason: str) -> bytes:
    """Return the bytes that tell the dialler why the listener ends the connection."""
    text = reason.encode("ascii", "replace")[:255]
    return bytes([_REFUSED, len(text)]) + text


class DiallerHandshake(_Part):
    """The end that dialled."""

    def __init__(
        self, keys: Sequence[bytes], nonce: bytes, certificate: bytes, hello: Hello
    ) -> None:
        super().__init__(keys, nonce, certificate)
        self._hello = hello
        # Both nonces, once the listener's is there.
        self._nonces = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the listener, and return the bytes to send. Raises HandshakeError."""
        self._read += data
        if len(self._read) > _LISTENER_BYTES_MAX:
            raise HandshakeError(_NOT_THIS_PROTOCOL)
        if self._nonces:
            self._finish()
            return b""
        if not self._takes_magic():
            return b""
        start = len(MAGIC) + NONCE_BYTES
        self._nonces = self._read[len(MAGIC) : start] + self._nonce
        self._read = self._read[start:]
        encoded = self._hello.encoded()
        proofs = [self._proof(key, _DIALLER, self._nonces, encoded) for key in self._keys]
        answer = MAGIC + self._nonce + _U16.pack(len(encoded)) + encoded
        self._finish()
        return answer + bytes([len(proofs)]) + b"".join(proofs)

    def _finish(self) -> None:
        read = self._read
        head = 2
        if len(read) < head or len(read) < head + read[1]:
            return
        content = read[head : head + read[1]]
        if read[0] == _REFUSED:
            text = content.decode("ascii", "replace")
            raise RefusedError("".join(one for one in text if one.isprintable()))
        if read[0] != _WELCOME:
            raise HandshakeError(_NOT_THIS_PROTOCOL)
        end = head + len(content) + _PROOF_BYTES
        if len(read) < end:
            return
        hellos = self._hello.encoded() + content
        proof = read[head + len(content) : end]
        expected = (self._proof(key, _LISTENER, self._nonces, hellos) for key in self._keys)
        if not any(hmac.compare_digest(proof, one) for one in expected):
            raise HandshakeError("it has a different cluster secret")
        self._read = read[end:]
        hello = decode_hello(content)
        if hello.name != self._hello.target:
            raise HandshakeError(f"it is {hello.name}, not {self._hello.target}")
        common_protocol(self._hello, hello)
        self.peer = hello
