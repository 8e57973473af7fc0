"""Shredding: subject keys are destroyed when their subject is erased or has no messages left.

In a group of one, an erasure destroys keys before it deletes messages. A crash may therefore leave
messages that cannot be decrypted; until they are removed, reads treat them as erased. The key file
records the work that a destroyed key leaves, and every start finishes it.

Where members share the keys, the node that serves the stream has them retired, so that their leader
seals no more with them, then has the messages deleted, and then the keys shredded; every member
destroys its copies when it applies that. A crash or another leader in between may leave keys of
subjects without messages, which the next sweep finds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol

import numpy as np
import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.subjects import is_wildcard
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Done
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.content_sealing import refusal, seals
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.seal.key_file import SUBJECT_KEYS_NAME, SubjectKeysDamagedError
from contrail_storage.seal.shared_keys import SharedKeys
from contrail_storage.seal.subject_keys import SubjectKeys
from contrail_storage.streams.outcomes import expect
from contrail_storage.streams.removals import Removals
from contrail_storage.upkeep.backoff import Backoff

_SHREDDED_TOGETHER: Final = 1_000
_TOGETHER: Final = 1_024
"""Subjects that are looked up before the event loop does other work."""
TICK_S: Final = 1.0
SWEEP_S: Final = 30.0
_RETRY_MAX_S: Final = 60.0
_log = structlog.get_logger("contrail.subject_keys")


class Streams(Protocol):
    """The part of the stream manager that the shredder uses."""

    def is_listed(self, number: int) -> bool:
        """Whether a listed stream has a shard with the id ``number``."""
        ...

    def serves(self, shard: Shard) -> bool:
        """Whether this node serves the stream of a shard."""
        ...

    @property
    def next_shard_id(self) -> int:
        """The lowest shard id that was given to no stream, as far as this node knows."""
        ...

    def taken_shard_ids(self) -> set[int]:
        """Shard ids of all streams, also of those being created, restored or removed."""
        ...

    @property
    def removals(self) -> Removals:
        """The removals, which purge the messages of destroyed keys."""
        ...


class Sharing(Protocol):
    """The part of the sharing of keys that the shredder uses."""

    @property
    def keys(self) -> SharedKeys:
        """The shared keys of this node."""
        ...

    async def wanted_marks(self, shard_id: int) -> dict[int, bytes]:
        """By id: the marks of the subjects whose keys this node lacks; empty if not known."""
        ...


class Snapshots(Protocol):
    """The part of the snapshots that the shredder uses."""

    @property
    def is_reading(self) -> bool:
        """Whether a snapshot is being read. It may still need keys of deleted messages."""
        ...


def stop_without_keys(
    keys: SubjectKeys, shards: Iterable[Shard], is_replicated: Callable[[int], bool]
) -> None:
    """Stop shards that have had sealed messages if the key file is missing or damaged.

    But not those of replicated groups, whose keys other members have too.
    """
    if keys.broken:
        _log.warning("subject_keys_broken", slots=keys.broken)
    if keys.exists:
        return
    reason = keys.trouble or (
        f"{SUBJECT_KEYS_NAME} is missing; without it no subject key can be used"
    )
    for shard in shards:
        machine = shard.machine
        # A stream that has never had a message loses nothing with the file; it gets a new one.
        if is_replicated(shard.group) or not seals(shard):
            continue
        if machine.counters.last_seq >= machine.config.first_seq:
            shard.damaged = reason
            _log.critical("subject_keys_lost", stream=shard.name, reason=reason)


class Shredder:
    """Destroys subject keys, and removes the messages that they sealed."""

    def __init__(
        self,
        keys: SubjectKeys,
        sharing: Sharing,
        groups: Groups,
        streams: Streams,
        shards: Mapping[int, Shard],
        shard_log: ShardLog,
        snapshots: Snapshots,
        reader: Reader,
    ) -> None:
        # The keys of groups of one, in their file.
        self._keys = keys
        # The keys that members of groups share, in theirs.
        self._shared = sharing.keys
        # Tells the marks of those that this node lacks.
        self._wanted_marks = sharing.wanted_marks
        # Which groups this node leads, and which it is alone in.
        self._groups = groups
        # Which streams and shard ids are in use; keys of others are left over.
        self._streams = streams
        # All shards, by id.
        self._shards = shards
        # Tells when all that was proposed before is applied.
        self._shard_log = shard_log
        # While one is read, keys of deleted messages are still needed.
        self._snapshots = snapshots
        # Finds the subjects of an erasure.
        self._reader = reader
        self._busy: set[int] = set()
        """Slots in `_keys` of the erasures in progress; `reconcile` leaves them alone."""
        self._stuck: set[int] = set()
        """Slots with work left that cannot be done while their shard is damaged."""
        # The time between attempts to :meth:`reconcile`, after failures.
        self._backoff = Backoff(TICK_S, _RETRY_MAX_S)
        self._retry_at_s = 0.0
        """Loop time of the next attempt to :meth:`reconcile`."""
        self._swept: dict[int, tuple[int, float]] = {}
        """By shard: how many messages were removed at its last check, and when that was."""

    # Erasing -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def shredded(self, shards: Sequence[Shard], pattern: str) -> AsyncIterator[bool]:
        """Destroy the keys of matching subjects. The body must remove the sealed messages.

        Yields whether the shards have subject keys. An error after keys were destroyed becomes
        OUTCOME_UNKNOWN; the rest of the work is done later.
        """
        if not seals(shards[0]):
            yield False
            return
        if self._are_shared(shards[0]):
            async with self._shredded_by_all(shards, pattern):
                yield True
            return
        slots: list[int] = []
        try:
            for shard in shards:
                retired = await self._retire(shard, pattern, self._keys)
                # Noted before keys are destroyed: an error from here on has an unknown outcome.
                slots += retired
                self._busy.update(retired)
                await self._shred(shard, pattern, retired)
            # The body removes the messages. Only after it may the slots have new keys.
            yield True
            if slots:
                await asyncio.to_thread(self._keys.finish, slots)
        except (ApiError, OSError, SubjectKeysDamagedError) as error:
            if slots:
                detail = f"subject keys may have been destroyed: {error}"
                raise ApiError(errors.OUTCOME_UNKNOWN, detail) from error
            if isinstance(error, ApiError):
                raise
            raise refusal(error) from error
        finally:
            self._busy.difference_update(slots)

    @asynccontextmanager
    async def _shredded_by_all(self, shards: Sequence[Shard], pattern: str) -> AsyncIterator[None]:
        """Have all members destroy the keys of matching subjects, once the body has ended."""
        retired: list[tuple[int, list[int]]] = []
        for shard in shards:
            ids = await self._retire_shared(shard, pattern)
            retired.append((await self._retire_by_all(shard, ids), ids))
        yield
        try:
            for shard, (term, ids) in zip(shards, retired, strict=True):
                await self._shred_by_all(shard, ids, term)
                await self._sweep_for(shard, pattern)
        except (ApiError, SubjectKeysDamagedError) as error:
            detail = f"the messages are deleted; their keys may not be destroyed: {error}"
            raise ApiError(errors.OUTCOME_UNKNOWN, detail) from error

    async def _retire_by_all(self, shard: Shard, ids: Sequence[int]) -> int:
        """Let the leader of a shard seal no more with keys; return its term.

        On return, everything that was sealed with them is applied here. Another leader may seal
        with them again, so they may be shredded in the same term only.
        """
        term = self._groups[shard.group].term
        await self._propose(shard, ids, lambda some: cmd.RetireKeys(some, term))
        await self._barrier(shard)
        return term

    async def _shred_by_all(self, shard: Shard, ids: Sequence[int], term: int) -> None:
        await self._propose(shard, ids, lambda some: cmd.ShredKeys(some, term))

    async def _propose(
        self, shard: Shard, ids: Sequence[int], command: Callable[[bytes], cmd.StreamCommand]
    ) -> None:
        """Have commands about keys applied, also if another node leads the shard."""
        for start in range(0, len(ids), _SHREDDED_TOGETHER):
            some = np.array(ids[start : start + _SHREDDED_TOGETHER], np.uint64)
            result = await self._shard_log.command(shard.machine.shard_id, command(some.tobytes()))
            expect(result, Done)

    def _are_shared(self, shard: Shard) -> bool:
        return not self._groups[shard.group].is_alone

    def _keys_of(self, shard: Shard) -> SubjectKeys:
        return self._shared if self._are_shared(shard) else self._keys

    async def _retire(self, shard: Shard, pattern: str, keys: SubjectKeys) -> list[int]:
        """Retire the keys of matching subjects (they seal nothing more); return their slots."""
        retire = partial(keys.retire, shard.machine.shard_id)
        return await self._for_subjects(shard, pattern, retire)

    async def _retire_shared(self, shard: Shard, pattern: str) -> list[int]:
        """Retire the keys of matching subjects, also those that this node lacks; return their ids.

        A key that no member has any more is shredded like any other one.
        """
        shard_id = shard.machine.shard_id
        while True:
            lacking = await self._wanted_marks(shard_id)
            retire = partial(self._shared.retire_named, shard_id, lacking=lacking)
            ids = await self._for_subjects(shard, pattern, retire)
            # Else a key was found to be damaged meanwhile.
            if lacking.keys() >= set(self._shared.wanted.get(shard_id, ())):
                return ids

    async def _for_subjects(
        self, shard: Shard, pattern: str, call: Callable[[list[str]], list[int]]
    ) -> list[int]:
        """Call, in a thread, with the matching subjects that have messages, or a literal one."""
        table = shard.machine.subjects
        wanted = await self._reader.filter_of(shard, (pattern,))
        at, texts = wanted.slots(table), table.numbered.texts

        def called() -> list[int]:
            names = (texts[slot] for slot in at.tolist()) if is_wildcard(pattern) else (pattern,)
            return call([name for name in names if name])

        return await asyncio.to_thread(called)

    async def _shred(self, shard: Shard, pattern: str, slots: list[int]) -> None:
        if slots:
            await self._barrier(shard)  # now everything sealed with these keys is applied
            below_seq = shard.machine.counters.last_seq + 1
            await asyncio.to_thread(self._keys.destroy, slots, below_seq)
        await self._sweep_for(shard, pattern)

    async def _sweep_for(self, shard: Shard, pattern: str) -> None:
        if is_wildcard(pattern):
            # Also keys of subjects without messages, whose names are no longer known.
            for _ in range(2):
                await self._sweep(shard)

    async def _barrier(self, shard: Shard) -> None:
        """Wait until everything that was proposed for a shard before is applied."""
        await self._shard_log.command(shard.machine.shard_id, cmd.Remove("shredded"))

    async def reconcile(self) -> None:
        """Purge messages whose keys were destroyed in an erasure that did not complete."""
        now_s = asyncio.get_running_loop().time()
        left = {
            at: one
            for at, one in self._keys.remains.items()
            if at not in self._busy and not (at in self._stuck and self._is_damaged(one.shard_id))
        }
        if not left or now_s < self._retry_at_s:
            return
        try:
            # First: the write that destroyed these keys may itself have failed.
            await asyncio.to_thread(self._keys.destroy_again)
            for shard_id in {one.shard_id for one in left.values()}:
                slots = [at for at, one in left.items() if one.shard_id == shard_id]
                shard = self._shards.get(shard_id)
                # Without its stream, a key leaves no work: the messages went with the stream.
                if shard is not None and seals(shard):
                    if shard.damaged:
                        self._stuck.update(slots)
                        continue
                    await self._remove(shard, slots)
                await asyncio.to_thread(self._keys.finish, slots)
                self._stuck.difference_update(slots)
            self._backoff.succeeded()
        except (ApiError, OSError, SubjectKeysDamagedError) as error:
            if self._backoff.failed(str(error)):
                _log.warning("shredding_put_off", error=str(error))
            self._retry_at_s = now_s + self._backoff.pause_s

    def _is_damaged(self, shard_id: int) -> bool:
        shard = self._shards.get(shard_id)
        return shard is not None and bool(shard.damaged)

    async def _remove(self, shard: Shard, slots: list[int]) -> None:
        """Purge the subjects of the destroyed keys in ``slots``."""
        machine = shard.machine
        names = [name for _, name in machine.subjects.live()]
        # Subjects are known by their marks only, and a mark cannot be reversed. So all names of the
        # shard are compared, a batch at a time.
        for some in _batches(names):
            for below_seq, subject in self._keys.remains_of(machine.shard_id, some, slots):
                if below_seq:
                    await self._streams.removals.purge(
                        [shard], subject, below_seq, 0, shredded=True
                    )
            await asyncio.sleep(0)

    # Subjects without messages -------------------------------------------------------------------

    async def run(self) -> None:
        """Destroy unused keys, until cancelled."""
        backoff = Backoff(TICK_S, _RETRY_MAX_S)
        while True:
            await asyncio.sleep(max(TICK_S, backoff.pause_s))
            try:
                await self.tick()
                backoff.succeeded()
            except (ApiError, OSError, SubjectKeysDamagedError) as error:
                if backoff.failed(str(error)):
                    _log.warning("keys_not_swept", error=str(error))
            except Exception as error:
                # The node still serves, so this must not end it. The keys are destroyed later.
                if backoff.failed(repr(error)):
                    _log.exception("sweep_failed")

    async def tick(self, sweep_s: float = SWEEP_S) -> None:
        """Sweep shards with keys: each after removals only, and at most every ``sweep_s``."""
        await self.reconcile()
        for keys in (self._keys, self._shared):
            lacking = self._shared.lacking if keys is self._shared else {}
            for shard_id in sorted({*keys.live(), *lacking}):
                if self._streams.is_listed(shard_id) and shard_id in self._shards:
                    await self._sweep_if_due(self._shards[shard_id], sweep_s)
                elif self._is_gone(shard_id, keys):
                    await self._destroy_all(shard_id, keys)
                    self._swept.pop(shard_id, None)

    def _is_gone(self, shard_id: int, keys: SubjectKeys) -> bool:
        """Whether a shard, whose stream is not listed, is gone for good.

        A stream that is being created or restored is not listed yet, and its keys must stay.
        """
        # This node may have heard of the keys of a new stream before it hears of the stream.
        is_known = shard_id < self._streams.next_shard_id and shard_id not in self._shards
        alone = keys is self._keys
        return (alone or is_known) and shard_id not in self._streams.taken_shard_ids()

    async def _sweep_if_due(self, shard: Shard, sweep_s: float) -> None:
        # A snapshot reads messages that may be deleted by now, and opens them with their keys. It
        # is read where the stream is served.
        if self._snapshots.is_reading or not self._streams.serves(shard):
            return
        shard_id, counters = shard.machine.shard_id, shard.machine.counters
        now_s, gone = asyncio.get_running_loop().time(), counters.last_seq - counters.messages
        seen, at_s = self._swept.get(shard_id, (-1, now_s - sweep_s))
        # Subjects lose their last message only when messages are removed.
        if seen != gone and now_s - at_s >= sweep_s and not shard.damaged:
            more = await self._sweep(shard)
            self._swept[shard_id] = (-1 if more else gone, now_s)

    async def _sweep(self, shard: Shard) -> bool:
        """Destroy the keys of subjects that had no messages in the last sweep and have none now.

        Subjects that have none for the first time are only noted: messages sealed with their keys
        may not be applied yet. Returns whether there are any.
        """
        keys, shard_id = self._keys_of(shard), shard.machine.shard_id
        if keys is self._shared:
            await self._sweep_lacking(shard)
        if not keys.exists:
            return False
        noted = keys.condemned(keys.slots_of_shard(shard_id))
        if noted:
            # Everything that was sealed before the last sweep noted these keys is applied now, so a
            # subject that has messages shows them.
            await self._barrier(shard)
        idle = await self._idle(shard)
        # Asked again: a publish may have sealed with a noted key during the search.
        doomed = keys.condemned(idle.intersection(noted))
        idle.difference_update(doomed)
        keys.condemn(idle)
        if self._are_shared(shard) and doomed:
            # Another node may have sealed with one, if that leads the shard.
            term = await self._retire_by_all(shard, self._shared.ids_of(doomed))
            still = (await self._idle(shard)).intersection(doomed)
            await self._shred_by_all(shard, self._shared.ids_of(still), term)
        else:
            await self._destroy_here(doomed)
        return bool(idle)

    async def _idle(self, shard: Shard) -> set[int]:
        """The slots of a shard with keys of subjects that have no messages."""
        keys, shard_id = self._keys_of(shard), shard.machine.shard_id
        names = [name for _, name in shard.machine.subjects.live()]
        needed: set[int] = set()
        for some in _batches(names):
            needed |= keys.slots_of_subjects(shard_id, some)
            await asyncio.sleep(0)
        return set(keys.slots_of_shard(shard_id)) - needed

    async def _sweep_lacking(self, shard: Shard) -> None:
        """Shred the keys that this node lacks and that no message needs."""
        lacking = await self._wanted_marks(shard.machine.shard_id)
        unused = await self._unused(shard, lacking)
        if not unused:
            return
        # If one comes now and its subject is used again, that gets a new key.
        term = await self._retire_by_all(shard, sorted(unused))
        unused &= await self._unused(shard, lacking)
        await self._shred_by_all(shard, sorted(unused), term)

    async def _unused(self, shard: Shard, lacking: Mapping[int, bytes]) -> set[int]:
        """Those of the ids whose marks are those of no subject with messages."""
        if not lacking:
            return set()
        needed, shard_id = {b""}, shard.machine.shard_id  # of a row that is gone: it is shredded
        for some in _batches([name for _, name in shard.machine.subjects.live()]):
            needed.update(self._shared.mark_of(shard_id, name) for name in some)
            await asyncio.sleep(0)
        return {one for one, mark in lacking.items() if mark not in needed}

    async def _destroy_here(self, slots: list[int]) -> None:
        """Destroy keys of this node alone. Nothing remains to be purged."""
        if slots:
            self._keys.retire_slots(slots)
            await asyncio.to_thread(self._keys.destroy, slots, 0)
            await asyncio.to_thread(self._keys.finish, slots)

    async def _destroy_all(self, shard_id: int, keys: SubjectKeys) -> None:
        """Destroy the keys of a shard that is gone."""
        if keys is self._keys:
            await self._destroy_here(keys.slots_of_shard(shard_id))
        else:
            self._shared.forget(shard_id)
            await asyncio.to_thread(self._shared.destroy_doomed)


def _batches(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _TOGETHER):
        yield names[start : start + _TOGETHER]
