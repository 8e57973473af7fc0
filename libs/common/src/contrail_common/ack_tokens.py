"""Ack tokens: opaque, signed addresses of deliveries, which any gateway process accepts.

A token is base64url of ``account | shard | consumer id | epoch | sequence | attempt | MAC``. The
MAC is keyed BLAKE2b over these and over the names of stream and consumer, so that a token is only
valid for the consumer that delivered the message. The key is a cluster secret. During a rotation,
the previous key is accepted too.
"""

import hashlib
import hmac
import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError

KEY_BYTES_MIN: Final = 16
KEY_BYTES_MAX: Final = 64
_MAC_BYTES: Final = 16
_ADDRESS: Final = struct.Struct(">BIQI")  # bytes of account, shard, consumer id, epoch
_DELIVERY: Final = struct.Struct(">QI")  # sequence, attempt
_TO_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True)
class AckAddress:
    """The contents of a token: one delivery of one message by one consumer in one epoch."""

    shard_id: int
    consumer_id: int
    epoch: int
    seq: int
    attempt: int


class AckTokens:
    """Makes and opens the tokens of one account.

    ``keys`` are 16 to 64 random bytes each; the first signs, all of them verify. They are read at
    each use, so that they can be changed in place.
    """

    def __init__(self, account: str, keys: Sequence[bytes]) -> None:
        if not keys or not all(KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX for key in keys):
            raise ValueError("ack tokens need keys of 16 to 64 bytes")
        self._account = account.encode()
        self._keys = keys

    def signer(
        self, stream: str, consumer: str, shard_id: int, consumer_id: int, epoch: int
    ) -> Callable[[int, int], str]:
        """Return a function that makes a token from sequence and attempt, for one consumer."""
        address = _ADDRESS.pack(len(self._account), shard_id, consumer_id, epoch) + self._account
        # All tokens of the consumer begin in the same way, so that part is hashed once.
        begun = _mac(self._keys[0], stream, consumer)
        begun.update(address)

        def sign(seq: int, attempt: int) -> str:
            delivery = _DELIVERY.pack(seq, attempt)
            mac = begun.copy()
            mac.update(delivery)
            return _encode(address + delivery + mac.digest()).decode()

        return sign

    def opener(self, stream: str, consumer: str) -> Callable[[str], AckAddress]:
        """Return a function that opens tokens.

        It raises TOKEN_FORGED for a token that was not signed for this consumer.
        """
        begun = [_mac(key, stream, consumer) for key in self._keys]

        def sign(key: "hashlib.blake2b", signed: bytes) -> bytes:
            mac = key.copy()
            mac.update(signed)
            return mac.digest()

        def open_token(token: str) -> AckAddress:
            raw = _decode(token)
            signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            # Always try every key, so that the duration does not show which one matches.
            genuine = [hmac.compare_digest(sign(key, signed), mac) for key in begun]
            length, shard_id, consumer_id, epoch = _ADDRESS.unpack_from(signed)
            delivery_at = _ADDRESS.size + length
            if not any(genuine) or signed[_ADDRESS.size : delivery_at] != self._account:
                raise ApiError(errors.TOKEN_FORGED, applied=False)
            seq, attempt = _DELIVERY.unpack_from(signed, delivery_at)
            return AckAddress(shard_id, consumer_id, epoch, seq, attempt)

        return open_token


def _mac(key: bytes, stream: str, consumer: str) -> "hashlib.blake2b":
    names = f"{stream}/{consumer}/".encode()  # neither name can contain a slash
    return hashlib.blake2b(names, key=key, digest_size=_MAC_BYTES, person=b"contrail-ack")


def _encode(raw: bytes) -> bytes:
    return b2a_base64(raw, newline=False).rstrip(b"=").translate(_TO_URL_SAFE)


def _decode(token: str) -> bytes:
    """Return the bytes of a token; raise TOKEN_FORGED if its spelling is not canonical."""
    try:
        text = token.encode("ascii")
        padded = text.translate(_FROM_URL_SAFE) + b"=" * (-len(text) % 4)
        raw = a2b_base64(padded, strict_mode=True)
    except (UnicodeEncodeError, Base64Error):
        raise ApiError(errors.TOKEN_FORGED, applied=False) from None
    # One spelling per token: the last character of base64 has bits that the decoder ignores.
    if len(raw) < _ADDRESS.size + _DELIVERY.size + _MAC_BYTES or _encode(raw) != text:
        raise ApiError(errors.TOKEN_FORGED, applied=False)
    return raw
