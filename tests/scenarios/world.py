"""A storage node in this process, whose clock a story sets, and the pulls that wait on it."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

from contrail_common.errors import ApiError
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import PullResult
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica import log_time
from tests.scenarios.clock import StoryClock, StoryLoop
from tests.scenarios.unsynced import UnsyncedFiles
from tests.support.folders import copy_at_one_moment

_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.0001
_T = TypeVar("_T")


class StuckError(Exception):
    """Something waits for what only the passing of time would bring, or for what never comes."""


@dataclass(frozen=True, slots=True)
class EndedPull:
    """A pull that waited, when it ended, and how; ``outcome`` is None when it was cancelled."""

    number: int
    after_ns: int
    outcome: PullResult | ApiError | None


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a delivery's ack token holds besides the sequence."""

    shard_id: int
    consumer_id: int
    epoch: int


class World:
    """One node over a directory of its own. :func:`opened` makes it."""

    def __init__(self, root: Path, clock: StoryClock, loop: StoryLoop) -> None:
        self.clock = clock
        self.delivered: dict[tuple[str, str, int], Delivered] = {}
        self.incarnations: dict[str, str] = {}
        self.waiting: dict[int, asyncio.Task[PullResult]] = {}
        self._root = root
        self._loop = loop
        self._life = 0
        self._pulls = 0
        self._ended: list[tuple[int, int, asyncio.Task[PullResult]]] = []
        self._begin_life()

    def _begin_life(self) -> None:
        options = NodeOptions(self._root / str(self._life), files=UnsyncedFiles())
        self.node = StorageNode.open(options, SingleMemberGroups())
        self.link = LocalLink(self.node)

    # Commands ------------------------------------------------------------------------------------

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``, which may not wait for the clock (StuckError)."""
        task = asyncio.ensure_future(work)
        await self.settle()
        if not task.done():
            task.cancel()
            await self.settle()
            raise StuckError("the command waits for the clock")
        return task.result()

    async def pull(self, work: Coroutine[Any, Any, PullResult]) -> PullResult | int:
        """The result of a pull, or when it waits its number; ApiError when it is refused."""
        task = asyncio.ensure_future(work)
        await self.settle()
        if task.done():
            return task.result()
        self._pulls += 1
        number = self._pulls
        self.waiting[number] = task
        task.add_done_callback(lambda done: self._note_ended(number, done))
        return number

    def _note_ended(self, number: int, done: "asyncio.Task[PullResult]") -> None:
        del self.waiting[number]
        self._ended.append((number, self.clock.elapsed_ns, done))

    def take_ended(self) -> list[EndedPull]:
        """The waiting pulls that ended since the last look."""
        ended, self._ended = self._ended, []
        return [EndedPull(number, after_ns, _outcome(task)) for number, after_ns, task in ended]

    async def cancel_pulls(self, *numbers: int) -> None:
        """The clients of waiting pulls go away (all of them when none is named)."""
        for number in numbers or tuple(self.waiting):
            self.waiting[number].cancel()
        await self.settle()

    # Time ----------------------------------------------------------------------------------------

    async def advance(self, duration_ns: int) -> None:
        """Let time pass, from timer to timer, each at its moment."""
        end_ns = self.clock.elapsed_ns + duration_ns
        while True:
            timer_ns = self._loop.next_timer_ns()
            if timer_ns is None or timer_ns > end_ns:
                break
            await self._move_clock(timer_ns)
        await self._move_clock(end_ns)

    async def _move_clock(self, to_ns: int) -> None:
        self.clock.elapsed_ns = max(self.clock.elapsed_ns, to_ns)
        self._loop.now_s = self.clock.elapsed_ns / NS_PER_S
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no time: also what is on its way to the disk."""
        deadline_s = time.monotonic() + _PATIENCE_S
        await self._loop.quiet()
        while self._is_busy():
            if self.node.failure or time.monotonic() > deadline_s:
                raise StuckError(self.node.failure or "the node does not come to rest")
            self.node.applier.flush()  # it would wait for time to pass
            wait_for_threads()
            await self._loop.quiet()

    def _is_busy(self) -> bool:
        node = self.node
        written = node.applier.written_indexes
        return node.shard_log.queued_bytes > 0 or any(
            group.outstanding_bytes or group.applied_index != written.get(number, 0)
            for number, group in node.groups.items()
        )

    # Lives ---------------------------------------------------------------------------------------

    async def restart(self, down_ns: int, *, killed: bool) -> None:
        """End the node and begin anew, after a time, over its directory.

        ``killed`` begins over a copy of the files made before the node had a chance to flush.
        """
        await self.cancel_pulls()
        if killed:
            self._life += 1
            copy_at_one_moment(self._root / str(self._life - 1), self._root / str(self._life))
        await self.node.stop()
        self.clock.elapsed_ns += down_ns
        self._loop.now_s = self.clock.elapsed_ns / NS_PER_S
        self._begin_life()
        await self.node.start()
        await self.settle()


def _outcome(pull: "asyncio.Task[PullResult]") -> PullResult | ApiError | None:
    if pull.cancelled():
        return None
    try:
        return pull.result()
    except ApiError as error:
        return error


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[World]:
    """A world that runs; its end is the end of the story."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoryLoop)
    clock = StoryClock()
    with patch.object(log_time, "time", clock):
        world = World(root, clock, loop)
        await world.node.start()
        try:
            await world.settle()
            yield world
            await world.cancel_pulls()
        finally:
            await world.node.stop()


def wait_for_threads() -> None:
    """Leave the processor to the threads that write."""
    time.sleep(_PAUSE_S)
