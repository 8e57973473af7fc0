"""The leader's side: the state of a group as of one moment, read while the group goes on.

All rows of an entry and its applied index are one batch of the store. So a view of the store is the
exact state at the index in it, however long reading takes.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from contrail_common import errors
from contrail_common.columns.blocks import BlockCorruptError, view_block
from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import entry_of
from contrail_storage.disk.whole_steps import whole
from contrail_storage.state.messages import Opened
from contrail_storage.state.rows import Row, packed, prefixes, shards_of
from contrail_storage.store.block_codecs import BLOCK_CODECS
from contrail_storage.store.rocks_store import StoreView
from contrail_storage.store.sealed_store import SealedView, Store
from contrail_storage.store.store_errors import StoreCorruptError, StoreError
from contrail_storage.wal.node_log import NodeLog

OPEN_MAX: Final = 4
"""States that are read at once. Each keeps files of the store, and part of the log."""
_KEPT: Final = 8
"""Pieces that are sent again if their answer was lost."""
IDLE_S: Final = 60.0
LASTING_S: Final = 1_800.0
View = StoreView | SealedView
_log = structlog.get_logger("contrail.state")


class BlockRange(NamedTuple):
    """Blocks of a shard, by their first sequences."""

    shard_id: int
    low_seq: int
    end_seq: int


@dataclass(slots=True)
class SourceCounts:
    """For metrics."""

    opened: int = 0
    sent_bytes: int = 0


@dataclass(slots=True, eq=False)
class _State:
    """A state that a member reads."""

    group: int
    member: str
    # Whether it is all of the group, and not a few blocks.
    whole: bool
    # Closes the view; only under `reading`, since a thread may use it.
    closing: ExitStack
    pieces: Iterator[bytes]
    begun_s: float
    used_s: float
    # The number of the next piece, and the last ones, by number.
    next: int = 0
    kept: dict[int, bytes] = field(default_factory=dict)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


class StateSource:
    """The states that other members read from this node. Used on the event loop."""

    def __init__(
        self,
        store: Store,
        log: NodeLog,
        until_applied: Callable[[int], Awaitable[None]],
        on_damage: Callable[[int, str], None],
        counts: SourceCounts,
    ) -> None:
        """``until_applied`` waits until the store has all that a group has applied.

        ``on_damage`` learns of a group whose state cannot be read, and why.
        """
        self.counts = counts
        self._store = store
        # Keeps the entries after the states.
        self._node_log = log
        self._until_applied = until_applied
        self._on_damage = on_damage
        self._numbers = itertools.count(1)
        # By number.
        self._states: dict[int, _State] = {}
        # The index that each state has at least, by number; for the log.
        self._held: dict[int, tuple[int, int]] = {}

    async def open(self, group: int, member: str, blocks: BlockRange | None = None) -> Opened:
        """Begin to read the state of a group for a member, from now on (OVERLOADED, DATA_LOST).

        With ``blocks``, only these.
        """
        for number, state in list(self._states.items()):
            if (state.group, state.member) == (group, member):
                await self._end(number)
        if len(self._held) >= OPEN_MAX:
            raise _overloaded("too many nodes are fetching states")
        number = next(self._numbers)
        # Before the view: what the log still has now follows any later state.
        self._hold(number, group, self._node_log.base_index(group))
        try:
            await self._until_applied(group)
            with self._heeding_damage(group, whole=blocks is None):
                state, applied = await whole(lambda: self._view(group, member, blocks))
        except BaseException:
            self._let_go(number)
            raise
        index, _ = entry_of(applied)
        self._hold(number, group, index)
        state.begun_s = state.used_s = asyncio.get_running_loop().time()
        self._states[number] = state
        self.counts.opened += 1
        if blocks is None:
            _log.info("state_read", group=group, member=member, index=index)
        return Opened(number, applied)

    def _view(self, group: int, member: str, blocks: BlockRange | None) -> tuple[_State, bytes]:
        """Open a view. Blocks."""
        with ExitStack() as closing:
            opening: AbstractContextManager[View] = self._store.view()
            view = closing.enter_context(opening)
            key = keys.shard_key(keys.APPLIED, group)
            applied = next((row for _, row in view.scan(key, keys.prefix_end(key))), b"")
            if not applied:
                raise _overloaded("the group has no state yet")
            if blocks is None:
                homes = keys.GROUP, keys.prefix_end(keys.GROUP)
                shard_ids = [] if group == keys.META_GROUP else shards_of(group, view.scan(*homes))
                rows = _rows(view, group, shard_ids)
            else:
                rows = _blocks(view, blocks)
            pieces, is_all = packed(rows), blocks is None
            state = _State(group, member, is_all, closing.pop_all(), pieces, 0.0, 0.0)
            return state, applied

    async def read(self, number: int, piece: int) -> bytes:
        """Return a piece of a state (PRECONDITION_FAILED at its end, OVERLOADED, DATA_LOST)."""
        state = self._states.get(number)
        if state is None:
            raise _ended()
        state.used_s = asyncio.get_running_loop().time()
        async with state.reading:
            if state.ended or piece >= state.next + _KEPT or piece < state.next - len(state.kept):
                raise _ended()
            try:
                while state.next <= piece:
                    with self._heeding_damage(state.group, whole=state.whole):
                        found = await whole(lambda: next(state.pieces, b""))
                    state.kept[state.next] = found
                    state.kept.pop(state.next - _KEPT, None)
                    state.next += 1
                    self.counts.sent_bytes += len(found)
            except ApiError:
                self._close(number, state)
                raise
            return state.kept[piece]

    async def close(self, number: int) -> None:
        """End a state, if it has not ended."""
        await self._end(number)

    async def end_old(self) -> None:
        """End the states that nobody reads any more, and those that take too long."""
        now = asyncio.get_running_loop().time()
        for number, state in list(self._states.items()):
            if now - state.used_s > IDLE_S or now - state.begun_s > LASTING_S:
                await self._end(number)

    async def _end(self, number: int) -> None:
        state = self._states.get(number)
        if state is not None:
            async with state.reading:
                self._close(number, state)

    def _close(self, number: int, state: _State) -> None:
        if not state.ended:
            state.ended = True
            state.kept.clear()
            del self._states[number]
            self._let_go(number)
            state.closing.close()

    def _hold(self, number: int, group: int, index: int) -> None:
        self._held[number] = group, index
        self._keep_log(group)

    def _let_go(self, number: int) -> None:
        group, _ = self._held.pop(number)
        self._keep_log(group)

    def _keep_log(self, group: int) -> None:
        indexes = [index for held, index in self._held.values() if held == group]
        self._node_log.hold(group, min(indexes, default=None))

    def _heeding_damage(self, group: int, *, whole: bool) -> "_Heeding":
        return _Heeding(group, self._on_damage if whole else None)


class _Heeding:
    """Around a read of the store: makes its errors those of a request."""

    def __init__(self, group: int, on_damage: Callable[[int, str], None] | None) -> None:
        self._group, self._on_damage = group, on_damage

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (BlockCorruptError, StoreCorruptError)):
            # The rows of other members may be sound: this one must not be their source. A single
            # block is mended once a reader or the scrub of this node finds it.
            if self._on_damage is not None:
                self._on_damage(self._group, f"its state cannot be read: {error}")
            raise ApiError(errors.DATA_LOST, str(error)) from error
        if isinstance(error, StoreError):
            raise _overloaded(str(error)) from error


def _rows(view: View, group: int, shard_ids: list[int]) -> Iterator[Row]:
    for prefix in prefixes(group, shard_ids):
        for key, value in view.scan(prefix, keys.prefix_end(prefix)):
            if prefix[:1] == keys.BLOCK:
                view_block(value, BLOCK_CODECS)  # damage must not spread
            yield key, value


def _blocks(view: View, blocks: BlockRange) -> Iterator[Row]:
    shard_id, low_seq, end_seq = blocks
    start, stop = (keys.large_key(keys.BLOCK, shard_id, seq) for seq in (low_seq, end_seq))
    for key, value in view.scan(start, stop):
        view_block(value, BLOCK_CODECS)
        yield key, value


def _ended() -> ApiError:
    return ApiError(errors.PRECONDITION_FAILED, "the state is no longer read")


def _overloaded(why: str) -> ApiError:
    return ApiError(errors.OVERLOADED, why, retry_after_s=1)
