"""A key-value bucket on a node: newest values, expectations, and whatever removes messages.

After each step every way of asking for the newest message of a key must agree with a dictionary.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import LastRequest
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.reading import newest
from contrail_storage.upkeep.due_messages import DueMessages
from contrail_storage.upkeep.housekeeper import Housekeeper
from tests.support.folders import copy_at_one_moment
from tests.unit.storage.naive_subjects import naive_matches
from tests.unit.storage.restore_rig import PATIENCE_S, running

KEYS = ["k.a.1", "k.a.2", "k.b.1"]
PATTERNS = ["k.a.*", "k.*.1", "k.b.1", "k.>"]
WRONG = errors.WRONG_LAST_SEQUENCE.code
TTL_NS = 1_000 * NS_PER_S
CONFIG = StreamConfig(
    name="S",
    subjects=("k.>",),
    max_msgs_per_subject=4,
    allow_rollup_hdrs=True,
    allow_msg_ttl=True,
    allow_atomic=True,
)

puts = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from([None, "own", "own", *PATTERNS]),  # whose last sequence is expected
    st.sampled_from([0, 0, 0, 1]),  # by how much the expectation is wrong
    st.sampled_from([None, None, None, "sub"]),  # roll-up
    st.sampled_from([None, None, TTL_NS]),
)
from_newest = st.sampled_from([0, 0, 0, 1, 2, 7])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(puts, min_size=1, max_size=1)),
        st.tuples(st.just("put"), st.lists(puts, min_size=2, max_size=5)),
        st.tuples(st.just("delete"), from_newest),
        st.tuples(st.just("delete"), from_newest),
        st.tuples(st.just("race"), from_newest, st.booleans()),
        st.tuples(st.just("purge"), st.sampled_from(PATTERNS), st.integers(0, 2)),
        st.tuples(st.just("limit"), st.integers(1, 4)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    min_size=30,  # a short one has nothing to find
    max_size=60,
)


class Bucket:
    """A node with the stream, and the messages that it must have: keys and lives by sequence."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.live: dict[int, tuple[str, bool]] = {}
        self.last_seq = 0
        self.config = CONFIG
        self.later_ns = 0
        self.node: StorageNode
        self.link: LocalLink

    async def run(self, rest: Iterator[tuple[Any, ...]]) -> bool:
        """Take steps until the node is to be started again; False after the last one."""
        async with running(self.folder) as self.node:
            self.link = LocalLink(self.node)
            self.node.shard_log.log_time_ns = self.now_ns  # type: ignore[method-assign]
            await self.link.put_stream(self.config, "put", None, False)
            for kind, *arguments in rest:
                if kind == "restart":
                    await self.leave(*arguments)
                    return True
                await getattr(self, f"do_{kind}")(*arguments)
                await self.agree()
            await self.starts_agree()
        return False

    async def leave(self, crashed: bool) -> None:
        """After a crash, what was not flushed is only in the log."""
        if crashed:
            await self.node.until_written()
            folder = self.folder.with_name(self.folder.name + "x")
            copy_at_one_moment(self.folder, folder)
            self.folder = folder

    def now_ns(self) -> int:
        return self.node.clock.now() + self.later_ns

    def last_of(self, pattern: str) -> int:
        found = (seq for seq, (key, _) in self.live.items() if naive_matches(pattern, key))
        return max(found, default=0)

    def remove(self, pattern: str, keep: int) -> None:
        own = sorted(seq for seq, (key, _) in self.live.items() if naive_matches(pattern, key))
        for seq in own[: max(len(own) - keep, 0)]:
            del self.live[seq]

    def chosen(self, from_newest: int) -> int:
        """A live message, counted from the newest."""
        return sorted(self.live, reverse=True)[from_newest % len(self.live)]

    # Steps ---------------------------------------------------------------------------------------

    async def do_put(self, batch: list[Any]) -> None:
        messages, codes = [], []
        # All are checked first, then stored, then older ones are removed.
        last_seq, last = self.last_seq, {one: self.last_of(one) for one in KEYS + PATTERNS}
        for key, asked, off_by, rollup, ttl_ns in batch:
            pattern = key if asked == "own" else asked
            expected = None
            if pattern is not None:
                expected = Expected(
                    last_subject_seq=last[pattern] + off_by,
                    last_subject_seq_subject=None if asked == "own" else asked,
                )
            messages.append(
                PublishMessage(key, None, b"x", expected=expected, rollup=rollup, ttl_ns=ttl_ns)
            )
            wrong = pattern is not None and off_by
            codes.append(WRONG if wrong else 0)
            if not wrong:
                last_seq += 1
                last |= {one: last_seq for one in last if naive_matches(one, key)}
        ack = await publish(self.link, "S", messages)
        assert [one.code for one in ack.results] == codes
        most = self.config.max_msgs_per_subject
        for (key, _, _, rollup, ttl_ns), code in zip(batch, codes, strict=True):
            if not code:
                self.last_seq += 1
                self.live[self.last_seq] = key, ttl_ns is not None
                if rollup is not None:
                    self.remove(key, 1)
        for key in KEYS:
            self.remove(key, most)

    async def do_delete(self, from_newest: int) -> None:
        if self.live:
            seq = self.chosen(from_newest)
            await self.link.delete_message("S", seq)
            del self.live[seq]

    async def do_race(self, from_newest: int, expects_it: bool) -> None:
        """A removal and a publish at once; the publish expects the message to be there, or not."""
        if not self.live:
            return
        seq, before = self.chosen(from_newest), dict(self.live)
        key, _ = before[seq]
        last = [self.last_of(key)]
        del self.live[seq]
        last.append(self.last_of(key))
        expected = Expected(last_subject_seq=last[0 if expects_it else 1])
        deleted = asyncio.ensure_future(self.link.delete_message("S", seq))
        message = PublishMessage(key, None, b"x", expected=expected)
        ack = await publish(self.link, "S", [message])
        await asyncio.gather(deleted, return_exceptions=True)
        possible = []
        for publish_first in (True, False):
            self.live = dict(before)
            if not publish_first:
                del self.live[seq]
            code = 0 if self.last_of(key) == expected.last_subject_seq else WRONG
            if not code:
                self.live[self.last_seq + 1] = key, False
                self.remove(key, self.config.max_msgs_per_subject)
            self.live.pop(seq, None)
            possible.append((code, self.live))
        machine = self.node.streams.shard("S").machine
        self.last_seq = machine.counters.last_seq
        live = [one for one in range(self.last_seq + 1) if machine.is_live(one)]
        found = ack.results[0].code, live
        assert found in [(code, sorted(one)) for code, one in possible]
        self.live = next(one for code, one in possible if (code, sorted(one)) == found)

    async def do_purge(self, pattern: str, keep: int) -> None:
        await self.link.purge_stream("S", pattern, 0, keep)
        self.remove(pattern, keep)

    async def do_limit(self, most: int) -> None:
        self.config = msgspec.structs.replace(self.config, max_msgs_per_subject=most)
        await self.link.put_stream(self.config, "update", None, False)
        for key in KEYS:
            self.remove(key, most)

    async def do_expire(self) -> None:
        self.later_ns += 2 * TTL_NS
        node = self.node
        due = DueMessages(
            node.reader, node.shard_log, node.blocks, node._store.scan, node.until_written
        )
        await due.remove(node.streams.shard("S"), self.now_ns())
        self.live = {seq: (key, ages) for seq, (key, ages) in self.live.items() if not ages}

    # Agreement -----------------------------------------------------------------------------------

    async def agree(self) -> None:
        for key in KEYS:
            newest = self.last_of(key)
            assert await self.newest(subject=key) == ([newest] if newest else [])
        lasts = sorted(filter(None, map(self.last_of, KEYS)))
        assert await self.newest(subject="k.>", limit=3) == lasts
        up_to = self.last_seq // 2
        if up_to:
            early = {self.live[seq][0]: seq for seq in sorted(self.live) if seq <= up_to}
            found = await self.newest(subject="k.>", limit=3, up_to_seq=up_to)
            assert found == sorted(early.values())

    async def newest(self, **asked: Any) -> list[int]:
        found: list[int] = []
        token = ""
        while True:
            request = LastRequest(stream="S", token=token, **asked)
            page, more = await self.link.last_messages(request)
            found += [one.seq for one in page]
            if more is None:
                return sorted(found)
            token = more

    async def starts_agree(self) -> None:
        for policy, pattern in (("last_per_subject", "k.>"), ("last", "k.a.*")):
            config = ConsumerConfig(
                name=policy, durable=True, deliver_policy=policy, filter_subjects=(pattern,)
            )
            await self.link.put_consumer("S", config, "create", None, False)
            pulled = await self.link.pull(
                PullRequest(stream="S", consumer=policy, batch=99, no_wait=True)
            )
            lasts = sorted(filter(None, map(self.last_of, KEYS)))
            expected = lasts if policy == "last_per_subject" else [self.last_of(pattern)]
            found = [one.message.seq for one in pulled.deliveries]
            assert found == [seq for seq in expected if seq]


async def play(script: list[tuple[Any, ...]], folder: Path) -> None:
    bucket = Bucket(folder)
    rest = iter(script)
    while await bucket.run(rest):
        pass


@settings(
    max_examples=max(settings().max_examples // 5, 10),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes
)
@given(steps)
def test_newest_values_agree_with_a_dictionary(script: list[tuple[Any, ...]]) -> None:
    async def nothing(*_: object) -> None:
        pass

    async def whole(folder: Path) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await play(script, folder)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(Housekeeper, "tick", nothing)  # nothing expires but what a step asks for
        patch.setattr(newest, "WINDOW_BITS", 2)
        patch.setattr(newest, "RUN_WINDOWS", 2)
        asyncio.run(whole(Path(folder) / "data"))
