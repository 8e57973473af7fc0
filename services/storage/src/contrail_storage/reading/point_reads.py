"""Blocks for single messages: blocks requested at the same time are read together.

A thread for each block would cost more than the read: two switches, and the interpreter lock
twice. So one thread reads at a time, and new requests wait for its next turn. A single read starts
at once; under load, many reads share a turn.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from contrail_common.columns.blocks import Block
from contrail_storage.store.block_store import BlockStore

TURN_BLOCKS: Final = 32
"""Blocks of one turn: a few MiB at most, so that no request waits long for others."""

_Found = Block | Exception
_Waiters = list[Callable[[_Found], None]]


class PointReads:
    """Reads blocks by shard and base sequence; for one event loop."""

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        # By shard and base sequence: who waits for the block.
        self._asked: dict[int, dict[int, _Waiters]] = {}
        # Runs `_read_all`; None when nothing is requested.
        self._turns: asyncio.Task[None] | None = None

    async def block(self, shard: int, base_seq: int) -> Block:
        """Return the block with ``base_seq``, which was not in memory at the request.

        Raises one of UNREADABLE, or the store's error.
        """
        found: asyncio.Future[Block] = asyncio.get_running_loop().create_future()
        self._ask(shard, base_seq, partial(_settle, found))
        return await found

    def read(self, shard: int, base_seq: int) -> asyncio.Future[None]:
        """As :meth:`block`, but the result only says that the block was read, or cannot be."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ask(shard, base_seq, lambda _: _end(done))
        return done

    def _ask(self, shard: int, base_seq: int, waiter: Callable[[_Found], None]) -> None:
        self._asked.setdefault(shard, {}).setdefault(base_seq, []).append(waiter)
        if self._turns is None:
            self._turns = asyncio.get_running_loop().create_task(self._read_all())

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._asked:
                shard = next(iter(self._asked))
                bases = list(islice(self._asked[shard], TURN_BLOCKS))
                found: list[_Found]
                try:
                    times = self._blocks.directory(shard).last_times_ns(bases)
                    load = self._blocks.load_each
                    found = await loop.run_in_executor(None, load, shard, bases, times)
                except Exception as error:
                    found = [error] * len(bases)
                waiting = self._asked.pop(shard)
                for base_seq, one in zip(bases, found, strict=True):
                    for waiter in waiting.pop(base_seq):
                        waiter(one)
                if waiting:
                    self._asked[shard] = waiting  # after the other shards
        finally:
            self._turns = None


def _settle(waiter: asyncio.Future[Block], found: _Found) -> None:
    if waiter.done():
        return  # the caller has stopped waiting
    if isinstance(found, Exception):
        waiter.set_exception(found)
    else:
        waiter.set_result(found)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
