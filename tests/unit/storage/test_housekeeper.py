"""The housekeeper does everything that is due, and nothing for what is not."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_common.errors import ApiError
from contrail_common.model import (
    INACTIVE_THRESHOLD_NS,
    TTL_NEVER,
    ConsumerConfig,
    PublishMessage,
    StreamConfig,
)
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.publishing import publish
from contrail_storage.consumers.manager import ConsumerManager
from contrail_storage.core import key_layout as keys
from contrail_storage.core import pending_deliveries
from contrail_storage.core.stream.removal import by_subject
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica import log_time
from contrail_storage.replica.shard import Shard
from contrail_storage.store.block_store import BlockStore
from contrail_storage.streams.manager import StreamManager
from contrail_storage.streams.removals import Removals
from contrail_storage.upkeep import housekeeper
from tests.unit.storage.dispatcher_rig import wait_until
from tests.unit.storage.restore_rig import PATIENCE_S, archive_of, restored, running
from tests.unit.storage.test_doubted_clock import Clocks

AGE_NS = 2 * NS_PER_S
STREAMS = {
    "limits": StreamConfig(name="limits", subjects=("limits.*",), max_age_ns=AGE_NS),
    "interest": StreamConfig(name="interest", subjects=("interest.*",), retention="interest"),
    "sharded": StreamConfig(name="sharded", subjects=("sharded.*",), shards=2, max_age_ns=AGE_NS),
    "memory": StreamConfig(
        name="memory", subjects=("memory.*",), storage="memory", max_age_ns=AGE_NS
    ),
}
STREAMS = {
    name: msgspec.structs.replace(config, allow_msg_ttl=True, allow_rollup_hdrs=True)
    for name, config in STREAMS.items()
}
TICKS_MAX = 8
"""A tick removes a bounded number of messages, and markers may be due at once."""


@contextmanager
def patched() -> Iterator[pytest.MonkeyPatch]:
    """The housekeeper ticks only when a test calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(housekeeper, "TICK_S", 3_600.0)
        yield patch


# Everything that is due -------------------------------------------------------------------------


names = st.sampled_from(sorted(STREAMS))
consumers = st.sampled_from(["a", "b"])
seconds = st.sampled_from([None, 1, 2, 5])
publishes = st.tuples(
    st.just("publish"),
    names,
    st.integers(0, 2),
    st.sampled_from([None, None, NS_PER_S, 3 * NS_PER_S, TTL_NEVER]),
    st.sampled_from([None, None, None, "sub"]),
)
waits = st.tuples(st.just("later"), st.sampled_from([0.5, 1.0, 2.0, 4.0]))
changes = st.one_of(
    st.tuples(st.just("configure"), names, seconds, st.sampled_from([-1, 1, 3]), st.booleans()),
    st.tuples(st.just("delete"), names, st.integers(1, 9)),
    st.tuples(st.just("drop"), names),
    st.tuples(st.just("restore"), names),
    st.tuples(st.just("restart")),
)
consumes = st.tuples(st.just("consume"), names, consumers, seconds, st.sampled_from([-1, 1]))
uses = st.one_of(
    consumes,
    consumes,
    st.tuples(st.just("pull"), names, consumers, st.integers(1, 3)),
    st.tuples(st.just("leave"), names, consumers),
)
steps = st.one_of(publishes, publishes, waits, waits, changes, uses)


@dataclass
class Play:
    """A node, and when its consumers were used."""

    folder: Path
    clocks: Clocks
    used_s: dict[tuple[str, str], float] = field(default_factory=dict)
    node: StorageNode = field(init=False)
    link: LocalLink = field(init=False)

    async def run(self, todo: list[tuple[Any, ...]]) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + self.clocks.boot_step_ns / NS_PER_S  # type: ignore[method-assign]
        while todo:
            async with running(self.folder) as self.node:
                self.link = LocalLink(self.node)
                self.used_s = dict.fromkeys(self.used_s, loop.time())
                for config in STREAMS.values():
                    await self.link.put_stream(config, "put", None, False)
                await self.check()  # the time of consumers begins with the first tick
                while todo and todo[0][0] != "restart":
                    kind, *values = todo.pop(0)
                    with suppress(ApiError):
                        await getattr(self, kind)(*values)
                    await self.check()
                todo = todo[1:]

    async def check(self) -> None:
        """Tick until nothing is done any more. Then nothing may be due."""
        now_ns, now_s = self.node.clock.now(), asyncio.get_running_loop().time()
        for _ in range(TICKS_MAX):
            await self.node._housekeeper.tick()
        await self.node.until_written()
        for shard in [one for stream in self.node.streams.listed() for one in stream.shards]:
            assert not list(self.due(shard, now_ns)), shard.name
        self.check_consumers(now_s)

    def due(self, shard: Shard, now_ns: int) -> Iterator[object]:
        """What is due in a shard by its messages and rows, as they are stored."""
        machine, config = shard.machine, shard.config
        if machine.counters.replaced or machine.over_limits or machine.pending_recheck:
            yield "left over"
        prefix = keys.shard_key(keys.DEADLINE, machine.shard_id)
        for key, _ in self.node._store.scan(prefix, keys.prefix_end(prefix)):
            if keys.deadline_of(key)[0] <= now_ns:
                yield "ttl"
        for seq in range(machine.counters.first_seq, machine.counters.last_seq + 1):
            if config.max_age_ns and machine.is_live(seq) and seq not in machine.exempt:
                facts = machine.facts_at(seq)
                if int(facts.times_ns[seq - facts.base_seq]) <= now_ns - config.max_age_ns:
                    yield "age", seq

    def check_consumers(self, now_s: float) -> None:
        for stream in self.node.streams.listed():
            for machine in stream.shards[0].machine.consumers.values():
                config = machine.config
                threshold_ns = config.inactive_threshold_ns
                if not config.durable:
                    threshold_ns = threshold_ns or INACTIVE_THRESHOLD_NS
                ids = [shard.machine.consumer(config.name) for shard in stream.shards]
                at_work = any(one is not None and one.pending for one in ids)
                if threshold_ns and not at_work:
                    used_s = self.used_s[stream.name, config.name]
                    assert used_s + threshold_ns / NS_PER_S > now_s

    # Steps ---------------------------------------------------------------------------------------

    async def publish(self, name: str, at: int, ttl_ns: int | None, rollup: Any) -> None:
        message = PublishMessage(f"{name}.{at}", None, b"x", ttl_ns=ttl_ns)
        await publish(self.link, name, [message] * 4)
        if rollup is not None:
            await publish(self.link, name, [msgspec.structs.replace(message, rollup=rollup)])

    async def configure(self, name: str, age_s: int | None, most: int, marks: bool) -> None:
        config = msgspec.structs.replace(
            STREAMS[name],
            max_age_ns=(age_s or 0) * NS_PER_S,
            max_msgs_per_subject=most,
            subject_delete_marker_ttl_ns=NS_PER_S if marks and name == "limits" else 0,
        )
        await self.link.put_stream(config, "put", None, False)

    async def delete(self, name: str, seq: int) -> None:
        await self.link.delete_message(name, seq)

    async def drop(self, name: str) -> None:
        await self.link.delete_stream(name)
        await self.link.put_stream(STREAMS[name], "put", None, False)

    async def restore(self, name: str) -> None:
        data = await archive_of(self.link, name)
        await self.link.delete_stream(name)
        await restored(self.link, data, name)
        now_s = asyncio.get_running_loop().time()
        self.used_s.update({key: now_s for key in self.used_s if key[0] == name})

    async def consume(self, name: str, consumer: str, idle_s: int | None, most: int) -> None:
        config = ConsumerConfig(
            name=consumer,
            durable=idle_s != 2,
            inactive_threshold_ns=(idle_s or 0) * NS_PER_S,
            max_deliver=most,
            ack_wait_ns=NS_PER_S,
        )
        await self.link.put_consumer(name, config, "put", None, False)
        self.used_s[name, consumer] = asyncio.get_running_loop().time()

    async def pull(self, name: str, consumer: str, batch: int) -> None:
        asked = PullRequest(stream=name, consumer=consumer, batch=batch, no_wait=True)
        await self.link.pull(asked)
        self.used_s[name, consumer] = asyncio.get_running_loop().time()

    async def leave(self, name: str, consumer: str) -> None:
        await self.link.delete_consumer(name, consumer)

    async def later(self, seconds: float) -> None:
        self.clocks.wall_step_ns += round(seconds * NS_PER_S)
        self.clocks.boot_step_ns += round(seconds * NS_PER_S)


@given(st.lists(steps, min_size=10, max_size=30))
@settings(max_examples=max(settings().max_examples // 3, 20), deadline=None)
def test_nothing_that_is_due_is_forgotten(todo: list[tuple[Any, ...]]) -> None:
    async def nothing(*_: object) -> None:
        """A crash came before the removals that a change causes."""

    with patched() as patch, TemporaryDirectory() as folder:
        clocks = Clocks()
        patch.setattr(log_time, "time", clocks)
        patch.setattr(Removals, "enforce_limits", nothing)
        patch.setattr(Removals, "enforce_interest", nothing)
        patch.setattr(by_subject, "REMOVED_MAX", 2)
        asyncio.run(asyncio.wait_for(Play(Path(folder), clocks).run(todo), 10 * PATIENCE_S))


def test_rest_of_a_removal_is_done_by_the_next_tick(tmp_path: Path) -> None:
    async def nothing(*_: object) -> None:
        """The request that removed the consumer ends here."""

    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            kept = msgspec.structs.replace(STREAMS["limits"], max_age_ns=0)
            for config in (kept, STREAMS["interest"]):
                await link.put_stream(config, "create", None, False)
            durable = ConsumerConfig(name="c", durable=True)
            await link.put_consumer("interest", durable, "create", None, False)
            await publish(link, "interest", [PublishMessage("interest.a", None, b"x")] * 3)
            old = PublishMessage("limits.a", None, b"x")
            await publish(link, "limits", [old] * 6)
            await node._housekeeper.tick()
            await publish(link, "limits", [msgspec.structs.replace(old, rollup="sub")])
            await link.delete_consumer("interest", "c")
            rolled, unwanted = (node.streams.shard(one).machine for one in ("limits", "interest"))
            assert rolled.counters.replaced
            assert unwanted.pending_recheck
            await node._housekeeper.tick()
            assert not rolled.counters.replaced
            assert not unwanted.pending_recheck
            assert (rolled.counters.messages, unwanted.counters.messages) == (1, 0)

    with patched() as patch:
        patch.setattr(by_subject, "REMOVED_MAX", 2)
        patch.setattr(Removals, "enforce_interest", nothing)
        asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_acknowledged_deliveries_are_freed_by_the_next_ticks(tmp_path: Path) -> None:
    messages = 200

    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            kept = msgspec.structs.replace(STREAMS["limits"], max_age_ns=0)
            await link.put_stream(kept, "create", None, False)
            config = ConsumerConfig(name="c", durable=True, ack_policy="all", max_ack_pending=-1)
            await link.put_consumer("limits", config, "create", None, False)
            await publish(link, "limits", [PublishMessage("limits.a", None, b"x")] * messages)
            pull = PullRequest(stream="limits", consumer="c", batch=messages, no_wait=True)
            pulled = await link.pull(pull)
            ack = AckItem(*pulled.address(pulled.deliveries[-1]), [messages], "ack")
            await link.acknowledge("limits", "c", [ack], True)
            machine = node.streams.shard("limits").machine
            ticks = 0
            while machine.dropping:
                ticks += 1
                await node._housekeeper.tick()
            assert 1 < ticks < messages
            consumer = machine.consumer("c")
            assert consumer is not None
            assert not consumer.pending.has_dropped

    with patched() as patch:
        patch.setattr(pending_deliveries, "CHUNK", 4)
        asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_what_is_due_later_is_done_then(tmp_path: Path) -> None:
    """A TTL in a stream without ``max_age``; a consumer that was used since the last look at it."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + clocks.boot_step_ns / NS_PER_S  # type: ignore[method-assign]
        async with running(tmp_path) as node:
            link = LocalLink(node)

            async def after(seconds: int) -> None:
                clocks.wall_step_ns += seconds * NS_PER_S
                clocks.boot_step_ns += seconds * NS_PER_S
                await node._housekeeper.tick()

            kept = msgspec.structs.replace(STREAMS["limits"], max_age_ns=0)
            await link.put_stream(kept, "create", None, False)
            ephemeral = ConsumerConfig(
                name="c", durable=False, inactive_threshold_ns=100 * NS_PER_S
            )
            await link.put_consumer("limits", ephemeral, "create", None, False)
            brief = PublishMessage("limits.a", None, b"x", ttl_ns=60 * NS_PER_S)
            await publish(link, "limits", [brief, PublishMessage("limits.a", None, b"x")])
            machine = node.streams.shard("limits").machine
            await after(0)
            await after(50)
            assert machine.counters.messages == 2
            await link.pull(PullRequest(stream="limits", consumer="c", batch=1, no_wait=True))
            await after(60)  # a look, ten seconds after the consumer could first be inactive
            assert (machine.counters.messages, machine.consumer("c") is None) == (1, False)
            await after(60)
            assert machine.consumer("c") is None

    clocks = Clocks()
    with patched() as patch:
        patch.setattr(log_time, "time", clocks)
        asyncio.run(asyncio.wait_for(scene(), 20 * PATIENCE_S))  # its clock is moved


# Nothing that is not -----------------------------------------------------------------------------


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the looks at streams, shards and consumers; note blocks that the loop itself reads."""
    calls: Counter[str] = Counter()
    here = threading.get_ident()

    def counting(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counts(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            if threading.get_ident() == here:
                calls[f"{name} on the loop"] += 1
            return call(*args, **named)

        patch.setattr(owner, name, counts)

    with monkeypatch.context() as patch:
        for owner, name in (
            (StreamManager, "stream_of"),
            (StreamManager, "listed"),
            (StreamManager, "taken_shard_ids"),
            (ConsumerManager, "find"),
            (BlockStore, "load"),
            (BlockStore, "load_each"),
            (housekeeper, "due_ns"),
        ):
            counting(owner, name)
        yield calls


def test_idle_node_looks_at_no_stream_and_no_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 30

    async def tick(node: StorageNode) -> None:
        await node._housekeeper.tick()
        await node.compactor.tick()
        await node.shredder.tick()

    async def made() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            for at in range(count):
                name = f"S{at}"
                config = StreamConfig(name=name, subjects=(name,), max_age_ns=3_600 * NS_PER_S)
                await link.put_stream(config, "create", None, False)
                await publish(link, name, [PublishMessage(name, None, b"x")] * 3)
                await link.delete_message(name, 2)
                for consumer in ("c", "d"):
                    durable = ConsumerConfig(name=consumer, durable=True)
                    await link.put_consumer(name, durable, "create", None, False)

    async def scene() -> None:
        await made()
        async with running(tmp_path) as node:
            with counted(monkeypatch) as calls:
                await tick(node)
                # The times of the first messages are read once, and not by the event loop.
                assert calls["load_each"] == count
                assert not calls["load_each on the loop"] + calls["load on the loop"]
                assert not calls["find"]
                await tick(node)
                calls.clear()
                for _ in range(5):
                    await tick(node)
                assert calls == {}
                await publish(LocalLink(node), "S1", [PublishMessage("S1", None, b"x")])
                calls.clear()
                await tick(node)
                assert calls["due_ns"] == 1

    with patched():
        asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_consumer_that_nobody_asks_for_after_a_restart_gives_up_on_messages(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            kept = msgspec.structs.replace(STREAMS["limits"], max_age_ns=0)
            await link.put_stream(kept, "create", None, False)
            await publish(link, "limits", [PublishMessage("limits.a", None, b"x")])
            once = ConsumerConfig(name="c", durable=True, max_deliver=1, ack_wait_ns=NS_PER_S)
            await link.put_consumer("limits", once, "create", None, False)
            asked = PullRequest(stream="limits", consumer="c", batch=1)
            assert len((await link.pull(asked)).deliveries) == 1
        async with running(tmp_path) as node:
            machine = node.streams.shard("limits").machine.consumer("c")
            assert machine is not None
            await wait_until(lambda: not machine.pending)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
