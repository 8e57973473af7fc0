"""The start of a new consumer, on the only shard of a stream or on each of several."""

from collections.abc import Sequence

import numpy as np

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import ConsumerConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.pinned import SUBJECTS_MAX, Pinned
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.shard import Shard
from contrail_storage.streams.sharded_state import own_cursor


class Starts:
    """Makes the commands that create a consumer at its start."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def creation(self, shard: Shard, config: ConsumerConfig) -> cmd.PutConsumer:
        """Return the command that creates a consumer of a shard."""
        if config.deliver_policy == "last_per_subject":
            return await self._pinned(shard, config)
        return cmd.PutConsumer(config, await self._start_seq(shard, config))

    async def creations(
        self, shards: Sequence[Shard], config: ConsumerConfig
    ) -> list[cmd.PutConsumer]:
        """Return the command for each of several shards."""
        if config.opt_start_cursor:
            cursor = own_cursor(config.opt_start_cursor, shards)
            first = [shard.machine.counters.first_seq for shard in shards]
            starts = [max(pair) for pair in zip(cursor.next_seqs, first, strict=True)]
            return [cmd.PutConsumer(config, start_seq) for start_seq in starts]
        if config.deliver_policy == "by_start_sequence":
            message = (
                "a sequence belongs to a single shard; start by time, or with "
                "deliver_policy all, last or new"
            )
            problem = FieldProblem("/opt_start_seq", message)
            raise ApiError(errors.SHARDED_UNSUPPORTED, message, [problem], applied=False)
        if config.deliver_policy != "last":
            return [await self.creation(shard, config) for shard in shards]
        # The newest message in the order of reads. On the other shards, the consumer starts after
        # the last message.
        newest = [await self._newest(shard, config) for shard in shards]
        at = max(range(len(shards)), key=lambda one: (newest[one][0], one))
        starts = [newest[one][1] if one == at else 0 for one in range(len(shards))]
        return [cmd.PutConsumer(config, start_seq) for start_seq in starts]

    async def _start_seq(self, shard: Shard, config: ConsumerConfig) -> int:
        """The start sequence of a consumer; 0 means after the last message at the apply."""
        first_seq = shard.machine.counters.first_seq
        match config.deliver_policy:
            case "all":
                return first_seq
            case "by_start_sequence":
                return max(config.opt_start_seq, first_seq)
            case "by_start_time":
                return await self._reader.seq_of_time(shard, config.opt_start_time_ns)
            case "last":
                return await self._last_seq(shard, config)
            case _:
                return 0

    async def _pinned(self, shard: Shard, config: ConsumerConfig) -> cmd.PutConsumer:
        """Return the command that creates a consumer of the last messages as of now."""
        wanted = await self._reader.filter_of(shard, config.filter_subjects)
        table = shard.machine.subjects
        slots = wanted.slots(table)
        if len(slots) > SUBJECTS_MAX:
            message = (
                f"matches {len(slots)} subjects; last_per_subject allows at most {SUBJECTS_MAX}"
            )
            raise ApiError(
                errors.START_INVALID,
                f"filter_subjects: {message}",
                [FieldProblem("/filter_subjects", message)],
                applied=False,
            )
        end_seq = shard.machine.counters.last_seq + 1
        sids = np.sort(table.numbered.numbers(slots).astype(np.uint32))
        seqs = await self._reader.newest.find(shard, sids)
        # A message that came during the search is delivered as others after the list.
        order = np.argsort(seqs)
        order = order[(seqs[order] > 0) & (seqs[order] < end_seq)]
        if not len(order):
            return cmd.PutConsumer(config, end_seq)
        pinned = Pinned(seqs[order], sids[order], end_seq)
        return cmd.PutConsumer(config, int(pinned.seqs[0]), pinned.encode(), end_seq)

    async def _newest(self, shard: Shard, config: ConsumerConfig) -> tuple[int, int]:
        """Time and sequence of the newest matching message; (0, 0) when there is none."""
        seq = await self._last_seq(shard, config)
        block = await self._reader.block_at(shard, seq) if seq else None
        if block is None or not block.base_seq <= seq <= block.last_seq:
            return 0, 0
        return int(block.times_ns[seq - block.base_seq]), seq

    async def _last_seq(self, shard: Shard, config: ConsumerConfig) -> int:
        """Sequence of the last message that the filters match; 0 when there is none."""
        wanted = await self._reader.filter_of(shard, config.filter_subjects)
        table = shard.machine.subjects
        last_seq = int(table.last[wanted.slots(table)].max(initial=0))
        if not last_seq or shard.machine.is_live(last_seq):
            return last_seq
        return await self._reader.last_match(shard, wanted, last_seq)
