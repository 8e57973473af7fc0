"""The file of subject keys: fixed slots, each of which is overwritten in place.

The only copy of a key is here, so overwriting the slot destroys the key. The log and the store keep
older versions of what is written to them, so no key is ever written there. Little-endian::

    header, 4 KiB:    "CTSK" | u8 version | mark key (as below) | CRC-32C
    journal, 64 KiB:  u32 entries | u32 CRC-32C | entry...       slots being destroyed
    slots, 128 B:     u8 state | u32 generation | u32 shard | u64 note | 16 B mark | key | CRC

The note of a live shared key is its id. That of a destroyed key is the sequence below which the
messages that it sealed have yet to be removed. In an encrypted folder, the keyring seals the keys.
No slot crosses the border of a sector. Before slots are destroyed, the journal is written: if a
crash tears a slot, the journal says that it was being destroyed. Any other slot that does not match
its checksum is broken and is not used again; in the file of shared keys, which other members have
too, it is overwritten.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from contrail_storage.core.key_layout import MARK_BYTES
from contrail_storage.disk.files import Files
from contrail_storage.seal.frames import SEAL_BYTES, SealBrokenError, Sealer

SUBJECT_KEYS_NAME: Final = "subject-keys"
SHARED_KEYS_NAME: Final = "shared-subject-keys"
KEY_BYTES: Final = 32
EMPTY: Final = 0
LIVE: Final = 1
DESTROYED: Final = 2
"""The key is gone; messages that it sealed may still be there."""
FREE: Final = 3
BROKEN: Final = 255
"""The slot does not match its checksum. This state exists in memory only."""

_MAGIC: Final = b"CTSK"
_VERSION: Final = 1
_FIELD_BYTES: Final = 84
_HEADER: Final = struct.Struct(f"<4sB3x{_FIELD_BYTES}s")
_CRC: Final = struct.Struct("<I")
_JOURNAL_AT: Final = 4096
_JOURNAL_BYTES: Final = 64 * 1024
_JOURNAL_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<IIIQ16s")
JOURNAL_MAX: Final = (_JOURNAL_BYTES - _JOURNAL_HEAD.size) // _ENTRY.size
_SLOTS_AT: Final = _JOURNAL_AT + _JOURNAL_BYTES
_SLOT: Final = struct.Struct(f"<B3xII4xQ16s{_FIELD_BYTES}s")
SLOT_BYTES: Final = _SLOT.size + _CRC.size
# Disks write whole sectors. A slot across two of them could be torn between state and key.
assert 512 % SLOT_BYTES == 0
_SLOT_TYPE: Final = np.dtype(
    {
        "names": ["state", "generation", "shard", "note", "mark", "crc"],
        "formats": ["u1", "<u4", "<u4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 8, 16, 24, _SLOT.size],
        "itemsize": SLOT_BYTES,
    }
)
_NEVER_USED: Final = bytes(SLOT_BYTES)
_SCAN_SLOTS: Final = 32_768


class SubjectKeysDamagedError(Exception):
    """The file of subject keys, or a key in it that is needed, is missing or damaged."""


class Slot(NamedTuple):
    """One slot: the mark of a subject of a shard, and its key (empty once destroyed).

    ``note`` is explained at the top.
    """

    state: int
    generation: int = 0
    shard_id: int = 0
    note: int = 0
    mark: bytes = bytes(MARK_BYTES)
    key: bytes = b""


class SlotColumns(NamedTuple):
    """Slots in columns. ``marks`` has the first 8 bytes of each mark as a little-endian number."""

    states: NDArray[np.uint8]
    generations: NDArray[np.uint32]
    shards: NDArray[np.uint32]
    notes: NDArray[np.uint64]
    marks: NDArray[np.uint64]


class Doomed(NamedTuple):
    """A journal entry: a slot whose key is destroyed; messages below ``below_seq`` go too."""

    slot: int
    generation: int
    shard_id: int
    below_seq: int
    mark: bytes


class KeyFile:
    """The slots of a folder. Every method blocks and may raise OSError.

    Any thread may read at any time. Only one thread at a time may write. What is sealed is bound to
    the name of the file.
    """

    def __init__(self, files: Files, path: Path, sealer: Sealer | None) -> None:
        """Open a file. Raises FileNotFoundError or SubjectKeysDamagedError."""
        self._handle = files.update(path)
        self._name = path.name
        self._sealer = sealer
        try:
            self.mark_key = self._read_header()
        except BaseException:
            self._handle.close()
            raise

    @classmethod
    def create(cls, files: Files, path: Path, sealer: Sealer | None, mark_key: bytes) -> "KeyFile":
        """Create a file that does not exist. It is durable on return."""
        temporary = path.with_name(path.name + ".new")
        with suppress(FileNotFoundError):
            files.unlink(temporary)
        field = mark_key if sealer is None else sealer.seal(mark_key, path.name.encode())
        header = _HEADER.pack(_MAGIC, _VERSION, field)
        handle = files.create(temporary)
        try:
            begin = header + _CRC.pack(crc32c(header))
            handle.write([begin, bytes(_SLOTS_AT - len(begin))])
            handle.sync()
        finally:
            handle.close()
        files.rename(temporary, path)
        files.sync_directory(path.parent)
        return cls(files, path, sealer)

    def _read_header(self) -> bytes:
        data = self._handle.read(0, _HEADER.size + _CRC.size)
        if len(data) < _HEADER.size + _CRC.size:
            raise SubjectKeysDamagedError(f"{self._name} is cut short")
        magic, version, field = _HEADER.unpack_from(data)
        (crc,) = _CRC.unpack_from(data, _HEADER.size)
        if magic != _MAGIC or crc32c(data[: _HEADER.size]) != crc:
            raise SubjectKeysDamagedError(f"the header of {self._name} is damaged")
        if version != _VERSION:
            raise SubjectKeysDamagedError(f"{self._name} has version {version}")
        return self._opened(field, self._name.encode())

    def scan(self) -> Iterator[SlotColumns]:
        """Yield all slots in order as columns, without keys; at most 32,768 slots at a time."""
        at = _SLOTS_AT
        while data := self._handle.read(at, _SCAN_SLOTS * SLOT_BYTES):
            at += len(data)
            # The last slot may be cut short by a crash while the file grew. Padded, it counts as
            # broken.
            data += bytes(-len(data) % SLOT_BYTES)
            slots = np.frombuffer(data, _SLOT_TYPE)
            sums = [crc32c(data[at : at + _SLOT.size]) for at in range(0, len(data), SLOT_BYTES)]
            # The file can have holes: slots that were reserved, and whose write failed before later
            # ones were written. All zeros, without a checksum, means that the slot was never used.
            used = np.frombuffer(data, np.uint8).reshape(-1, SLOT_BYTES).any(axis=1)
            sound = (slots["crc"] == np.array(sums, np.uint32)) | ~used
            yield SlotColumns(
                np.where(sound, slots["state"], np.uint8(BROKEN)),
                np.where(sound, slots["generation"], np.uint32(0)),
                np.where(sound, slots["shard"], np.uint32(0)),
                slots["note"],
                slots["mark"],
            )

    def slot(self, number: int) -> Slot:
        """Read a slot and open its key. Raises SubjectKeysDamagedError if the key does not open."""
        slot = _decoded(self._handle.read(_position_of(number), SLOT_BYTES))
        if slot.state != LIVE:
            return slot._replace(key=b"")
        return slot._replace(key=self._opened(slot.key, self._key_context(number, slot.generation)))

    def write(self, slots: Sequence[tuple[int, Slot]]) -> None:
        """Overwrite slots, given by ascending numbers. ``sync`` makes the change durable."""
        # Neighbouring slots go out in one write: new keys usually take consecutive slots.
        run: list[bytes] = []
        for at, (number, slot) in enumerate(slots):
            run.append(self._encoded(number, slot))
            if at + 1 == len(slots) or slots[at + 1][0] != number + 1:
                self._handle.write(_position_of(number - len(run) + 1), b"".join(run))
                run = []

    def write_journal(self, doomed: Sequence[Doomed]) -> None:
        """Replace the journal by the slots to be destroyed, at most JOURNAL_MAX."""
        entries = b"".join(_ENTRY.pack(*one) for one in doomed)
        head = _JOURNAL_HEAD.pack(len(doomed), crc32c(entries))
        self._handle.write(_JOURNAL_AT, head + entries)

    def journal(self) -> list[Doomed]:
        """The slots that were being destroyed; none if the journal itself is torn."""
        data = self._handle.read(_JOURNAL_AT, _JOURNAL_BYTES)
        count, crc = _JOURNAL_HEAD.unpack_from(data)
        entries = data[_JOURNAL_HEAD.size : _JOURNAL_HEAD.size + count * _ENTRY.size]
        # A torn journal was never synced, so no slot was overwritten yet: the sync of the journal
        # comes before the first overwrite. All keys are still intact.
        if count > JOURNAL_MAX or crc32c(entries) != crc:
            return []
        return [Doomed(*fields) for fields in _ENTRY.iter_unpack(entries)]

    def sync(self) -> None:
        """Return once everything written survives a power cut."""
        self._handle.sync()

    def close(self) -> None:
        """Release the file."""
        self._handle.close()

    def _encoded(self, number: int, slot: Slot) -> bytes:
        key = slot.key
        if key and self._sealer is not None:
            # Bound to slot and generation, so that an old copy of a slot cannot be put in its
            # place.
            key = self._sealer.seal(key, self._key_context(number, slot.generation))
        data = _SLOT.pack(*slot[:5], key)
        return data + _CRC.pack(crc32c(data))

    def _key_context(self, number: int, generation: int) -> bytes:
        return self._name[:-1].encode() + struct.pack("<II", number, generation)

    def _opened(self, field: bytes, context: bytes) -> bytes:
        if self._sealer is None:
            return field[:KEY_BYTES]
        try:
            return self._sealer.open(field[: KEY_BYTES + SEAL_BYTES], context)
        except SealBrokenError as error:
            raise SubjectKeysDamagedError(f"{self._name}: {error}") from error


def _decoded(data: bytes) -> Slot:
    if data == _NEVER_USED:
        return Slot(EMPTY)
    if (
        len(data) < SLOT_BYTES
        or crc32c(data[: _SLOT.size]) != _CRC.unpack_from(data, _SLOT.size)[0]
    ):
        return Slot(BROKEN)
    return Slot(*_SLOT.unpack_from(data))


def _position_of(number: int) -> int:
    return _SLOTS_AT + number * SLOT_BYTES
