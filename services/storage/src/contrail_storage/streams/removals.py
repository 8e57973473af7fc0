"""Removes messages on request, and messages that a changed configuration no longer allows."""

from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Removed
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard, check_removal
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.streams.outcomes import begun, expect
from contrail_storage.streams.sharded_state import check_purge

_SLICE_MESSAGES: Final = 20_000
_SLICES_MAX: Final = 16
"""Slices of removals that a caller waits for; the housekeeper does the rest."""
_PURGED_SUBJECTS: Final = 256
_EVERYTHING: Final = 1 << 62


class Removals:
    """Proposes removals for shards, in slices that each take a short time to apply."""

    def __init__(self, shard_log: ShardLog, reader: Reader) -> None:
        self._shard_log = shard_log
        # Finds the messages that purges and deletes need to know.
        self._reader = reader

    async def purge(
        self,
        shards: list[Shard],
        subject: str,
        up_to_seq: int,
        keep: int,
        *,
        shredded: bool = False,
    ) -> int:
        """Remove messages below a sequence, all but the newest, or all; in slices.

        The stream of ``shards`` may be gone (STREAM_NOT_FOUND), and its name used by another one.
        ``shredded``: the messages can no longer be decrypted, so no rule keeps them.
        """
        if not all(shard.machine.exists for shard in shards):
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        # Sequences and `keep` belong to one shard.
        if len(shards) > 1:
            shards = check_purge(shards, subject, up_to_seq, keep)
        removed = 0
        for shard in shards:
            with begun(removed > 0):
                removed += await self._purge(shard, subject, up_to_seq, keep, shredded=shredded)
        return removed

    async def _purge(
        self, shard: Shard, subject: str, up_to_seq: int, keep: int, *, shredded: bool
    ) -> int:
        async with shard.removal:
            to_seq = up_to_seq or _EVERYTHING
            if shredded or subject not in ("", ">"):
                subjects = SubjectFilter((subject or ">",))
                purge = cmd.PurgeSubjects([], to_seq, _SLICE_MESSAGES, keep, shredded)
                return await self._purge_subjects(shard, subjects, purge)
            trim = cmd.Trim(to_seq, _SLICE_MESSAGES, keep)
            return await self._in_slices(shard, trim)

    async def _in_slices(self, shard: Shard, command: cmd.StreamCommand, removed: int = 0) -> int:
        """Propose a command until nothing is left; return ``removed`` plus what it removed."""
        while True:
            with begun(removed > 0):
                done = await self._shard_log.command(shard.machine.shard_id, command)
                result = expect(done, Removed)
            removed += result.count
            # Each slice is applied by itself, so publishes and acks continue in between.
            if not result.more:
                return removed

    async def _purge_subjects(
        self, shard: Shard, subjects: SubjectFilter, purge: cmd.PurgeSubjects
    ) -> int:
        """Purge matching messages, some subjects at a time."""
        names = [name for _, name in subjects.subjects(shard.machine.subjects)]
        if purge.keep and len(names) > _PURGED_SUBJECTS:
            # No single command knows all these subjects, so the newest as of now are kept.
            to_seq = await self._reader.newest_from(shard, subjects, purge.keep)
            purge = msgspec.structs.replace(purge, to_seq=to_seq, keep=0)
        removed = 0
        for start in range(0, max(len(names), 1), _PURGED_SUBJECTS):
            some = names[start : start + _PURGED_SUBJECTS]
            command = msgspec.structs.replace(purge, subjects=some)
            removed = await self._in_slices(shard, command, removed)
        shard.notify()  # a consumer whose pending messages were removed can take more
        return removed

    async def delete(self, shard: Shard, seq: int) -> None:
        """Remove one message (SEQUENCE_NOT_FOUND, DELETE_DENIED, STREAM_SEALED)."""
        check_removal(shard)
        async with shard.removal:
            if not shard.machine.is_live(seq) or seq > shard.applied_seq:
                raise ApiError(
                    errors.SEQUENCE_NOT_FOUND, f"sequence {seq} not found", applied=False
                )
            previous_seq = await self._reader.previous_of_subject(shard, seq)
            command = cmd.DeleteMessage(seq, previous_seq)
            expect(await self._shard_log.command(shard.machine.shard_id, command), Removed)
        # If the message was pending at a consumer, the consumer can take another one.
        shard.notify()

    async def enforce_interest(self, shard: Shard) -> None:
        """Remove messages that no consumer needs, in up to 16 slices.

        The housekeeper continues with what is left, and with what was interrupted.
        """
        for _ in range(_SLICES_MAX):
            if not (shard.machine.exists and shard.machine.pending_recheck):
                return
            await self._recheck_slice(shard)

    async def settle_last(self, shard: Shard) -> None:
        """Find the last messages of the subjects whose last message was removed."""
        while shard.machine.subjects.unsettled:
            await self._recheck_slice(shard)

    async def _recheck_slice(self, shard: Shard) -> None:
        command = cmd.EnforceInterest(_SLICE_MESSAGES)
        expect(await self._shard_log.command(shard.machine.shard_id, command), Removed)

    async def enforce_limits(self, shard: Shard) -> None:
        """Apply lowered limits at once: trim in slices until they hold."""
        machine = shard.machine
        while machine.exists:
            command = cmd.EnforceLimits(_SLICE_MESSAGES)
            result = expect(await self._shard_log.command(machine.shard_id, command), Removed)
            if not result.more:
                return
