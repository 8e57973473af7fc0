"""A node's log as groups of several members read it: in a thread, and back on the event loop."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from contrail_serve.member_log import LogEntry, NodeMemberLog
from contrail_storage.wal import LogOptions, NodeLog

ENTRIES = [(b"%d" % index * 30, index, 1) for index in range(1, 21)]


async def filled(folder: Path) -> NodeLog:
    """A log of several segments with ENTRIES, all of them durable."""
    options = LogOptions(idle_s=1000.0, segment_bytes=200, keep_bytes=0)
    log, durable = NodeLog.open(folder / "wal", options=options), asyncio.Event()
    log.attach(1, lambda _, index: durable.set() if index == len(ENTRIES) else None)
    loop = asyncio.get_running_loop()
    log.start(call_soon=loop.call_soon_threadsafe, on_failure=lambda error: pytest.fail(str(error)))
    for data, index, term in ENTRIES:
        log.append(1, index, term, data)
    await durable.wait()
    return log


async def read(log: NodeMemberLog, from_index: int) -> list[LogEntry]:
    answer: asyncio.Future[Sequence[LogEntry]] = asyncio.get_running_loop().create_future()
    log.read(1, from_index, 1 << 20, answer.set_result)
    assert not answer.done()
    return list(await answer)


def test_entries_are_read_while_they_are_there(tmp_path: Path) -> None:
    async def scene() -> None:
        log = await filled(tmp_path)
        members = NodeMemberLog(log)
        assert await read(members, 1) == ENTRIES
        assert await read(members, 21) == []
        await asyncio.to_thread(log.rotate)
        await asyncio.to_thread(log.drop_segments, {1: 20})
        assert await read(members, 1) == []
        assert (members.term_at(1, 1), members.term_at(1, 20)) == (None, 1)
        await asyncio.to_thread(log.close)

    asyncio.run(scene())


def test_damaged_segment_gives_no_entries(tmp_path: Path) -> None:
    async def scene() -> None:
        log = await filled(tmp_path)
        for path in (tmp_path / "wal").glob("*.wal"):
            path.write_bytes(bytes(path.stat().st_size))
        assert await read(NodeMemberLog(log), 1) == []
        await asyncio.to_thread(log.close)

    asyncio.run(scene())


def test_flags_and_bases_go_to_the_log(tmp_path: Path) -> None:
    async def scene() -> None:
        log = await filled(tmp_path)
        members = NodeMemberLog(log)
        members.save_flags(1, 2)
        members.reset(1, 40, 3)
        await asyncio.to_thread(log.close)
        reopened = NodeLog.open(tmp_path / "wal")
        held = reopened.attach(1, lambda _, __: None)
        assert (NodeMemberLog(reopened).flags(1), held.base_index, held.base_term) == (2, 40, 3)
        reopened.close()

    asyncio.run(scene())
