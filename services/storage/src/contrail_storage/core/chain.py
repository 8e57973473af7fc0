"""A digest of everything that a group has applied, for comparing its members at one index.

Each entry continues the chain: its bytes (by their checksum), its results, and the counters of the
shards that it touched. Members with the same digest at an index have applied the same entries with
the same results; if one digest differs, so do all later ones.
"""

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import msgspec

from contrail_storage.core.results import Appended, Refused

DIGEST_BYTES: Final = 16
_APPLIED: Final = struct.Struct(">QQq16sqB")
_OLD_APPLIED: Final = struct.Struct(">QQ")
_FLAGS_AT: Final = 40
_INSTALLED: Final = 1
_ENTRY: Final = struct.Struct("<16sQQI")
_encode: Final = msgspec.msgpack.Encoder().encode


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The log time of the last applied entry (ns), and the digest of all applied ones.

    ``skipped_ns``: the sum of the jumps of log time until then.
    """

    time_ns: int
    digest: bytes
    skipped_ns: int = 0


NO_CHAIN: Final = Chain(0, bytes(DIGEST_BYTES))
"""The chain before the first entry."""


def encode_applied(index: int, term: int, chain: Chain) -> bytes:
    """The row of what a group has applied: up to ``index``, whose entry has ``term``."""
    return _APPLIED.pack(index, term, chain.time_ns, chain.digest, chain.skipped_ns, 0)


def decode_applied(row: bytes) -> tuple[int, Chain]:
    """Index and chain of :func:`encode_applied`. A row of release 0.2 has no chain."""
    if len(row) == _OLD_APPLIED.size:
        return _OLD_APPLIED.unpack(row)[0], NO_CHAIN
    index, _, time_ns, digest, skipped_ns, _ = _APPLIED.unpack(row)
    return index, Chain(time_ns, digest, skipped_ns)


def mark_installed(row: bytes) -> bytes:
    """The row of a state that was fetched from another member.

    If the log ends before it, the log begins again there: what is missing is in the state.
    """
    return row[:_FLAGS_AT] + bytes([row[_FLAGS_AT] | _INSTALLED]) + row[_FLAGS_AT + 1 :]


def is_installed(row: bytes) -> bool:
    """Whether a row was marked by :func:`mark_installed`, and no entry was applied since."""
    return len(row) == _APPLIED.size and bool(row[_FLAGS_AT] & _INSTALLED)


def entry_of(row: bytes) -> tuple[int, int]:
    """Index and term of :func:`encode_applied`."""
    index, term = _OLD_APPLIED.unpack_from(row)
    return index, term


def next_digest(
    before: bytes,
    index: int,
    term: int,
    crc: int,
    results: Iterable[object],
    counters: Iterable[tuple[int, msgspec.Struct]],
) -> bytes:
    """The digest after an entry with checksum ``crc``.

    ``results`` are those of its commands, in order; ``counters`` those of the shards it touched.
    """
    plain: list[object] = []
    for result in results:
        # The usual result is compared as it is.
        usual = type(result) is Appended and result.exceptions is None
        plain.append(result if usual else _plain(result))
    outcome = _encode((plain, list(counters)))
    head = _ENTRY.pack(before, index, term, crc)
    return blake2b(head + outcome, digest_size=DIGEST_BYTES).digest()


def _plain(result: object) -> object:
    """What is compared of a result: not the sentence of a refusal, which releases may change."""
    if isinstance(result, Refused):
        return result.code, result.seq
    if isinstance(result, Appended) and result.exceptions is not None:
        exceptions = [(at, _plain(one)) for at, one in sorted(result.exceptions.items())]
        return result.first_seq, result.count, exceptions
    return result
