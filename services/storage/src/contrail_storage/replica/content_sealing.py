"""Seals publishes to streams with subject keys before they are logged, and keeps their order.

A publish to a subject without a key waits for the key, and so do all later publishes to its shard.
The keys of all waiting publishes are made together, with one fsync.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Mapping
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

    log: Proposer
    batch: MessageBatch
    size: int
    done: Done


class SealingLog:
    """Accepts publishes as a `Proposer` does, for shards whose messages are sealed."""

    def __init__(
        self, proposers: Mapping[int, Proposer], keys: SubjectKeys, shards: Mapping[int, Shard]
    ) -> None:
        # By group; a shard's messages are proposed to its group.
        self._proposers = proposers
        self._keys = keys
        self._shards = shards
        # By shard: publishes without a key, and those after them. A present queue is not empty.
        self._waiting: dict[int, deque[_Waiting]] = {}
        # Runs `_make_keys`; None when nothing waits.
        self._making: asyncio.Task[None] | None = None

    def append(self, shard_id: int, content: Content, done: Done) -> None:
        """Seal and propose messages as `Proposer.append` does."""
        batch = content if isinstance(content, MessageBatch) else MessageBatch.of([content])
        log = self._log_of(shard_id)
        if shard_id not in self._waiting:
            sealed = self._sealed(shard_id, batch)
            if sealed is not None:
                log.append(shard_id, sealed, done)
                return
        size = batch.size()
        # Counted against the queue already: otherwise waiting publishes could take any memory.
        log.hold(size)
        self._waiting.setdefault(shard_id, deque()).append(_Waiting(log, batch, size, done))
        if self._making is None:
            self._making = asyncio.ensure_future(self._make_keys())

    def _log_of(self, shard_id: int) -> Proposer:
        """The log of a shard (STREAM_NOT_FOUND)."""
        target = self._shards.get(shard_id)
        if target is None:
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        return self._proposers[target.group]

    def _sealed(self, shard_id: int, batch: MessageBatch) -> MessageBatch | None:
        """Seal the content of ``batch``; None when one of its subjects has no key."""
        target = self._shards.get(shard_id)
        if target is None or not seals(target):
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        keys: list[SubjectKey] = []
        for subject in batch.subjects:
            key = self._key(shard_id, subject)
            if key is None:
                return None
            keys.append(key)
        columns, ttls = raised_ttls(target.machine.config, batch.columns, batch.ttls)
        sealed = seal_columns(columns, as_u32(batch.subject_index).tolist(), keys)
        return msgspec.structs.replace(batch, columns=sealed, ttls=ttls)

    def _key(self, shard_id: int, subject: str) -> SubjectKey | None:
        try:
            return self._keys.sealing(shard_id, subject) if self._keys.exists else None
        except SubjectKeysDamagedError as error:
            raise ApiError(errors.DATA_LOST, str(error), applied=False) from error

    async def _make_keys(self) -> None:
        """Make the missing keys and log the waiting publishes, until none waits."""
        while self._waiting:
            wanted = dict.fromkeys(
                (shard_id, subject)
                for shard_id, waiting in self._waiting.items()
                for one in waiting
                for subject in one.batch.subjects
            )
            problem: ApiError | None = None
            try:
                await asyncio.to_thread(self._keys.make, wanted)
            except UNMADE as error:
                _log.warning("subject_keys_not_made", error=str(error))
                problem = refusal(error)
            except Exception as error:
                # An unexpected error must not leave callers waiting for ever.
                _log.exception("subject_keys_failed")
                problem = ApiError(errors.INTERNAL, repr(error), applied=False)
            for shard_id in list(self._waiting):
                self._go_on(shard_id, problem)
        self._making = None

    def _go_on(self, shard_id: int, problem: ApiError | None) -> None:
        """Log a shard's publishes up to the first without a key; a ``problem`` refuses that one."""
        waiting = self._waiting[shard_id]
        while waiting:
            one = waiting[0]
            refused = problem
            try:
                sealed = self._sealed(shard_id, one.batch)
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
