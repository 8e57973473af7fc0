"""Nodes that are broken on purpose, each in one rule, to test the tests.

A mutant changes the code of the process in which it is called. That process lives one life.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from contrail_common.columns.message_batch import MessageBatch
from contrail_link.contract.publish import PublishAck
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Row, Step
from contrail_storage.core.stream.removal import interest, limits, purge
from contrail_storage.core.stream.stream_machine import HANDLERS
from contrail_storage.replica import store_writer
from contrail_storage.replica.store_writer import StoreWriter
from contrail_storage.replica.write_behind import WriteBehind
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.stream import Stream
from tests.crash.disk import CountedStore


def replace(owner: object, name: str, value: object) -> None:
    """Replace an attribute of a module or a class."""
    setattr(owner, name, value)


def _without(kind: bytes) -> Callable[[], None]:
    """Never write rows of a kind to the store."""

    def mutate() -> None:
        write = CountedStore.write

        def some(self: CountedStore, operations: list[Row]) -> None:
            write(self, [row for row in operations if row[1][:1] != kind])

        replace(CountedStore, "write", some)

    return mutate


def _write_late(take: Callable[[list[Row]], tuple[list[Row], list[Row]]]) -> None:
    """Hold back the rows of every batch that `take` returns second, for two batches.

    One batch would not do: the next one may be the record of a checkpoint.
    """
    write = CountedStore.write
    waiting: deque[list[Row]] = deque([[], []])

    def later(self: CountedStore, operations: list[Row]) -> None:
        now, held = take(operations)
        waiting.append(held)
        write(self, waiting.popleft() + now)

    replace(CountedStore, "write", later)


def _late_rows(kind: bytes) -> Callable[[], None]:
    """Write rows of a kind not with their entry, but with a later batch."""

    def take(operations: list[Row]) -> tuple[list[Row], list[Row]]:
        apart = [row for row in operations if row[1][:1] == kind]
        return [row for row in operations if row not in apart], apart

    return lambda: _write_late(take)


def _late(module: ModuleType, name: str) -> Callable[[], None]:
    """Write the rows of a function not with their entry, but with a later batch."""
    return lambda: replace(module, name, _held_back(getattr(module, name)))


def _late_command(kind: type) -> Callable[[], None]:
    """Write the rows of a command not with its entry, but with a later batch."""
    return lambda: HANDLERS.update({kind: _held_back(HANDLERS[kind])})


def _held_back(function: Callable[..., Any]) -> Callable[..., Any]:
    noted: list[Row] = []

    def apart(*arguments: Any) -> Any:
        rows = next(one for one in arguments if isinstance(one, Step)).writes.rows
        before = len(rows)
        result = function(*arguments)
        noted.extend(rows[before:])
        del rows[before:]
        return result

    def take(operations: list[Row]) -> tuple[list[Row], list[Row]]:
        held = list(noted)
        noted.clear()
        return list(operations), held

    _write_late(take)
    return apart


def _out_of_order() -> None:
    """Write held changes in reverse order."""
    operations = StoreWriter._operations

    def backwards(self: StoreWriter, jobs: list[Any]) -> list[Row]:
        *rows, applied = operations(self, jobs)
        return [*rows[::-1], applied] if len(jobs) > 1 else [*rows, applied]

    replace(StoreWriter, "_operations", backwards)


def _job_dropped() -> None:
    """Drop one of several held jobs."""
    flush = WriteBehind.flush

    def lossy(self: WriteBehind) -> None:
        if len(self._held) > 2:
            del self._held[-2]
        flush(self)

    replace(WriteBehind, "flush", lossy)


def _parts_kept() -> None:
    """Write the parts of a joined block as well as the joined block."""
    join = WriteBehind._join

    def too_many(self: WriteBehind, number: int, run: Any) -> None:
        before = [(job, list(job.blocks)) for job in run.jobs]
        join(self, number, run)
        joined = run.jobs[-1].blocks[-1:] if len(run.blocks) > 1 else []
        for job, blocks in before:
            job.blocks = blocks
        run.jobs[-1].blocks = [*joined, *run.jobs[-1].blocks]

    replace(WriteBehind, "_join", too_many)


def _part_rows_kept() -> None:
    """Keep the directory rows of the parts after a merge of blocks."""
    deletes = store_writer._block_deletes

    def body_alone(gone: store_writer.GoneBlock) -> list[Row]:
        return deletes(gone)[:1]

    replace(store_writer, "_block_deletes", body_alone)


def _batch_in_parts() -> None:
    """Store an atomic batch message by message."""
    whole = Stream.publish

    def publish(self: Stream, content: Any, done: Any) -> None:
        if not (isinstance(content, MessageBatch) and content.atomic):
            whole(self, content, done)
            return
        content.atomic = False

        async def in_parts() -> None:
            acks: list[Any] = []
            for at in range(content.count):
                future = asyncio.get_running_loop().create_future()
                whole(self, content.slice(at, at + 1), future.set_result)
                acks.append(await future)
            runs = [run for ack in acks for run in ack.results]
            done(PublishAck(self.name, runs, self.durability))

        asyncio.get_running_loop().create_task(in_parts())

    replace(Stream, "publish", publish)


def _not_reconciled() -> None:
    """Do not repair what a crash left half made."""

    async def reconcile_all(self: StreamManager) -> None:
        return

    replace(StreamManager, "reconcile_all", reconcile_all)


MUTANTS: Final[dict[str, Callable[[], None]]] = {
    "late deadlines": _late_rows(keys.DEADLINE),
    "no deadlines": _without(keys.DEADLINE),
    "no never-pages": _without(keys.EXEMPT),
    "no pinned messages": _without(keys.PINNED),
    "late settling": _late(interest, "settled"),
    "late roll-ups": _late(purge, "replace_older"),
    "late subject limits": _late(limits, "enforce"),
    "late purges": _late_command(cmd.Remove),
    "late lowered limits": _late_command(cmd.EnforceLimits),
    "late markers": _late_command(cmd.Expire),
    "out of order": _out_of_order,
    "job dropped": _job_dropped,
    "joined parts kept": _parts_kept,
    "merged parts kept": _part_rows_kept,
    "batch in parts": _batch_in_parts,
    "restores not undone": _not_reconciled,
}
