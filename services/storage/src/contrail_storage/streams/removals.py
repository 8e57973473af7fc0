"""Removes messages on request, and messages that a changed configuration no longer allows.

Messages of some subjects are removed in one pass: the leader finds them, in order, and ``Remove``
commands name them.
"""

import asyncio
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.deleted import PAGE
from contrail_storage.core.facts import oldest_in
from contrail_storage.core.results import Removed
from contrail_storage.core.stream.removal.limits import excess_by_slot
from contrail_storage.reading.reader import Pick, Reader
from contrail_storage.reading.subject_search import NOTHING, Choose, Found, search
from contrail_storage.replica.shard import Shard, check_removal
from contrail_storage.replica.shard_logs import ShardLog
from contrail_storage.streams.outcomes import begun, expect
from contrail_storage.streams.sharded_state import check_purge

_SLICE_MESSAGES: Final = 20_000
_SLICE_SUBJECTS: Final = 1_024
_CHECKED_MAX: Final = 320_000
"""Messages that are checked while a caller waits; the housekeeper does the rest."""
_PASSES_MAX: Final = 16
"""Passes for lowered limits while a caller waits; messages may arrive during each."""
NAMED_MAX: Final = 1_024
"""Messages that one command names."""
PAGES_MAX: Final = 128
"""Pages of deleted sequences that one command changes."""
_EVERYTHING: Final = 1 << 62


def slice_messages(shard: Shard) -> int:
    """Messages that one command removes from the head, or checks.

    Removing the last message of a subject costs much more than removing one of many.
    """
    many = len(shard.machine.subjects) > _SLICE_SUBJECTS
    return _SLICE_SUBJECTS if many else _SLICE_MESSAGES


class Removals:
    """Proposes removals for shards, in slices that each take a short time to apply."""

    def __init__(self, shard_log: ShardLog, reader: Reader) -> None:
        self._shard_log = shard_log
        # Finds the messages to remove.
        self._reader = reader

    # By request ----------------------------------------------------------------------------------

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
            if not shredded and subject in ("", ">"):
                return await self._in_slices(shard, cmd.Trim(to_seq, slice_messages(shard), keep))
            # Messages that are stored while the purge runs stay, and so do the newest as of now.
            low_seq, end_seq, matches = await self._matching(shard, subject)
            end_seq = min(end_seq, to_seq, shard.applied_seq + 1)
            if keep:
                end_seq = await self._reader.newest_below(shard, end_seq, low_seq, matches, keep)
            removed = await self._remove(
                shard,
                "shredded" if shredded else "purge",
                lambda _, sids: np.flatnonzero(matches(sids)),
                low_seq,
                end_seq,
            )
        shard.notify()  # a consumer whose pending messages were removed can take more
        return removed

    async def _matching(self, shard: Shard, pattern: str) -> tuple[int, int, Pick]:
        """The sequences with messages that match now (from, and up to), and which numbers match."""
        wanted = await self._reader.filter_of(shard, (pattern or ">",))
        table, counters = shard.machine.subjects, shard.machine.counters
        matches = wanted.lookup(table).select
        if not wanted.literal:
            return counters.first_seq, counters.last_seq + 1, matches
        sid = table.ids.get(pattern)
        if sid is None:
            return 0, 0, matches
        return int(table.first[table.numbered.slot(sid)]), table.last_of(sid) + 1, matches

    async def _in_slices(self, shard: Shard, command: cmd.StreamCommand) -> int:
        """Propose a command until nothing is left; return how many messages it removed."""
        removed = 0
        while True:
            with begun(removed > 0):
                done = await self._shard_log.command(shard.machine.shard_id, command)
                result = expect(done, Removed)
            removed += result.count
            # Each slice is applied by itself, so publishes and acks continue in between.
            if not result.more:
                return removed

    async def _remove(
        self,
        shard: Shard,
        reason: cmd.RemovalReason,
        choose: Choose,
        low_seq: int,
        end_seq: int,
        finished: dict[str, int] | None = None,
    ) -> int:
        """Remove the chosen messages from ``low_seq`` up to ``end_seq``; return how many.

        ``finished`` are roll-ups that have nothing left to remove then.
        """
        removed = 0

        async def propose(messages: Found, finished: dict[str, int] | None = None) -> None:
            nonlocal removed
            command = cmd.Remove.of(reason, messages.seqs, messages.sids, messages.sizes)
            command.finished = finished or {}
            done = await self._shard_log.command(shard.machine.shard_id, command)
            removed += expect(done, Removed).count

        left = NOTHING
        try:
            async for found in search(self._reader, shard, choose, low_seq, end_seq):
                left = left.followed_by(found)
                while (count := _together(left.seqs)) < len(left):
                    await propose(left.part(0, count))
                    left = left.part(count)
            # Also without any message: the stream may have to refuse the purge.
            await propose(left, finished)
        except ApiError as error:
            if removed:
                raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
            raise
        return removed

    async def delete(self, shard: Shard, seq: int) -> None:
        """Remove one message (SEQUENCE_NOT_FOUND, DELETE_DENIED, STREAM_SEALED)."""
        check_removal(shard)
        if not shard.machine.is_live(seq) or seq > shard.applied_seq:
            raise ApiError(errors.SEQUENCE_NOT_FOUND, f"sequence {seq} not found", applied=False)
        command = cmd.DeleteMessage(seq)
        expect(await self._shard_log.command(shard.machine.shard_id, command), Removed)
        # If the message was pending at a consumer, the consumer can take another one.
        shard.notify()

    async def enforce_interest(self, shard: Shard) -> None:
        """Remove messages that no consumer needs, in slices.

        The housekeeper continues with what is left, and with what was interrupted.
        """
        for _ in range(_CHECKED_MAX // slice_messages(shard)):
            if not (shard.machine.exists and shard.machine.pending_recheck):
                return
            command = cmd.EnforceInterest(slice_messages(shard))
            expect(await self._shard_log.command(shard.machine.shard_id, command), Removed)

    async def enforce_limits(self, shard: Shard) -> None:
        """Apply lowered limits at once; the housekeeper continues with what is left."""
        for _ in range(_PASSES_MAX):
            if not await self.trim_to_limits(shard):
                return

    async def trim_to_limits(self, shard: Shard) -> bool:
        """Remove the messages over the limits now; True if there are others by then."""
        # The oldest of the stream first: a subject may have fewer messages then.
        await self._in_slices(shard, cmd.EnforceLimits(slice_messages(shard)))
        async with shard.removal:  # another one may remove the same messages now
            if shard.machine.subjects_over:
                await self._remove_excess(shard)
                # Finds out whether a subject is still over its limit.
                await self._shard_log.command(shard.machine.shard_id, cmd.EnforceLimits(0))
        return shard.machine.exists and shard.machine.over_limits

    async def _remove_excess(self, shard: Shard) -> None:
        """Remove the oldest messages of the subjects that have too many now."""
        table = shard.machine.subjects
        slots, excess = excess_by_slot(shard.machine)
        low_seq = int(table.first[slots].min(initial=_EVERYTHING))
        sids, end_seq = table.numbered.numbers(slots), shard.applied_seq + 1
        choose = await asyncio.to_thread(_excess, sids, excess)
        await self._remove(shard, "limit", choose, low_seq, end_seq)

    async def finish_rollups(self, shard: Shard) -> None:
        """Remove the messages that roll-ups replaced and could not remove themselves."""
        table, end_seq = shard.machine.subjects, shard.applied_seq + 1
        replaced = {
            subject: to_seq
            for subject, to_seq in shard.machine.counters.replaced.items()
            if to_seq <= end_seq
        }
        below = {
            sid: replaced[name] for name in replaced if (sid := table.ids.get(name)) is not None
        }
        sids = np.array(sorted(below), np.int64)
        to_seqs = np.array([below[sid] for sid in sids.tolist()], np.int64)

        def choose(seqs: I64Array, found: U32Array) -> NDArray[np.intp]:
            owner = np.minimum(np.searchsorted(sids, found), len(sids) - 1)
            return np.flatnonzero((sids[owner] == found) & (seqs < to_seqs[owner]))

        low_seq = int(table.first[table.numbered.slots(sids)].min(initial=_EVERYTHING))
        await self._remove(shard, "rollup", choose, low_seq, int(to_seqs.max(initial=0)), replaced)


def _together(seqs: I64Array) -> int:
    """How many of ``seqs`` (ascending) one command takes."""
    pages = seqs[:NAMED_MAX] // PAGE
    begins = np.flatnonzero(pages[1:] != pages[:-1]) + 1
    return int(begins[PAGES_MAX - 1]) if len(begins) >= PAGES_MAX else len(pages)


def _excess(sids: I64Array, excess: I64Array) -> Choose:
    """Chooses the oldest ``excess`` messages of each of ``sids``."""
    order = np.argsort(sids)
    own, left = sids[order].astype(np.uint32), excess[order]

    def choose(_: I64Array, found: U32Array) -> NDArray[np.intp] | None:
        return oldest_in(found, None, own, left, len(found)) if left.any() else None

    return choose
