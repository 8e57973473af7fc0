"""Deadlines of many pending messages are taken in slices, and none is passed over."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from contrail_storage.consumers.redeliveries import SLICE_MAX, Redeliveries

COUNT = 3 * SLICE_MAX + 1


@dataclass(slots=True)
class Pending:
    deadline_ns: int


@dataclass(slots=True)
class Bench:
    """A consumer with so many pending messages, the newest due first."""

    consumer: Any = field(init=False)
    slices: int = 0

    def __post_init__(self) -> None:
        pending = {seq: Pending(COUNT - seq) for seq in range(1, COUNT + 1)}
        self.consumer = SimpleNamespace(pending=pending)

    def noted(self) -> None:
        self.slices += 1


def test_many_deadlines_are_taken_in_turns_of_the_loop() -> None:
    async def scene() -> None:
        bench = Bench()
        deadlines = Redeliveries(bench.consumer, bench.noted)
        deadlines.rebuild()
        assert len(deadlines.take_due(COUNT, (), COUNT)) == SLICE_MAX
        del bench.consumer.pending[COUNT]  # acknowledged before its slice came
        deadlines.rebuild()  # begins anew
        while bench.slices < 2:
            await asyncio.sleep(0)
        assert deadlines.earliest_ns() == 1
        assert deadlines.take_due(COUNT, (), COUNT) == list(range(1, COUNT))
        await asyncio.sleep(0)
        assert bench.slices == 2

    asyncio.run(scene())


def test_closed_dispatcher_takes_no_more() -> None:
    async def scene() -> None:
        bench = Bench()
        deadlines = Redeliveries(bench.consumer, bench.noted)
        deadlines.rebuild()
        deadlines.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert bench.slices == 0

    asyncio.run(scene())
