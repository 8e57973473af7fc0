"""What consumers, ids and expectations keep while the leadership of a stream moves about."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.consume import AckItem, PullRequest, PullResult
from contrail_link.contract.read import LastRequest
from contrail_link.publishing import publish
from contrail_replicator.group import RaftGroup
from contrail_storage.link import LocalLink
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, turn, until

MINUTE_NS = 60 * NS_PER_S
YEAR_NS = 365 * 24 * 60 * MINUTE_NS
Call = Callable[[LocalLink], Awaitable[Any]]


async def create(nodes: Nodes, **rules: Any) -> int:
    """Create a stream; return its group."""
    config = StreamConfig(name="S", subjects=("S.>",), num_replicas=3, **rules)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed("S")
    [group] = nodes["a"].meta.streams["S"].groups
    return group


async def move(nodes: Nodes, group: int, target: str) -> None:
    """Make ``target`` the leader of a group, and wait until it serves."""
    while nodes.leader(group) != target:
        for node in nodes.all():
            cast(RaftGroup, node.groups[group]).hand_over(target)
        await turn()


async def cut_off(nodes: Nodes, group: int, leader: str) -> None:
    """Cut the leader off until another one leads: entries on their way are lost."""
    nodes.links.part(leader)
    others = [name for name in NAMES if name != leader]
    await until(lambda: any(nodes[name].groups.leads(group) for name in others))
    nodes.links.heal()


async def one(nodes: Nodes, payload: bytes, **given: Any) -> tuple[int, bool]:
    """Publish one message; return its sequence, and whether it was stored earlier."""
    message = PublishMessage("S.x", None, payload, **given)
    ack = await nodes.call("a", lambda link: publish(link, "S", [message]))
    return ack.results[0].seq, ack.results[0].duplicate


def test_clocks_that_were_slow_until_a_change_of_leader_shorten_no_window(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await create(nodes)
            await move(nodes, group, "b")
            await one(nodes, b"0")
            config = ConsumerConfig(name="c", durable=True, ack_wait_ns=MINUTE_NS)
            await nodes.call("b", lambda link: link.put_consumer("S", config, "put", None, False))
            stored = await one(nodes, b"1", msg_id="id")
            pull = PullRequest(stream="S", consumer="c", batch=9, no_wait=True)
            pulled = await nodes.call("b", lambda link: link.pull(pull))
            assert [each.message.seq for each in pulled.deliveries] == [1, 2]
            await nodes.call("b", lambda link: link.consumer_info("S", "c"))
            times = nodes["b"].groups
            before_ns, elapsed_ns = times.time_ns(group), times.elapsed_ns(group)
            # All clocks were slow and are set right: log time of this term does not follow.
            for clocks in nodes.links.clocks.values():
                clocks.wall_step_ns = 9 * MINUTE_NS
            await until(lambda: hears_right_clocks(nodes, "c"))
            assert times.time_ns(group) - before_ns in range(MINUTE_NS)
            await move(nodes, group, "c")
            times = nodes["c"].groups
            assert times.time_ns(group) - before_ns in range(9 * MINUTE_NS, 10 * MINUTE_NS)
            assert abs(times.elapsed_ns(group) - elapsed_ns) < MINUTE_NS
            # The window of two minutes has not passed, and the deliveries are not due.
            assert await one(nodes, b"1", msg_id="id") == (stored[0], True)
            assert not (await nodes.call("c", lambda link: link.pull(pull))).deliveries
            # Nor after this member has read its state and the rest of the log from its disk.
            await one(nodes, b"after", msg_id="other")
            await nodes.stop("c")
            await nodes.start("c")
            await move(nodes, group, "c")
            assert await one(nodes, b"1", msg_id="id") == (stored[0], True)
            pulled = await nodes.call("c", lambda link: link.pull(pull))
            assert [each.message.seq for each in pulled.deliveries] == [3]
            await nodes.call("c", lambda link: link.consumer_info("S", "c"))

    asyncio.run(scene())


def hears_right_clocks(nodes: Nodes, name: str) -> bool:
    walls = nodes[name].membership.peer_clocks.walls_ns(NAMES)
    return len(walls) == len(NAMES) and max(walls) - min(walls) < MINUTE_NS


def test_leader_with_the_clock_of_next_year_ages_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await create(nodes, max_age_ns=24 * 60 * MINUTE_NS)
            await move(nodes, group, "b")
            await one(nodes, b"1")
            nodes.links.clocks["a"].wall_step_ns = YEAR_NS
            await move(nodes, group, "a")
            await nodes["a"]._housekeeper.tick()
            seq, _ = await one(nodes, b"2")
            first, second = [
                await nodes.call("a", lambda link, at=at: link.get_message("S", at))
                for at in (1, seq)
            ]
            assert second.time_ns - first.time_ns in range(60 * MINUTE_NS)
            assert nodes["a"].groups.clock_doubts == {}

    asyncio.run(scene())


class Work:
    """Clients of a stream that go on while its leader changes, and what they were told."""

    def __init__(self, nodes: Nodes, seed: int) -> None:
        self.nodes = nodes
        self.random = Random(seed)
        self.stored: dict[str, int] = {}
        self.acked: set[int] = set()
        self.given = Counter[int]()
        self.winners: dict[int, int] = {}
        self.floors: dict[str, int] = {}
        self.ended = False

    async def call(self, call: Call) -> Any:
        """Call the leader; None if the outcome is not known."""
        while True:
            try:
                return await self.nodes.call("a", call)
            except ApiError as error:
                if error.spec is errors.OUTCOME_UNKNOWN:
                    return None
                if not error.spec.retryable:
                    raise
            await turn()

    async def publishes(self) -> None:
        number = 0
        while not self.ended:
            number += 1
            name = f"{number}"
            message = PublishMessage("S.x", None, name.encode(), msg_id=name)
            ack = None
            while ack is None or ack.results[0].code:
                ack = await self.call(lambda link, one=message: publish(link, "S", [one]))
            self.stored[name] = ack.results[0].seq

    async def compares_and_sets(self) -> None:
        last = 0
        while not self.ended:
            expected = Expected(last_subject_seq=last)
            message = PublishMessage("S.register", None, b"", expected=expected)
            ack = await self.call(lambda link, one=message: publish(link, "S", [one]))
            if ack is not None and not ack.results[0].code:
                assert last not in self.winners
                self.winners[last] = ack.results[0].seq
            asked = LastRequest(stream="S", subject="S.register")
            found = await self.call(lambda link, asked=asked: link.last_messages(asked))
            last = found[0][0].seq if found and found[0] else last
            await turn()

    async def pulls(self, consumer: str) -> PullResult | None:
        pull = PullRequest(stream="S", consumer=consumer, batch=5, expires_ns=NS_PER_S // 20)
        return cast(PullResult | None, await self.call(lambda link: link.pull(pull)))

    async def acknowledges(self) -> None:
        while not self.ended:
            before = set(self.acked)
            pulled = await self.pulls("plain")
            if pulled is None:
                continue
            taken = [each.message.seq for each in pulled.deliveries]
            assert not before.intersection(taken)
            done = [seq for seq in taken if self.random.random() < 0.7]
            items = [
                AckItem(*pulled.address(each), [each.message.seq], "ack")
                for each in pulled.deliveries
                if each.message.seq in done
            ]
            if items and await self.call(
                lambda link, some=items: link.acknowledge("S", "plain", some, sync=True)
            ):
                self.acked.update(done)

    async def ignores(self) -> None:
        while not self.ended:
            pulled = await self.pulls("counted")
            for each in [] if pulled is None else pulled.deliveries:
                self.given[each.message.seq] += 1
                assert self.given[each.message.seq] <= each.num_delivered <= 3

    async def watches(self) -> None:
        while not self.ended:
            for name in ("plain", "counted", "newest"):
                info = await self.call(lambda link, name=name: link.consumer_info("S", name))
                if info is not None:
                    assert info.ack_floor.stream_seq >= self.floors.get(name, 0)
                    self.floors[name] = info.ack_floor.stream_seq
            await turn()

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for client in (
                self.publishes,
                self.compares_and_sets,
                self.compares_and_sets,
                self.acknowledges,
                self.acknowledges,
                self.ignores,
                self.watches,
            ):
                tasks.create_task(client())
            yield
            self.ended = True


def test_promises_hold_over_changes_of_leader(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as nodes:
            group = await create(nodes)
            for number in range(7):
                message = PublishMessage(f"S.old.{number % 3}", None, b"")
                await nodes.call("a", lambda link, one=message: publish(link, "S", [one]))
            for name, rules in {
                "plain": {"ack_wait_ns": NS_PER_S // 5},
                "counted": {"ack_wait_ns": NS_PER_S // 10, "max_deliver": 3},
                "newest": {"deliver_policy": "last_per_subject"},
            }.items():
                config = ConsumerConfig(name=name, durable=True, **cast(Any, rules))
                await nodes.call(
                    "a", lambda link, one=config: link.put_consumer("S", one, "put", None, False)
                )
            work = Work(nodes, seed=7)
            async with work.going_on():
                for turn_number in range(6):
                    await move(nodes, group, NAMES[turn_number % 3])
                    if turn_number in (1, 5):
                        await cut_off(nodes, group, NAMES[turn_number % 3])
                    wanted = len(work.acked) + 20, len(work.stored) + 20, len(work.winners) + 5
                    await until(
                        lambda wanted=wanted: (
                            len(work.acked) >= wanted[0]
                            and len(work.stored) >= wanted[1]
                            and len(work.winners) >= wanted[2]
                        )
                    )
            newest = await nodes.call(
                "a",
                lambda link: link.pull(
                    PullRequest(stream="S", consumer="newest", batch=9, no_wait=True)
                ),
            )
            # The list was made when the consumer was, and is that of all members.
            assert [each.message.seq for each in newest.deliveries[:3]] == [5, 6, 7]
            assert len(set(work.stored.values())) == len(work.stored)
            for name, seq in work.stored.items():
                message = await nodes.call("a", lambda link, at=seq: link.get_message("S", at))
                assert message.payload == name.encode()
            assert len(set(work.winners.values())) == len(work.winners)
            shard_id = nodes["a"].meta.streams["S"].shard_id
            copies = [node.applier.shards[shard_id] for node in nodes.all()]
            await until(lambda: len({copy.applied_seq for copy in copies}) == 1)
            assert len({copy.machine.counters.digest for copy in copies}) == 1

    asyncio.run(scene())
