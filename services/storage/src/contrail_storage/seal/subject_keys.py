"""Subject keys: creating, finding and destroying one key per subject, for streams that use them.

Only one copy of a key exists, in a slot of the node's key file. The ciphers of a few thousand
recently used keys are cached in memory. Memory holds 21 bytes for each slot (state, generation,
shard, and an index of marks), up to a quarter more while the columns grow. A message names its key
by slot and generation. Each use of a slot raises its generation, so a destroyed key can be
distinguished from a missing one.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from contrail_storage.core.key_layout import MARK_BYTES
from contrail_storage.disk.files import Files
from contrail_storage.seal.frames import Sealer
from contrail_storage.seal.key_file import (
    BROKEN,
    DESTROYED,
    EMPTY,
    FREE,
    JOURNAL_MAX,
    KEY_BYTES,
    LIVE,
    SUBJECT_KEYS_NAME,
    Doomed,
    KeyFile,
    Slot,
    SlotColumns,
    SubjectKeysDamagedError,
)
from contrail_storage.seal.mark_index import MarkIndex, prefix_of

SLOTS_MAX: Final = 1 << 24
"""Keys that a node can have: 2 GiB of file, and about 400 MB of memory."""
CIPHERS_MAX: Final = 8_192
_SLOT_MASK: Final = 0xFFFFFFFF
_GROWTH: Final = 4
_LOCKED_MAX: Final = 64
"""Slots that are added before the lock is released, so that lookups of keys can run."""
K = TypeVar("K")
V = TypeVar("V")


class SubjectKeysFullError(Exception):
    """The node has the maximum number of subject keys."""


class SubjectKey(NamedTuple):
    """A key that is in use; ``name`` is its id as bytes, to which every message is bound."""

    id: int
    name: bytes
    cipher: AESGCM


class Remains(NamedTuple):
    """Work left by a destroyed key: remove a subject's messages below a sequence, by its mark."""

    shard_id: int
    mark: bytes
    below_seq: int


class _Recent(Generic[K, V]):
    """A cache of the values used last, at most twice ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None:
            # Two generations instead of a linked list of uses: a value that is used moves to the
            # young one, and what nobody used leaves with the old one.
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        self._young, self._old = {}, {}


class SubjectKeys:
    """The subject keys of a folder. Thread-safe; methods that block write and sync the file."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        sealer: Sealer | None,
        slots_max: int = SLOTS_MAX,
        ciphers_max: int = CIPHERS_MAX,
        *,
        name: str = SUBJECT_KEYS_NAME,
    ) -> None:
        """``name`` is that of the key file."""
        self.trouble = ""
        """Why the file cannot be used, if it exists and cannot; else empty."""
        self.broken = 0
        """Broken slots at the start: messages sealed with their keys cannot be opened."""
        self.remains: dict[int, Remains] = {}
        """Work left by destroyed keys, by slot."""
        self._files = files  # opens and creates the key file
        self._path = directory / name  # of the key file
        self._sealer = sealer  # seals the keys in the file; None: the folder is plain
        self._slots_max = slots_max  # a publish that needs more raises SubjectKeysFullError
        self._file: KeyFile | None = None  # None: no file yet, closed, or in `trouble`
        self._columns = ["_states", "_generations", "_shards"]  # names of the columns
        # Columns with one element per slot; `_lock`. They may be longer than `_count`.
        self._states = np.zeros(0, np.uint8)
        self._generations = np.zeros(0, np.uint32)  # of the slot's last use; never decreases
        self._shards = np.zeros(0, np.uint32)  # of the subject; valid while the slot is used
        self._count = 0  # slots in the file, used or free
        self._live: Counter[int] = Counter()  # live keys by shard
        self._free: list[int] = []  # slots that can have a new key
        self._index = MarkIndex()  # live slots by mark
        self._retired: set[int] = set()  # slots whose keys open and no longer seal
        self._condemned: set[int] = set()  # slots to destroy unless they seal before that
        # Caches; `_lock`. A key that is retired, condemned or destroyed must leave `_sealing`.
        self._sealing: _Recent[tuple[int, str], SubjectKey] = _Recent(ciphers_max)
        # By id. A retired or condemned key stays: it still opens.
        self._opening: _Recent[object, SubjectKey] = _Recent(ciphers_max)
        self._lock = threading.RLock()
        """For all that is in memory; never held during a write."""
        self._changing = threading.RLock()
        """For writes to the file; taken before `_lock`."""

    # Loading -------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the folder has a file of subject keys that can be used."""
        return self._file is not None

    def load(self) -> None:
        """Read the file, if there is one, and finish a destruction that was interrupted. Blocks.

        Raises OSError. A damaged file is no error here: ``trouble`` says what is wrong.
        """
        try:
            self._file = KeyFile(self._files, self._path, self._sealer)
        except FileNotFoundError:
            return
        except SubjectKeysDamagedError as error:
            self.trouble = str(error)
            return
        with self._changing:
            marks: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
            slots: list[NDArray[np.uint32]] = [np.zeros(0, np.uint32)]
            for found in self._file.scan():
                first = self._count
                self._grow(first + len(found.states))
                here = np.arange(first, self._count, dtype=np.uint32)
                self._load_columns(here, found)
                live = found.states == LIVE
                marks.append(found.marks[live])
                slots.append(here[live])
                self._live.update(found.shards[live].tolist())
                self._free += here[(found.states == EMPTY) | (found.states == FREE)].tolist()
                for number in here[found.states == DESTROYED].tolist():
                    slot = self._file.slot(number)
                    self.remains[number] = Remains(slot.shard_id, slot.mark, slot.note)
            self._index = MarkIndex(np.concatenate(marks), np.concatenate(slots))
            # After the columns are complete: the journal may turn broken slots into destroyed ones,
            # so broken slots are counted only after it.
            self._finish_journal(self._file)
            self.broken = int(np.count_nonzero(self._states == BROKEN))

    def _load_columns(self, here: NDArray[np.uint32], found: SlotColumns) -> None:
        self._states[here] = found.states
        self._generations[here] = found.generations
        self._shards[here] = found.shards

    def _finish_journal(self, file: KeyFile) -> None:
        doomed = [
            one for one in file.journal() if one.slot < self._count and self._is_unfinished(one)
        ]
        if doomed:
            self._overwrite(file, doomed)

    def _is_unfinished(self, one: Doomed) -> bool:
        state, generation = self._states[one.slot], int(self._generations[one.slot])
        # A slot of a later generation was destroyed, freed and used again since: its key is another
        # one.
        return bool(state == BROKEN or (state == LIVE and generation == one.generation))

    def _grow(self, count: int) -> None:
        if count > len(self._states):
            size = count + count // _GROWTH + 64
            for name in self._columns:
                column = getattr(self, name)
                grown = np.zeros(size, column.dtype)
                grown[: self._count] = column[: self._count]
                setattr(self, name, grown)
        self._count = max(self._count, count)

    # Finding -------------------------------------------------------------------------------------

    def sealing(self, shard_id: int, subject: str) -> SubjectKey | None:
        """The key that seals for a subject now; None if it has none. May read the file.

        Raises SubjectKeysDamagedError.
        """
        with self._lock:
            key = self._sealing.get((shard_id, subject))
            if key is not None:
                return key
            for number, slot in self._slots_of(shard_id, self._mark(shard_id, subject)):
                # An erasure is waiting for everything sealed with this key. A new publish gets a
                # new key.
                if number in self._retired:
                    continue
                # The subject is in use again: the sweep that noted its key as idle must not destroy
                # it.
                self._condemned.discard(number)
                key = self._in_use(number, slot)
                self._sealing.put((shard_id, subject), key)
                return key
        return None

    def opening(self, key_id: int) -> SubjectKey | None:
        """The key with an id; None when it was destroyed. May read the file.

        Raises SubjectKeysDamagedError when the key should exist and does not.
        """
        with self._lock:
            key = self._opening.get(key_id)
            if key is not None:
                return key
            number, generation = key_id & _SLOT_MASK, key_id >> 32
            # A higher generation in the file, or the same one destroyed, means erased. A lower one
            # means that the file is older than the message: that is damage, and must not look like
            # an erasure.
            if self._is_gone(number, generation):
                return None
            if number >= self._count or self._generations[number] != generation:
                reason = self.trouble or f"{self._path.name} is missing, or older than the data"
                raise SubjectKeysDamagedError(f"key {number}.{generation} is lost: {reason}")
            return self._cipher(number, generation)

    def gone(self, key_ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the keys that were destroyed; the id 0 stands for no key."""
        gone = np.zeros(len(key_ids), np.bool_)
        numbers = (key_ids & np.uint64(_SLOT_MASK)).astype(np.int64)
        with self._lock:
            asked = np.flatnonzero((key_ids != 0) & (numbers < self._count))
            numbers = numbers[asked]
            generations = (key_ids[asked] >> np.uint64(32)).astype(np.uint32)
            now, states = self._generations[numbers], self._states[numbers]
            over = (states == DESTROYED) | (states == FREE)
        gone[asked] = (now > generations) | ((now == generations) & over)
        return gone

    def _is_gone(self, number: int, generation: int) -> bool:
        if number >= self._count:
            return False
        now, state = int(self._generations[number]), int(self._states[number])
        return now > generation or (now == generation and state in (DESTROYED, FREE))

    def _cipher(self, number: int, generation: int) -> SubjectKey:
        slot = self._needed().slot(number)
        if (slot.state, slot.generation) != (LIVE, generation):
            raise SubjectKeysDamagedError(f"slot {number} of {self._path.name} is damaged")
        return self._in_use(number, slot)

    def _in_use(self, number: int, slot: Slot) -> SubjectKey:
        key_id = slot.generation << 32 | number
        found = self._opening.get(key_id)
        if found is None:
            found = SubjectKey(key_id, key_id.to_bytes(8, "little"), AESGCM(slot.key))
            self._opening.put(key_id, found)
        return found

    def _needed(self) -> KeyFile:
        if self._file is None:
            raise SubjectKeysDamagedError(self.trouble or f"{self._path.name} is missing")
        return self._file

    def _mark(self, shard_id: int, subject: str) -> bytes:
        text = shard_id.to_bytes(4, "little") + subject.encode()
        return blake2b(text, digest_size=MARK_BYTES, key=self._needed().mark_key).digest()

    def _slots_of(self, shard_id: int, mark: bytes) -> list[tuple[int, Slot]]:
        """The slots with live keys of the subject with a mark."""
        file = self._needed()
        found = [
            (number, file.slot(number))
            for number in self._index.find(prefix_of(mark))
            if self._states[number] == LIVE and self._shards[number] == shard_id
        ]
        return [(number, slot) for number, slot in found if (slot.state, slot.mark) == (LIVE, mark)]

    # Making --------------------------------------------------------------------------------------

    def make(self, wanted: Iterable[tuple[int, str]]) -> None:
        """Create keys for the (shard, subject) pairs without one; durable on return. Blocks.

        Raises OSError, SubjectKeysFullError or SubjectKeysDamagedError; then no key is created.
        """
        wanted = list(wanted)
        with self._adding() as made:
            # In parts: `sealing` waits for this lock on the event loop.
            for start in range(0, len(wanted), _LOCKED_MAX):
                with self._lock:
                    self._add_slots(wanted[start : start + _LOCKED_MAX], made)

    @contextmanager
    def _adding(self) -> Iterator[list[tuple[int, Slot]]]:
        """Store the slots that the body adds to the list, durably, and use them from then on."""
        made: list[tuple[int, Slot]] = []
        with self._changing:
            file = self._file or self._create()
            try:
                yield made
                made.sort()
                file.write(made)
                file.sync()
            except (OSError, SubjectKeysFullError, SubjectKeysDamagedError):
                # Their generation stays raised: the failed write may be on disk anyway, and the
                # next key of the slot must differ from it.
                self._free += [number for number, _ in made]
                raise
            with self._lock:
                for number, slot in made:
                    # Only now, when the key is durable, can a message be sealed with it.
                    self._use(number, slot)

    def _use(self, number: int, slot: Slot) -> None:
        self._states[number] = LIVE
        self._live[slot.shard_id] += 1
        self._index.add(prefix_of(slot.mark), number)

    def _create(self) -> KeyFile:
        if self.trouble:
            raise SubjectKeysDamagedError(self.trouble)
        mark_key = os.urandom(KEY_BYTES)
        self._file = KeyFile.create(self._files, self._path, self._sealer, mark_key)
        return self._file

    def _add_slots(self, wanted: Sequence[tuple[int, str]], made: list[tuple[int, Slot]]) -> None:
        """Add slots for the pairs of ``wanted`` that have no key."""
        for shard_id, subject in wanted:
            if self.sealing(shard_id, subject) is not None:
                continue
            mark, key = self._mark(shard_id, subject), os.urandom(KEY_BYTES)
            self._add_slot(Slot(LIVE, 0, shard_id, 0, mark, key), made)

    def _add_slot(self, slot: Slot, made: list[tuple[int, Slot]]) -> int:
        """Add ``slot`` in its next generation; return its number."""
        # Freed slots first: the file grows only when all of its slots are in use.
        number = self._free.pop() if self._free else self._count
        if number >= self._slots_max:
            raise SubjectKeysFullError(f"a node can have at most {self._slots_max} subject keys")
        self._grow(number + 1)
        self._generations[number] += 1
        self._shards[number] = slot.shard_id
        made.append((number, slot._replace(generation=int(self._generations[number]))))
        return number

    # Destroying ----------------------------------------------------------------------------------

    def retire(self, shard_id: int, subjects: Iterable[str]) -> list[int]:
        """Return the slots of subjects; from now on their keys open and do not seal."""
        if self._file is None:
            return []
        found: list[int] = []
        for subject in subjects:
            with self._lock:
                slots = self._slots_of(shard_id, self._mark(shard_id, subject))
            found += [number for number, _ in slots]
        self.retire_slots(found)
        return found

    def retire_slots(self, slots: Iterable[int]) -> None:
        """Stop sealing with the keys in ``slots``."""
        with self._lock:
            self._retired.update(slots)
            # The cache is by subject and these are slots. It is refilled in a few reads.
            self._sealing.clear()

    def destroy(self, slots: Sequence[int], below_seq: int) -> None:
        """Destroy keys: on return no copy of them is left. Blocks.

        Their messages below ``below_seq`` are listed in ``remains`` until ``finish``. The keys open
        nothing as soon as this is called. After an OSError, call ``destroy_again``.
        """
        file = self._needed()
        with self._changing:
            for start in range(0, len(slots), JOURNAL_MAX):
                with self._lock:
                    doomed = [
                        self._doomed(file, number, below_seq)
                        for number in sorted(slots[start : start + JOURNAL_MAX])
                        if self._states[number] == LIVE
                    ]
                self._overwrite(file, doomed)

    def destroy_again(self) -> None:
        """Complete, durably, the destruction that a failed ``destroy`` may have left. Blocks."""
        with self._changing:
            doomed = [
                Doomed(at, int(self._generations[at]), one.shard_id, one.below_seq, one.mark)
                for at, one in sorted(self.remains.items())
            ]
            for start in range(0, len(doomed), JOURNAL_MAX):
                self._overwrite(self._needed(), doomed[start : start + JOURNAL_MAX])

    def _doomed(self, file: KeyFile, number: int, below_seq: int) -> Doomed:
        shard_id, generation = int(self._shards[number]), int(self._generations[number])
        return Doomed(number, generation, shard_id, below_seq, file.slot(number).mark)

    def _overwrite(self, file: KeyFile, doomed: Sequence[Doomed]) -> None:
        with self._lock:
            for one in doomed:
                self._give_up(one)
            self._sealing.clear()
            # In memory first, the ciphers included: from here on nothing opens with these keys,
            # even if the writes below fail and are repeated.
            self._opening.clear()
        # Synced before the first overwrite. Otherwise a crash could tear a slot of which the
        # journal says nothing, and its messages would count as damaged, not as erased.
        file.write_journal(doomed)
        file.sync()
        file.write(
            [
                (one.slot, Slot(DESTROYED, one.generation, one.shard_id, one.below_seq, one.mark))
                for one in doomed
            ]
        )
        file.sync()
        # The next sync makes this durable too. A journal that remains is harmless: it is done.
        file.write_journal([])

    def _give_up(self, one: Doomed) -> None:
        if self._states[one.slot] == LIVE:
            self._live[one.shard_id] -= 1
            self._index.discard(prefix_of(one.mark), one.slot)
        self._states[one.slot] = DESTROYED
        self._generations[one.slot] = one.generation
        self._shards[one.slot] = one.shard_id
        self._retired.discard(one.slot)
        self._condemned.discard(one.slot)
        self.remains[one.slot] = Remains(one.shard_id, one.mark, one.below_seq)

    def finish(self, slots: Iterable[int]) -> None:
        """Free the slots once their messages are gone, so that they can have other keys.

        Blocks. Raises OSError.
        """
        file = self._needed()
        with self._changing:
            freed = sorted(number for number in slots if number in self.remains)
            # Not synced: after a power cut the slots may be DESTROYED again. Then their work is
            # repeated, and finds nothing to remove.
            file.write([(number, Slot(FREE, int(self._generations[number]))) for number in freed])
            with self._lock:
                for number in freed:
                    self._states[number] = FREE
                    self._free.append(number)
                    del self.remains[number]

    # Subjects without messages -------------------------------------------------------------------

    def live(self) -> Mapping[int, int]:
        """Number of live keys of each shard."""
        return {shard_id: count for shard_id, count in list(self._live.items()) if count}

    def slots_of_shard(self, shard_id: int) -> list[int]:
        """The slots with live keys of a shard."""
        with self._lock:
            mine = (self._shards[: self._count] == shard_id) & (self._states[: self._count] == LIVE)
            found: list[int] = np.flatnonzero(mine).tolist()
            return found

    def slots_of_subjects(self, shard_id: int, subjects: Sequence[str]) -> set[int]:
        """The slots that subjects of a shard may have, found by their marks' prefixes."""
        with self._lock:
            return self._index.find_many(
                [prefix_of(self._mark(shard_id, subject)) for subject in subjects]
            )

    def condemn(self, slots: Iterable[int]) -> None:
        """Note slots to be destroyed, unless they seal something before that."""
        with self._lock:
            self._condemned.update(slots)
            self._sealing.clear()

    def condemned(self, slots: Iterable[int]) -> list[int]:
        """Return the condemned ones of ``slots`` that have sealed nothing since."""
        with self._lock:
            return [number for number in slots if number in self._condemned]

    def remains_of(
        self, shard_id: int, subjects: Iterable[str], slots: Iterable[int]
    ) -> list[tuple[int, str]]:
        """The work that destroyed ``slots`` left for some subjects: (below_seq, subject)."""
        below: dict[bytes, int] = {}
        for number in slots:
            one = self.remains.get(number)
            if one is not None and one.shard_id == shard_id:
                below[one.mark] = max(one.below_seq, below.get(one.mark, 0))
        marks = ((self._mark(shard_id, subject), subject) for subject in subjects)
        return [(below[mark], subject) for mark, subject in marks if mark in below]

    def close(self) -> None:
        """Release the file."""
        with self._changing, self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
