"""One stream at run time: what a request works with once it has asked which stream it is for.

A `Stream` refers to the `Shard` objects that the applier keeps. Whatever changes in a shard (its
machine is loaded again, it is damaged, its stream is removed) is therefore seen here at once. Only
`StreamManager.stream` makes these objects; it decides whether a known one is still the right one.
"""

from typing import Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig, StreamInfo, StreamState
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.meta_machine import StreamEntry
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import UNREADABLE
from contrail_storage.streams.sharded_state import (
    no_such_shard,
    shard_needed,
    sum_losses,
    sum_states,
)


class CheckServing(Protocol):
    """See `StorageNode.check_serving`."""

    def __call__(self, *, volatile: bool = False) -> None:
        """Raise ApiError while changes are refused."""
        ...


class Stream:
    """A listed stream with its one or more shards. Used on the event loop only."""

    __slots__ = ("_check_serving", "entry", "in_memory", "leader", "shards")

    def __init__(
        self,
        entry: StreamEntry,
        shards: list[Shard],
        leader: str,
        check_serving: CheckServing,
    ) -> None:
        self.entry = entry
        """What the meta machine knows of it. Replaced when its subjects change."""
        self.shards = shards
        """All shards, in order of their numbers; never replaced."""
        self.in_memory = is_volatile(entry.shard)
        """Whether the messages are kept only in memory."""
        self.leader = leader
        """Name of the node that serves it."""
        self._check_serving = check_serving

    @property
    def exists(self) -> bool:
        """False once the removal of the stream has begun. The first shard decides."""
        return self.shards[0].machine.record is not None

    @property
    def name(self) -> str:
        """The name under which it is listed."""
        return self.entry.name

    @property
    def config(self) -> StreamConfig:
        """The current configuration (STREAM_NOT_FOUND once the stream is removed)."""
        return self.shards[0].config

    def shard(self, number: int | None = None) -> Shard:
        """The shard with that number, damaged or not; INVALID_FIELD if there is none.

        The number may be left out (None) for a stream with one shard.
        """
        count = len(self.shards)
        if number is None:
            if count > 1:
                raise shard_needed(count)
            return self.shards[0]
        if not 0 <= number < count:
            raise no_such_shard(count)
        return self.shards[number]

    def sound_shard(self, number: int | None = None) -> Shard:
        """As :meth:`shard`; DATA_LOST if it is damaged."""
        return sound(self.shard(number))

    def sound_shards(self, number: int | None = None) -> list[Shard]:
        """All shards, or the one with that number; DATA_LOST if one of them is damaged."""
        return [sound(one) for one in (self.shards if number is None else [self.shard(number)])]

    def check_writable(self) -> None:
        """Raise ApiError while the stream accepts no changes."""
        self._check_serving(volatile=self.in_memory)

    def info(self, *, damaged: bool = False) -> StreamInfo:
        """Configuration and state.

        Raises DATA_LOST when a first message cannot be read. With ``damaged``, a damaged stream is
        shown with what is known, without the time of its first message.
        """
        record = self.shards[0].machine.record
        assert record is not None
        states = [shard_state(shard, damaged=damaged) for shard in self.shards]
        several = len(states) > 1
        losses = [shard.machine.loss for shard in self.shards]
        return StreamInfo(
            config=record.config,
            created_ns=record.created_ns,
            state=sum_states(states) if several else states[0],
            shards=states if several else [],
            incarnation=record.incarnation,
            version=record.version,
            leader=self.leader,
            durability=self.shards[0].durability,
            data_loss=sum_losses(losses) if several else losses[0],
        )


def sound(shard: Shard) -> Shard:
    """Return ``shard`` unless it is damaged (DATA_LOST)."""
    if shard.damaged:
        raise ApiError(errors.DATA_LOST, shard.damaged, applied=False)
    return shard


def shard_state(shard: Shard, *, damaged: bool = False) -> StreamState:
    """State of a shard that exists; see :meth:`Stream.info`."""
    try:
        return shard.machine.state(timed=not (damaged and shard.damaged))
    except UNREADABLE as error:
        shard.damaged = f"the first message cannot be read back: {error}"
        if not damaged:
            raise ApiError(errors.DATA_LOST, shard.damaged) from error
        return shard.machine.state(timed=False)
