"""The bytes of an entry: a header that checks them, and the commands.

Little-endian::

    entry = version u8 | flags u8 | 0 u16 | crc32c u32 | log time i64 (ns) | commands

With flag 1, the sum of the jumps of log time (i64, ns) is between time and commands. Only groups
of several members whose log time has jumped have it: see `replica.group_time`.

The commands are msgpack: pairs of a shard and a command. The checksum covers everything but
itself. It is made when the entry is proposed, and compared before a follower logs the entry and
before any member decodes it. The checksums of the log and of the wire cannot replace it: they
confirm whatever the leader's memory has when they are made.

An entry without data is Raft's own and has no header.
"""

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
from crc32c import crc32c

from contrail_storage.core.commands import Command, Entry

VERSION: Final = 2
HEADER_BYTES: Final = 16
_CRC_AT: Final = 4
_CHECKED_FROM: Final = 8
_HEADER: Final = struct.Struct("<4sIq")
_SKIPPED: Final = struct.Struct("<q")
_HEAD: Final = bytes((VERSION, 0, 0, 0))
_HEAD_CRC: Final = crc32c(_HEAD)
_SKIPPING_HEAD: Final = bytes((VERSION, 1, 0, 0))
_SKIPPING_HEAD_CRC: Final = crc32c(_SKIPPING_HEAD)
# Release 0.2 had no header. Its entries are msgpack arrays of two elements, and begin with this.
_FIRST_BYTE_OF_0_2: Final = 0x92

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[int, Command]])


class EntryDamagedError(ValueError):
    """The bytes of an entry are not those that were proposed. No state may come from it."""


class EntryVersionError(ValueError):
    """Another release wrote the entry, and this one must not interpret it."""


def encode_entry(entry: Entry) -> bytes:
    """The bytes that are logged and replicated."""
    return encode_parts(entry.time_ns, entry.commands, entry.skipped_ns)


def encode_command(command: Command) -> msgspec.Raw:
    """The bytes of a command within an entry."""
    return msgspec.Raw(_encoder.encode(command))


def encode_parts(
    time_ns: int, commands: Sequence[tuple[int, Command | msgspec.Raw]], skipped_ns: int = 0
) -> bytes:
    """As :func:`encode_entry`, for commands that may be encoded already."""
    entry = bytearray(HEADER_BYTES)
    head, crc, at = _HEAD, _HEAD_CRC, HEADER_BYTES
    if skipped_ns:
        head, crc = _SKIPPING_HEAD, _SKIPPING_HEAD_CRC
        entry += _SKIPPED.pack(skipped_ns)
        at = len(entry)
    _encoder.encode_into(commands, entry, at)
    _HEADER.pack_into(entry, 0, head, 0, time_ns)
    crc = crc32c(memoryview(entry)[_CHECKED_FROM:], crc, gil_release_mode=0)
    entry[_CRC_AT:_CHECKED_FROM] = crc.to_bytes(4, "little")
    # Nobody changes it. A copy of a large entry would take as long as its checksum.
    return entry  # type: ignore[return-value]


def decode_entry(data: bytes) -> Entry:
    """The entry logged as ``data``. Raises EntryDamagedError or EntryVersionError."""
    check_entry(data)
    head, _, time_ns = _HEADER.unpack_from(data)
    at, skipped_ns = HEADER_BYTES, 0
    try:
        if head == _SKIPPING_HEAD:
            [skipped_ns] = _SKIPPED.unpack_from(data, at)
            at += _SKIPPED.size
        return Entry(time_ns, _decoder.decode(memoryview(data)[at:]), skipped_ns)
    except (struct.error, msgspec.MsgspecError) as error:
        raise EntryDamagedError(f"its commands do not decode: {error}") from error


def check_entry(data: bytes) -> None:
    """Raise EntryDamagedError or EntryVersionError unless ``data`` is what was proposed."""
    crc = int.from_bytes(data[_CRC_AT:_CHECKED_FROM], "little")
    if crc32c(memoryview(data)[_CHECKED_FROM:], crc32c(data[:_CRC_AT])) != crc:
        if data[0] == _FIRST_BYTE_OF_0_2:
            raise EntryVersionError(
                "the log has entries of release 0.2 that are not in the store: start it once with "
                "that release and stop it cleanly"
            )
        raise EntryDamagedError("it does not match its checksum")
    # After the checksum: a damaged version is damage, not a newer release.
    if data[:_CRC_AT] not in (_HEAD, _SKIPPING_HEAD):
        raise EntryVersionError(f"the log has entries of a newer release (version {data[0]})")


def entry_crc(data: bytes) -> int:
    """The checksum in an entry's header."""
    return int.from_bytes(data[_CRC_AT:_CHECKED_FROM], "little")


def is_sound(data: bytes) -> bool:
    """Whether a follower may log ``data``: it is Raft's own entry, or one that was proposed."""
    try:
        if data:
            check_entry(data)
    except (EntryDamagedError, EntryVersionError):
        return False
    return True
