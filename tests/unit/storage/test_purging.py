"""Purges of subjects, lowered limits and roll-ups: one pass over the stream, in many commands."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contrail_common.model import PublishMessage, Rollup, StreamConfig
from contrail_common.subjects import matches
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.core.results import Result
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.reading.reader import Reader
from contrail_storage.streams import removals
from tests.unit.storage.erase_rig import running

NAMES = [f"{first}.{second}" for first in "ab" for second in "xyz"]
PATTERNS = ["a.x", "a.*", "*.y", ">", "b.>", "c.*", "*.*", "b.z"]
WALKS = 60
MESSAGES = 80


def live(machine: StreamMachine) -> dict[int, str]:
    """The subjects of all messages by sequence; they are what the table says."""
    counters, table = machine.counters, machine.subjects
    found: dict[int, str] = {}
    size = 0
    for seq in range(counters.first_seq, counters.last_seq + 1):
        if machine.is_live(seq):
            facts = machine.facts_at(seq)
            found[seq] = table.name(int(facts.subject_ids[seq - facts.base_seq]))
            size += int(facts.sizes[seq - facts.base_seq])
    assert (counters.messages, counters.bytes) == (len(found), size)
    for name in set(found.values()):
        own = [seq for seq in found if found[seq] == name]
        slot = table.numbered.slot(table.ids[name])
        assert (table.count(name), table.last_of(table.ids[name])) == (len(own), own[-1])
        assert table.first[slot] <= own[0]
    assert len(table) == len(set(found.values()))
    return found


class Interrupted:
    """A log that does other work before each command that names messages."""

    def __init__(self, log: Any, work: Callable[[], Awaitable[None]]) -> None:
        self.log = log
        self.work = work
        self.named = 0

    async def command(self, shard_id: int, command: cmd.Command) -> Result:
        if isinstance(command, cmd.Remove):
            self.named += 1
            await self.work()
        result: Result = await self.log.command(shard_id, command)
        return result


async def put(link: LocalLink, stream: str, names: list[str], rollup: Rollup | None = None) -> None:
    ack = await publish(
        link,
        stream,
        [PublishMessage(f"{stream}.{one}", None, b"x", rollup=rollup) for one in names],
    )
    assert not any(result.code for result in ack.results)


async def make(link: LocalLink, stream: str, **fields: Any) -> None:
    config = StreamConfig(
        name=stream, subjects=(f"{stream}.>",), allow_rollup_hdrs=True, storage="memory", **fields
    )
    await link.put_stream(config, "put", None, False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the search and commands of a few messages."""
    facts = Reader.facts

    async def some(self: Reader, shard: Any, from_seq: int, to_seq: int) -> SubjectFacts:
        found = await facts(self, shard, from_seq, min(to_seq, from_seq + 15))
        count = from_seq + 16 - found.base_seq
        return SubjectFacts(found.base_seq, found.subject_ids[:count], found.sizes[:count])

    monkeypatch.setattr(Reader, "facts", some)
    monkeypatch.setattr(removals, "NAMED_MAX", 3)


@pytest.mark.usefixtures("small")
def test_purge_removes_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile messages arrive, and others are replaced, evicted and deleted."""

    async def walk(node: StorageNode, link: LocalLink, seed: int) -> None:
        rng, stream = random.Random(seed), f"S{seed}"
        await make(link, stream, max_msgs_per_subject=rng.choice([-1, -1, 20]))
        for _ in range(rng.randint(1, 9)):
            await put(link, stream, rng.choices(NAMES, k=rng.randint(1, MESSAGES // 9)))
        machine = node.streams.shard(stream).machine
        before = live(machine)
        pattern = f"{stream}.{rng.choice(PATTERNS)}"
        up_to_seq, keep = rng.choice([(0, 0), (0, 0), (rng.randint(1, MESSAGES), 0), (0, 4)])
        wanted = [seq for seq, name in before.items() if matches(pattern, name)]
        wanted = [seq for seq in wanted if not up_to_seq or seq < up_to_seq]
        wanted = wanted[: max(len(wanted) - keep, 0)] if keep else wanted
        others: set[int] = set()

        async def interrupt() -> None:
            held = live(machine)
            what = rng.choice(["", "publish", "roll up", "remove"])
            if what in ("publish", "roll up"):
                await put(link, stream, [rng.choice(NAMES)], "sub" if what == "roll up" else None)
            if what == "remove" and held:
                seq = min(held)
                facts = machine.facts_at(seq)
                at = slice(seq - facts.base_seq, seq - facts.base_seq + 1)
                oldest = cmd.Remove.of(
                    "purge", np.array([seq]), facts.subject_ids[at], facts.sizes[at]
                )
                await log.log.command(machine.shard_id, oldest)
            others.update(held.keys() - live(machine).keys())

        log = Interrupted(node.streams.removals._shard_log, interrupt)
        with monkeypatch.context() as patch:
            patch.setattr(node.streams.removals, "_shard_log", log)
            purged = await link.purge_stream(stream, pattern, up_to_seq, keep)
        assert purged == len(set(wanted) - others)
        after = live(machine)
        later = {seq for seq in after if seq not in before}
        assert after.keys() == (before.keys() - set(wanted) - others) | later
        assert log.named >= len(set(wanted) - others) / 3

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            for seed in range(WALKS):
                try:
                    await walk(node, link, seed)
                except AssertionError as error:
                    raise AssertionError(f"walk {seed}") from error

    asyncio.run(scenario())


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the subject of each sequence is looked at."""
    looks: Counter[int] = Counter()
    facts = Reader.facts

    async def counting(self: Reader, shard: Any, from_seq: int, to_seq: int) -> SubjectFacts:
        found = await facts(self, shard, from_seq, to_seq)
        looks.update(range(from_seq, min(found.end_seq, to_seq + 1)))
        return found

    monkeypatch.setattr(Reader, "facts", counting)
    return looks


@pytest.mark.parametrize("way", ["purge", "limit"])
def test_interleaved_subjects_are_removed_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The work grows with the messages, and not with the subjects as well."""
    monkeypatch.setattr(removals, "NAMED_MAX", 100)
    subjects, each, together = 500, 10, 250

    async def scenario() -> None:
        async with running(tmp_path) as (node, link):
            await make(link, "S")
            names = [f"{number % 7}.{number}" for number in range(subjects)] * each
            for at in range(0, len(names), together):
                await put(link, "S", names[at : at + together])
            machine = node.streams.shard("S").machine
            before = live(machine)
            looks = counted(monkeypatch)
            if way == "purge":
                left = {seq for seq, name in before.items() if not name.startswith("S.3.")}
                purged = await link.purge_stream("S", "S.3.*", 0, 0)
                assert purged == len(before) - len(left)
            else:
                left = set(sorted(before)[-2 * subjects :])
                await make(link, "S", max_msgs_per_subject=2)
            assert live(machine).keys() == left
            assert set(looks.values()) == {1}
            assert looks.total() <= len(names)

    asyncio.run(scenario())
