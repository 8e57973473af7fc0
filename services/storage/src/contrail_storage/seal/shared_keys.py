"""Shared keys: the subject keys of replicated shards, of which each member has a copy.

A shared key has an id of its own, because the slots of the members' files differ::

    1 bit (1) | term 31 bits | counter 32 bits

The term is that of the leader that made the key, so no two leaders make the same id, and the ids
of a shard ascend. The replicated state of a shard names the ids of its keys, never the keys
themselves (`core.stream.key_names`). A member compares them with its file:

- A key that is named and not in the file is *wanted*: another member has it.
- A key in the file that is not named yet was made lately, and seals nothing. It has a higher id
  than all that have been named.
- Any other key in the file is destroyed. So a key that was shredded never comes back: a member
  only takes keys that its own state names, or may still name.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core.key_layout import MARK_BYTES
from contrail_storage.disk.files import Files
from contrail_storage.seal.frames import Sealer
from contrail_storage.seal.key_file import (
    BROKEN,
    FREE,
    KEY_BYTES,
    LIVE,
    SHARED_KEYS_NAME,
    Doomed,
    Slot,
    SlotColumns,
    SubjectKeysDamagedError,
)
from contrail_storage.seal.mark_index import MarkIndex, U64Array
from contrail_storage.seal.subject_keys import CIPHERS_MAX, SLOTS_MAX, SubjectKey, SubjectKeys

SHARED: Final = 1 << 63
"""The bit of an id that tells shared keys from those of one node."""
_TERM_SHIFT: Final = 32
_SPREAD: Final = 0x9E3779B97F4A7C15
_U64: Final = (1 << 64) - 1
IF_LOST: Final = "if no node has it any more, erase its subject"
"""What ends the wait for a key."""
_log = structlog.get_logger("contrail.subject_keys")


class SharedKey(msgspec.Struct, array_like=True, frozen=True):
    """A key as members hand it to each other, with its id and the mark of its subject."""

    id: int
    mark: bytes
    key: bytes


@dataclass(slots=True)
class _Named:
    """What the state of a shard names, as far as it differs from the file.

    ``last`` is the highest id that was named, ``made`` the last one that this node made.
    ``hash_key`` is that of a stream that is being restored here. ``retired`` are ids whose keys
    seal nothing, should they still come from another member.
    """

    last: int = 0
    made: int = 0
    hash_key: bytes = b""
    wanted: set[int] = field(default_factory=set)
    unnamed: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)


class SharedKeys(SubjectKeys):
    """The shared keys of a folder. Thread-safe; methods that block write and sync the file."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        sealer: Sealer | None,
        hash_key_of: Callable[[int], bytes],
        slots_max: int = SLOTS_MAX,
        ciphers_max: int = CIPHERS_MAX,
    ) -> None:
        """``hash_key_of`` returns a key of a shard that all its members have."""
        super().__init__(files, directory, sealer, slots_max, ciphers_max, name=SHARED_KEYS_NAME)
        self._hash_key_of = hash_key_of  # hashes subjects, so that members have the same marks
        self._columns.append("_ids")
        self._ids = np.zeros(0, np.uint64)  # of the slots in use
        self._by_id = MarkIndex()  # live slots by shard and id
        self._named: dict[int, _Named] = {}  # by shard; `_lock`
        self._given_up: set[int] = set()  # slots that open nothing more and are to be destroyed

    # Loading -------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the file, if there is one. Blocks; raises OSError.

        A file that cannot be used is replaced: other members have its keys.
        """
        super().load()
        if self.trouble:
            _log.error("shared_keys_unusable", reason=self.trouble)
            self.trouble = ""  # the next key creates the file anew
        live = np.flatnonzero(self._states[: self._count] == LIVE)
        self._by_id = MarkIndex(
            _spread(self._shards[live].astype(np.uint64), self._ids[live]), live.astype(np.uint32)
        )
        # Of a shard that is not loaded but comes from the log, whose entries will name them.
        for shard_id in np.unique(self._shards[live]).tolist():
            self._known(shard_id).unnamed.update(self.ids_of(self._live_slots(shard_id)))
        with suppress(OSError):  # repeated with what is to be destroyed next
            self.destroy_doomed()

    def _load_columns(self, here: NDArray[np.uint32], found: SlotColumns) -> None:
        super()._load_columns(here, found)
        self._ids[here] = found.notes

    def settle(self, shard_id: int, named: U64Array, last: int) -> None:
        """Compare the keys of a shard with the ``named`` ones; ``last`` was named last."""
        with self._lock:
            slots = self._live_slots(shard_id)
            ids = self._ids[slots]
            known = self._named[shard_id] = _Named(last, last)
            known.wanted.update(np.setdiff1d(named, ids).tolist())
            spare = ~np.isin(ids, named)
            known.unnamed.update(ids[spare & (ids > np.uint64(last))].tolist())
            self._doom(slots[spare & (ids <= np.uint64(last))].tolist())

    # Following the state -------------------------------------------------------------------------

    def name(self, shard_id: int, ids: Sequence[int]) -> None:
        """Note that the state names keys (ascending ids): they may seal from now on."""
        with self._lock:
            known = self._known(shard_id)
            known.wanted.update(one for one in ids if self._slot(shard_id, one) is None)
            known.unnamed.difference_update(ids)
            known.last = max(known.last, *ids)
            # Whoever made them has failed, and no later entry can name them.
            self._drop_unnamed(shard_id, [one for one in known.unnamed if one <= known.last])

    def shred(self, shard_id: int, ids: Sequence[int]) -> None:
        """Note that the state names keys no more: they seal and open nothing from now on.

        ``destroy_doomed`` makes that durable.
        """
        with self._lock:
            known = self._known(shard_id)
            known.wanted.difference_update(ids)
            known.retired.difference_update(ids)
            self._drop_unnamed(shard_id, ids)

    def forget(self, shard_id: int) -> None:
        """Give up all keys of a shard, which is gone, as :meth:`shred` does."""
        with self._lock:
            self._named.pop(shard_id, None)
            self._doom(self._live_slots(shard_id).tolist())

    def _known(self, shard_id: int) -> _Named:
        return self._named.setdefault(shard_id, _Named())

    def _drop_unnamed(self, shard_id: int, ids: Sequence[int]) -> None:
        self._known(shard_id).unnamed.difference_update(ids)
        found = [self._slot(shard_id, one) for one in ids]
        self._doom([slot for slot in found if slot is not None])

    def _doom(self, slots: Iterable[int]) -> None:
        self._given_up.update(slots)
        self._sealing.clear()
        self._opening.clear()

    def destroy_doomed(self) -> None:
        """Destroy, durably, everything that was given up before. Blocks; raises OSError."""
        # Until the slots are no longer listed as given up, none of them may get another key: that
        # would be destroyed too, by whoever calls this meanwhile.
        with self._changing:
            with self._lock:
                slots = sorted(self._given_up)
            if self.remains:  # an earlier attempt has failed
                self.destroy_again()
            if slots:
                self.destroy(slots, 0)
            if self.remains:
                self.finish(list(self.remains))
            if self.broken:
                self._wipe_broken()
            with self._lock:
                self._given_up.difference_update(slots)

    def _wipe_broken(self) -> None:
        """Overwrite damaged slots, which may hold most of a key. Blocks; raises OSError.

        The key comes from another member into another slot, so nothing else would destroy this one.
        """
        file = self._needed()
        broken = np.flatnonzero(self._states[: self._count] == BROKEN).tolist()
        # The generations of these slots are lost, so no entry may be left that one could match.
        file.write_journal([])
        file.sync()
        file.write([(number, Slot(FREE)) for number in broken])
        file.sync()
        with self._lock:
            for number in broken:
                self._states[number], self._generations[number] = FREE, 0
                self._free.append(number)
            self.broken -= len(broken)

    def _give_up(self, one: Doomed) -> None:
        if self._states[one.slot] == LIVE:
            spread = _spread_one(int(self._shards[one.slot]), int(self._ids[one.slot]))
            self._by_id.discard(spread, one.slot)
        super()._give_up(one)

    # Finding -------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether there are keys to get from another node, to destroy, or to wipe."""
        with self._lock:
            return bool(self._given_up or self.remains or self.lacking or self.broken)

    def wants(self, shard_id: int) -> bool:
        """Whether this node has yet to get keys of a shard."""
        with self._lock:
            return bool(self._known(shard_id).wanted)

    @property
    def lacking(self) -> dict[int, int]:
        """By shard: the number of wanted keys, if there are any."""
        with self._lock:
            return {at: len(one.wanted) for at, one in self._named.items() if one.wanted}

    @property
    def wanted(self) -> dict[int, list[int]]:
        """By shard: the ids of keys that this node has yet to get from another one."""
        with self._lock:
            return {at: sorted(one.wanted) for at, one in self._named.items() if one.wanted}

    def opening_of(self, shard_id: int, key_id: int) -> SubjectKey | None:
        """The key of a shard with an id; None when it was destroyed. May read the file.

        Raises NOT_READY while this node has yet to get it.
        """
        with self._lock:
            key = self._opening.get((shard_id, key_id))
            if key is not None:
                return key
            known, number = self._known(shard_id), self._slot(shard_id, key_id)
            if number is not None:
                try:
                    slot = self._needed().slot(number)
                except SubjectKeysDamagedError:
                    slot = Slot(BROKEN)
                if (slot.state, slot.note) == (LIVE, key_id):
                    return self._in_use(number, slot)
                self._lose(number, slot)
            elif key_id <= known.last and key_id not in known.wanted:
                return None
        detail = f"this node has yet to get the key of a message from another one; {IF_LOST}"
        raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)

    def _lose(self, number: int, slot: Slot) -> None:
        """Note that a slot is damaged: its key is wanted."""
        shard_id, key_id = int(self._shards[number]), int(self._ids[number])
        _log.error("shared_key_damaged", slot=number, state=slot.state)
        self._live[shard_id] -= 1
        self._states[number] = BROKEN
        self.broken += 1
        self._by_id.discard(_spread_one(shard_id, key_id), number)
        self._known(shard_id).wanted.add(key_id)

    def _in_use(self, number: int, slot: Slot) -> SubjectKey:
        at = slot.shard_id, slot.note
        found = self._opening.get(at)
        if found is None:
            found = SubjectKey(slot.note, slot.note.to_bytes(8, "little"), AESGCM(slot.key))
            self._opening.put(at, found)
        return found

    def mark_of(self, shard_id: int, subject: str) -> bytes:
        """The mark of a subject: the same on all members."""
        return self._mark(shard_id, subject)

    def _mark(self, shard_id: int, subject: str) -> bytes:
        text = shard_id.to_bytes(4, "little") + subject.encode()
        key = self._hash_key_of(shard_id) or self._known(shard_id).hash_key
        return blake2b(text, digest_size=MARK_BYTES, key=key).digest()

    def _slot(self, shard_id: int, key_id: int) -> int | None:
        """The slot with the key of a shard with an id; None if this node does not have it."""
        for number in self._by_id.find(_spread_one(shard_id, key_id)):
            if (int(self._shards[number]), int(self._ids[number])) == (shard_id, key_id):
                return None if number in self._given_up else number
        return None

    def _live_slots(self, shard_id: int) -> NDArray[np.intp]:
        """The live slots of a shard, also those that are not named yet, without doomed ones."""
        mine = (self._shards[: self._count] == shard_id) & (self._states[: self._count] == LIVE)
        mine[[*self._given_up]] = False
        return np.flatnonzero(mine)

    def _slots_of(self, shard_id: int, mark: bytes) -> list[tuple[int, Slot]]:
        unnamed, doomed = self._known(shard_id).unnamed, self._given_up
        found = super()._slots_of(shard_id, mark)
        return [one for one in found if one[0] not in doomed and one[1].note not in unnamed]

    def slots_of_shard(self, shard_id: int) -> list[int]:
        """The slots with named keys of a shard."""
        with self._lock:
            slots, unnamed = self._live_slots(shard_id), self._known(shard_id).unnamed
            if unnamed:
                slots = slots[~np.isin(self._ids[slots], np.array([*unnamed], np.uint64))]
            found: list[int] = slots.tolist()
            return found

    def ids_of(self, slots: Iterable[int]) -> list[int]:
        """The ids of the keys in ``slots``, in ascending order."""
        with self._lock:
            return sorted(int(self._ids[number]) for number in slots)

    # Retiring ------------------------------------------------------------------------------------

    def retire_named(
        self, shard_id: int, subjects: Sequence[str], lacking: Mapping[int, bytes]
    ) -> list[int]:
        """Stop sealing with the keys of subjects; return their ids. May read the file.

        ``lacking``, by id, are the marks of keys that this node has yet to get.
        """
        ids = set(self.ids_of(self.retire(shard_id, subjects)))
        if lacking:
            marks = {self._mark(shard_id, subject) for subject in subjects}
            ids.update(one for one, mark in lacking.items() if mark in marks)
        self.retire_ids(shard_id, ids)
        return sorted(ids)

    def retire_ids(self, shard_id: int, ids: Iterable[int]) -> None:
        """Stop sealing with keys, also with those that this node has yet to get."""
        with self._lock:
            slots = {one: self._slot(shard_id, one) for one in ids}
            self._known(shard_id).retired.update(one for one in slots if slots[one] is None)
            self.retire_slots(slot for slot in slots.values() if slot is not None)

    # Making and copying --------------------------------------------------------------------------

    def prepare(self, shard_id: int, subjects: Iterable[str], term: int) -> list[SharedKey]:
        """Make keys for the subjects of a shard without one, by the leader of ``term``.

        Blocks. They are durable on return, and seal once they are named. Raises as :meth:`take`.
        """
        lacking = [one for one in subjects if not self.exists or not self.sealing(shard_id, one)]
        with self._lock:
            known = self._known(shard_id)
            first = max(SHARED | term << _TERM_SHIFT, known.last, known.made) + 1
            known.made = first + len(lacking) - 1
        made = [
            SharedKey(first + at, self._mark(shard_id, subject), os.urandom(KEY_BYTES))
            for at, subject in enumerate(lacking)
        ]
        self.take(shard_id, made)
        return made

    def expect(self, shard_id: int, hash_key: bytes) -> None:
        """Note the hash key that a shard will have, which is being restored."""
        with self._lock:
            self._known(shard_id).hash_key = hash_key

    def take(self, shard_id: int, keys: Sequence[SharedKey]) -> bool:
        """Store keys of another member that are wanted, or may still be named; durable on return.

        Returns whether this node has all of them then. Blocks. Raises OSError, SubjectKeysFullError
        or SubjectKeysDamagedError; then none is stored.
        """
        with self._adding() as made, self._lock:
            known = self._known(shard_id)
            for one in keys:
                if one.id > known.last or one.id in known.wanted:
                    self._take(shard_id, one, made)
        with self._lock:
            return all(self._slot(shard_id, one.id) is not None for one in keys)

    def _take(self, shard_id: int, one: SharedKey, made: list[tuple[int, Slot]]) -> None:
        if self._slot(shard_id, one.id) is None:
            slot = Slot(LIVE, 0, shard_id, one.id, one.mark, one.key)
            number = self._add_slot(slot, made)
            self._ids[number] = one.id

    def _use(self, number: int, slot: Slot) -> None:
        super()._use(number, slot)
        shard_id, key_id = slot.shard_id, slot.note
        self._by_id.add(_spread_one(shard_id, key_id), number)
        known = self._known(shard_id)
        if key_id in known.retired:
            self._retired.add(number)
        if key_id in known.wanted:
            known.wanted.discard(key_id)
        elif key_id > known.last:
            known.unnamed.add(key_id)
        else:
            self._doom([number])  # it was shredded while it was written

    def give(self, shard_id: int, ids: Iterable[int]) -> list[SharedKey]:
        """Those of the keys that this node has. Blocks. Raises OSError, SubjectKeysDamagedError."""
        found = []
        for one in ids:
            with self._lock:
                number = self._slot(shard_id, one)
                slot = None if number is None else self._needed().slot(number)
            if slot is not None and (slot.state, slot.note) == (LIVE, one):
                found.append(SharedKey(one, slot.mark, slot.key))
        return found


def _spread_one(shard_id: int, key_id: int) -> int:
    return (shard_id * _SPREAD & _U64) ^ key_id


def _spread(shards: U64Array, ids: U64Array) -> U64Array:
    """Numbers of shards and ids as one; two pairs rarely have the same."""
    return shards * np.uint64(_SPREAD) ^ ids
