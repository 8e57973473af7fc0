"""Ack tokens: opaque, signed addresses of deliveries, which any gateway process accepts.

The deliveries of one pull share a signed head: base64url of ``account | shard | consumer id | epoch
| runs of sequences | MAC``. A token is a head and the position of a delivery in it, as in
``head.3``; ``head.*`` means all of them. The head lists exactly what was delivered, so a client
cannot acknowledge what others got. The MAC is keyed BLAKE2b over the head and over the names of
stream and consumer, so that a token is only valid for the consumer that delivered the message. The
key is a cluster secret. During a rotation, the previous key is accepted too.

Tokens of releases before 0.3 are signed one by one: base64url of ``account | shard | consumer id |
epoch | sequence | attempt | MAC``, without a point. They are still opened.
"""

import hashlib
import hmac
import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise
from operator import lt
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError

KEY_BYTES_MIN: Final = 16
KEY_BYTES_MAX: Final = 64
ALL: Final = "*"
"""The position in a token that means all deliveries of its head."""
_MAC_BYTES: Final = 16
_ADDRESS: Final = struct.Struct(">BIQI")  # bytes of account, shard, consumer id, epoch
_RUN: Final = struct.Struct(">QI")  # first sequence, number of consecutive sequences
_DELIVERY: Final = struct.Struct(">QI")  # of an older token: sequence, attempt
_POSITION_DIGITS_MAX: Final = 9
_TO_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
# So that no signed bytes of one spelling are valid in the other.
_PERSON: Final = b"contrail-acks"
_OLD_PERSON: Final = b"contrail-ack"


class AckHead(msgspec.Struct, frozen=True):
    """The contents of a head: deliveries of one consumer in one epoch, in order.

    ``runs`` are consecutive sequences, at least one in each. No sequence is in two of them.
    ``ends`` are the positions at which they end (exclusive).
    """

    shard_id: int
    consumer_id: int
    epoch: int
    runs: tuple[range, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return self.ends[-1]

    def seqs(self, first: int, last: int) -> list[int]:
        """Return the sequences at the positions ``first`` to ``last``, as far as there are any."""
        found: list[int] = []
        # A request may name each run by itself, so none but those that it names are looked at.
        for at in range(bisect_right(self.ends, first), len(self.runs)):
            run = self.runs[at]
            start = self.ends[at] - len(run)
            if start > last:
                break
            found += run[max(first - start, 0) : last + 1 - start]
        return found


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

    def sign_each(
        self, stream: str, consumer: str, address: tuple[int, int, int], seqs: Sequence[int]
    ) -> list[str]:
        """Return a token for each of ``seqs``; ``address`` is shard id, consumer id and epoch.

        Consecutive sequences share a head. So a token is short, whatever else was delivered.
        """
        # The heads of a consumer begin in the same way, so that part is hashed once.
        begun, begin = self._begun(stream, consumer, address)
        made: list[str] = []
        for run in _runs(seqs):
            head = _text(begun, begin, _RUN.pack(*run))
            made += [f"{head}.{at}" for at in range(run[1])]
        return made

    def sign_all(
        self, stream: str, consumer: str, address: tuple[int, int, int], seqs: Sequence[int]
    ) -> str:
        """Return one token for all of ``seqs`` (at least one); see :meth:`sign_each`."""
        begun, begin = self._begun(stream, consumer, address)
        return f"{_text(begun, begin, b''.join([_RUN.pack(*run) for run in _runs(seqs)]))}.{ALL}"

    def _begun(
        self, stream: str, consumer: str, address: tuple[int, int, int]
    ) -> "tuple[hashlib.blake2b, bytes]":
        begin = _ADDRESS.pack(len(self._account), *address) + self._account
        begun = _mac(self._keys[0], stream, consumer, _PERSON)
        begun.update(begin)
        return begun, begin

    def opener(self, stream: str, consumer: str) -> "TokenOpener":
        """Return what opens the tokens of one request to a consumer."""
        return TokenOpener(self._account, self._keys, stream, consumer)


class TokenOpener:
    """Opens the tokens of one request; the MAC of a head that many of them share is checked once.

    Raises TOKEN_FORGED for what was not signed for the consumer.
    """

    def __init__(self, account: bytes, keys: Sequence[bytes], stream: str, consumer: str) -> None:
        self._account = account
        self._keys = keys
        self._names = stream, consumer
        self._begun = [_mac(key, stream, consumer, _PERSON) for key in keys]
        self._heads: dict[str, AckHead] = {}

    def open(self, token: str) -> tuple[AckHead, int | None]:
        """Return the head of a token and the sequence that it means; None: all of the head."""
        text, point, position = token.rpartition(".")
        if not point:
            return self._open_old(token)
        head = self._heads.get(text)
        if head is None:
            head = self._heads[text] = self._open(text)
        if position == ALL:
            return head, None
        # One spelling per token: "07" and " 7" are numbers for `int`.
        if len(position) > _POSITION_DIGITS_MAX or not (position.isascii() and position.isdigit()):
            raise forged()
        at = int(position)
        found = head.seqs(at, at)
        if not found or str(at) != position:
            raise forged()
        return head, found[0]

    def _open(self, text: str) -> AckHead:
        address, runs = self._verified(text, self._begun)
        if not runs or len(runs) % _RUN.size:
            raise forged()
        each = [range(seq, seq + count) for seq, count in _RUN.iter_unpack(runs)]
        return AckHead(*address, tuple(each), tuple(accumulate(map(len, each))))

    @cached_property
    def _old_begun(self) -> "list[hashlib.blake2b]":
        return [_mac(key, *self._names, _OLD_PERSON) for key in self._keys]

    def _open_old(self, text: str) -> tuple[AckHead, int]:
        address, delivery = self._verified(text, self._old_begun)
        if len(delivery) != _DELIVERY.size:
            raise forged()
        seq, _ = _DELIVERY.unpack(delivery)
        return AckHead(*address, (range(seq, seq + 1),), (1,)), seq

    def _verified(
        self, text: str, keys: "list[hashlib.blake2b]"
    ) -> tuple[tuple[int, int, int], bytes]:
        """Return the address in a genuine text, and what follows it."""
        raw = _decode(text)
        signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        # Always try every key, so that the duration does not show which one matches.
        genuine = [hmac.compare_digest(_sign(key, signed), mac) for key in keys]
        length, shard_id, consumer_id, epoch = _ADDRESS.unpack_from(signed)
        at = _ADDRESS.size + length
        if not any(genuine) or signed[_ADDRESS.size : at] != self._account:
            raise forged()
        return (shard_id, consumer_id, epoch), signed[at:]


def forged() -> ApiError:
    """The refusal of a token that was not signed for the consumer."""
    return ApiError(errors.TOKEN_FORGED, applied=False)


def _runs(seqs: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive sequences (at least one): first and number of each."""
    if seqs[-1] - seqs[0] == len(seqs) - 1 and all(map(lt, seqs, islice(seqs, 1, None))):
        return [(seqs[0], len(seqs))]
    found: list[tuple[int, int]] = []
    begin = 0
    for at, (seq, after) in enumerate(pairwise(seqs), 1):
        if after != seq + 1:
            found.append((seqs[begin], at - begin))
            begin = at
    return [*found, (seqs[begin], len(seqs) - begin)]


def _text(begun: "hashlib.blake2b", begin: bytes, runs: bytes) -> str:
    return _encode(begin + runs + _sign(begun, runs)).decode()


def _sign(begun: "hashlib.blake2b", rest: bytes) -> bytes:
    mac = begun.copy()
    mac.update(rest)
    return mac.digest()


def _mac(key: bytes, stream: str, consumer: str, person: bytes) -> "hashlib.blake2b":
    names = f"{stream}/{consumer}/".encode()  # neither name can contain a slash
    return hashlib.blake2b(names, key=key, digest_size=_MAC_BYTES, person=person)


def _encode(raw: bytes) -> bytes:
    return b2a_base64(raw, newline=False).rstrip(b"=").translate(_TO_URL_SAFE)


def _decode(text: str) -> bytes:
    """Return the bytes of a head; raise TOKEN_FORGED if its spelling is not canonical."""
    try:
        given = text.encode("ascii")
        padded = given.translate(_FROM_URL_SAFE) + b"=" * (-len(given) % 4)
        raw = a2b_base64(padded, strict_mode=True)
    except (UnicodeEncodeError, Base64Error):
        raise forged() from None
    # One spelling per token: the last character of base64 has bits that the decoder ignores.
    if len(raw) < _ADDRESS.size + _RUN.size + _MAC_BYTES or _encode(raw) != given:
        raise forged()
    return raw
