"""Seals publishes to streams with subject keys before they are logged, and keeps their order.

A publish to a subject without a key waits for the key, and so do all later publishes to its shard.
The keys of all waiting publishes of a group are made together, with one fsync.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.texts import as_u32
from contrail_storage.core.stream.ttl import raised_ttls
from contrail_storage.replica.entries import Content, Done, not_logged
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.content import seal_columns
from contrail_storage.seal.key_file import SubjectKeysDamagedError
from contrail_storage.seal.shared_keys import SharedKeys
from contrail_storage.seal.subject_keys import SubjectKey, SubjectKeys, SubjectKeysFullError

_log = structlog.get_logger("contrail.subject_keys")
UNMADE: Final = (OSError, SubjectKeysFullError, SubjectKeysDamagedError)


def seals(shard: Shard | None) -> bool:
    """Whether a shard's messages are sealed with keys of their subjects."""
    record = shard.machine.record if shard is not None else None
    return record is not None and record.config.erasure == "subject_key"


@dataclass(slots=True, eq=False)
class _Waiting:
    """A batch whose subjects lack keys, or that is queued after such a batch."""

    group: int
    log: Proposer
    batch: MessageBatch
    size: int
    done: Done


@dataclass(slots=True, frozen=True)
class KeyMakers:
    """Where the keys of shards are, and what makes them.

    ``alone`` has those of groups of one, ``shared`` those that a group's members have. ``share``
    makes keys of a group that they have, for the (shard, subject) pairs without one.
    """

    alone: SubjectKeys
    shared: SharedKeys
    share: Callable[[int, Iterable[tuple[int, str]]], Awaitable[None]]

    def keys_of(self, log: Proposer) -> SubjectKeys:
        """The keys of the shards of a group, by its log."""
        return self.alone if log.group.is_alone else self.shared

    async def make(self, group: int, log: Proposer, wanted: Iterable[tuple[int, str]]) -> None:
        """Make the keys that the (shard, subject) pairs lack. Raises ApiError, and `UNMADE`."""
        if log.group.is_alone:
            await asyncio.to_thread(self.alone.make, wanted)
        else:
            await self.share(group, wanted)


class SealingLog:
    """Accepts publishes as a `Proposer` does, for shards whose messages are sealed."""

    def __init__(
        self, proposers: Mapping[int, Proposer], makers: KeyMakers, shards: Mapping[int, Shard]
    ) -> None:
        # By group; a shard's messages are proposed to its group.
        self._proposers = proposers
        self._makers = makers
        self._shards = shards
        # By shard: publishes without a key, and those after them. A present queue is not empty.
        self._waiting: dict[int, deque[_Waiting]] = {}
        # By group: runs `_make_keys` while something waits.
        self._making: dict[int, asyncio.Task[None]] = {}

    def append(self, shard_id: int, content: Content, done: Done) -> None:
        """Seal and propose messages as `Proposer.append` does."""
        batch = content if isinstance(content, MessageBatch) else MessageBatch.of([content])
        group = self._group_of(shard_id)
        log = self._proposers[group]
        if shard_id not in self._waiting:
            sealed = self._sealed(shard_id, log, batch)
            if sealed is not None:
                log.append(shard_id, sealed, done)
                return
        size = batch.size()
        # Counted against the queue already: otherwise waiting publishes could take any memory.
        log.hold(size)
        waiting = self._waiting.setdefault(shard_id, deque())
        waiting.append(_Waiting(group, log, batch, size, done))
        if group not in self._making:
            self._making[group] = asyncio.ensure_future(self._make_keys(group, log))

    def _group_of(self, shard_id: int) -> int:
        """The group of a shard (STREAM_NOT_FOUND)."""
        target = self._shards.get(shard_id)
        if target is None:
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        return target.group

    def _sealed(self, shard_id: int, log: Proposer, batch: MessageBatch) -> MessageBatch | None:
        """Seal the content of ``batch``; None when one of its subjects has no key."""
        target = self._shards.get(shard_id)
        if target is None or not seals(target):
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        known = self._makers.keys_of(log)
        keys: list[SubjectKey] = []
        for subject in batch.subjects:
            key = _key(known, shard_id, subject)
            if key is None:
                return None
            keys.append(key)
        columns, ttls = raised_ttls(target.machine.config, batch.columns, batch.ttls)
        sealed = seal_columns(columns, as_u32(batch.subject_index).tolist(), keys)
        return msgspec.structs.replace(batch, columns=sealed, ttls=ttls)

    async def _make_keys(self, group: int, log: Proposer) -> None:
        """Make the missing keys of a group and log its waiting publishes, until none waits."""
        while shard_ids := [at for at, one in self._waiting.items() if one[0].group == group]:
            wanted = dict.fromkeys(
                (shard_id, subject)
                for shard_id in shard_ids
                for one in self._waiting[shard_id]
                for subject in one.batch.subjects
            )
            problem: ApiError | None = None
            try:
                await self._makers.make(group, log, wanted)
            except ApiError as error:
                problem = error
            except UNMADE as error:
                _log.warning("subject_keys_not_made", error=str(error))
                problem = refusal(error)
            except Exception as error:
                # An unexpected error must not leave callers waiting for ever.
                _log.exception("subject_keys_failed")
                problem = ApiError(errors.INTERNAL, repr(error), applied=False)
            for shard_id in shard_ids:
                self._go_on(shard_id, problem)
        del self._making[group]

    def _go_on(self, shard_id: int, problem: ApiError | None) -> None:
        """Log a shard's publishes up to the first without a key; a ``problem`` refuses that one."""
        waiting = self._waiting[shard_id]
        while waiting:
            one = waiting[0]
            refused = problem
            try:
                sealed = self._sealed(shard_id, one.log, one.batch)
            except ApiError as error:
                sealed, refused = None, error
            except Exception as error:
                _log.exception("messages_not_sealed")
                sealed, refused = None, not_logged(f"the messages cannot be encrypted: {error!r}")
            if sealed is None and refused is None:
                return
            waiting.popleft()
            one.log.hold(-one.size)
            if sealed is None:
                assert refused is not None
                one.done(refused)
                continue
            try:
                one.log.append(shard_id, sealed, one.done)
            except ApiError as error:
                one.done(error)
        del self._waiting[shard_id]


def _key(keys: SubjectKeys, shard_id: int, subject: str) -> SubjectKey | None:
    try:
        return keys.sealing(shard_id, subject) if keys.exists else None
    except SubjectKeysDamagedError as error:
        raise ApiError(errors.DATA_LOST, str(error), applied=False) from error


def refusal(error: Exception) -> ApiError:
    """The error for publishes whose keys could not be created; nothing was stored."""
    spec = errors.STORAGE_FAILED
    if isinstance(error, SubjectKeysFullError):
        spec = errors.SUBJECT_KEYS_FULL
    elif isinstance(error, SubjectKeysDamagedError):
        spec = errors.DATA_LOST
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        spec = errors.STORAGE_FULL
    return ApiError(spec, str(error), retry_after_s=1, applied=False)
