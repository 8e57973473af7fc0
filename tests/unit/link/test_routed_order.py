"""The order of publishes over changes of the leader."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.partition import shard_of
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult
from contrail_link.routed.flows import SETTLE_S, WAITING_BYTES_MAX
from contrail_link.routed.link import RoutedLink
from tests.unit.link.routed_rig import SHARDS, Cluster, run_virtually, wait_virtually

AGAIN_S = 5.0
ANSWER_S = 10.0
STREAMS = ("S", "T", "SPREAD")


class Socket:
    """Publishes numbered messages without waiting, and notes the outcome of each."""

    def __init__(self) -> None:
        self.cluster = Cluster(3)
        self.nodes = self.cluster.nodes
        self.link = RoutedLink(self.cluster.routed, AGAIN_S, ANSWER_S)
        self.outcomes: dict[int, PublishOutcome] = {}
        self.sent = 0
        self.in_columns: set[int] = set()

    def message(self, subject: str, *, safe: bool = True, size: int = 0) -> PublishMessage:
        self.sent += 1
        number = str(self.sent)
        return PublishMessage(
            subject, None, number.encode().ljust(size), f"id{number}" if safe else None
        )

    def publish(self, *messages: PublishMessage) -> None:
        """Publish single messages that arrived together."""
        numbers = [int(one.payload) for one in messages]

        def done(positions: list[int], outcome: PublishOutcome) -> None:
            for at in positions:
                assert numbers[at] not in self.outcomes
                self.outcomes[numbers[at]] = outcome

        self.link.publish_each_then(list(messages), done)

    def publish_batch(self, stream: str, *messages: PublishMessage, columns: bool) -> None:
        def done(outcome: PublishOutcome) -> None:
            for one in messages:
                assert int(one.payload) not in self.outcomes
                self.outcomes[int(one.payload)] = outcome

        content = list(messages)
        if columns:
            self.in_columns.update(int(one.payload) for one in messages)
        try:
            self.link.publish_then(stream, MessageBatch.of(content) if columns else content, done)
        except ApiError as refusal:
            done(refusal)

    async def until_answered(self) -> None:
        while len(self.outcomes) < self.sent:
            await wait_virtually(0.01)

    def stored(self, stream: str) -> list[int]:
        return [int(one.payload) for one in self.cluster.stored[stream]]

    def acked(self) -> set[int]:
        return {
            number
            for number, one in self.outcomes.items()
            if isinstance(one, PublishAck) and not any(run.code for run in one.results)
        }


@pytest.mark.parametrize("lose", ["", "before", "after"])
def test_messages_keep_their_order_over_changes_of_the_leader(lose: str) -> None:
    """Some are refused or lost at the old leader while later ones are sent."""

    async def scenario() -> None:
        socket = Socket()
        for node in socket.nodes:
            node.delay_s = 0.02
        for at in range(600):
            if at % 100 == 50:
                leader = socket.nodes[at // 100 % 3]
                leader.lead()
                for node in socket.nodes:
                    node.lose = "" if node is leader else lose
            if at % 10:
                socket.publish(socket.message("S.a"), socket.message("S.b"))
            else:
                socket.publish_batch("S", socket.message("S.a"), columns=at % 20 == 0)
            await wait_virtually(0.001)
        await socket.until_answered()
        assert socket.acked() == set(range(1, socket.sent + 1))
        assert socket.stored("S") == sorted(socket.stored("S"))
        assert len(socket.stored("S")) == socket.sent

    run_virtually(scenario())


def test_messages_of_unknown_streams_keep_their_order() -> None:
    """The first ones go to a node that does not lead; what they teach must not help later ones."""

    async def scenario() -> None:
        socket = Socket()
        socket.nodes[2].lead("S")
        socket.nodes[1].lead("T")
        for node in socket.nodes:
            node.delay_s = 0.01
        for _ in range(40):
            socket.publish(socket.message("S.a"), socket.message("T.a"), socket.message("S.b"))
            await wait_virtually(0.002)
        await socket.until_answered()
        assert len(socket.acked()) == 120
        for stream in "ST":
            assert socket.stored(stream) == sorted(socket.stored(stream))
        assert not socket.link._publisher.flows._flows  # pyright: ignore[reportPrivateUsage]

    run_virtually(scenario())


def test_batches_for_several_leaders_are_stored_in_order_while_nothing_is_known_of_them() -> None:
    """A process that begins, or a stream that other nodes lead from now on."""

    async def scenario() -> None:
        socket = Socket()
        for node in socket.nodes:
            node.delay_s = 0.01
        for at in range(60):
            subjects = [f"SPREAD.{name}" for name in "abcdefgh"]
            if at % 3:
                batch = [socket.message(one, safe=at % 2 == 0) for one in subjects]
                socket.publish_batch("SPREAD", *batch, columns=at % 3 == 1)
            else:
                socket.publish(*[socket.message(one) for one in subjects])
            if at == 40:
                socket.cluster.spread.reverse()
            await wait_virtually(0.001)
        await socket.until_answered()
        assert len(socket.acked()) == socket.sent
        by_subject: dict[str, list[int]] = {}
        for one in socket.cluster.stored["SPREAD"]:
            by_subject.setdefault(one.subject, []).append(int(one.payload))
        assert len(by_subject) == 8
        for numbers in by_subject.values():
            assert numbers == sorted(set(numbers))
            assert len(numbers) == 60
        assert not socket.link._publisher.flows._flows  # pyright: ignore[reportPrivateUsage]

    run_virtually(scenario())


def test_silent_node_delays_later_messages_for_a_short_time_only() -> None:
    """What comes back from it after that is refused: it would be overtaken."""

    async def scenario() -> None:
        socket = Socket()
        clock = asyncio.get_running_loop()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        socket.nodes[0].delay_s = 3.0
        socket.publish(socket.message("S.a", safe=False))
        socket.nodes[1].lead()
        socket.nodes[0].delay_s = 0.001
        await socket.link.link.stream_info("S")
        begun_s = clock.time()
        socket.publish(socket.message("S.a"))
        while 3 not in socket.outcomes:
            await wait_virtually(0.01)
        assert clock.time() - begun_s < SETTLE_S + 0.1
        await socket.until_answered()
        assert socket.stored("S") == [1, 3]
        late = socket.outcomes[2]
        assert isinstance(late, ApiError)
        assert (late.spec, late.applied) == (errors.NOT_READY, False)

    run_virtually(scenario())


def test_bytes_that_wait_for_a_leader_are_bounded() -> None:
    async def scenario() -> None:
        socket = Socket()
        socket.cluster.leaders["S"] = None
        size = WAITING_BYTES_MAX // 8
        for _ in range(10):
            socket.publish(socket.message("S.a", size=size))
            await wait_virtually(0.01)
        socket.publish_batch("S", socket.message("S.a", size=size), columns=True)
        # The first one asks for the leader, and seven fit beside it.
        refused = {9, 10, 11}
        assert set(socket.outcomes) == refused
        for number in refused:
            found = socket.outcomes[number]
            assert isinstance(found, ApiError)
            assert (found.spec, found.applied) == (errors.OVERLOADED, False)
            assert found.detail == "too many bytes wait for a leader of their stream"
        socket.publish(socket.message("T.a"))  # another stream, which has a leader
        await wait_virtually(0.1)
        assert socket.acked() == {12}
        socket.nodes[1].lead()
        await socket.until_answered()
        assert socket.stored("S") == list(range(1, 9))
        socket.cluster.leaders["S"] = None
        for _ in range(8):
            socket.publish(socket.message("S.a", size=size))
        await wait_virtually(1.0)
        assert len(socket.outcomes) == 12  # there is room again

    run_virtually(scenario())


def test_messages_that_wait_are_refused_in_time() -> None:
    async def scenario() -> None:
        socket = Socket()
        socket.cluster.leaders["S"] = None
        clock = asyncio.get_running_loop()
        for _ in range(100):
            socket.publish(socket.message("S.a"))
            await wait_virtually(0.01)
        await socket.until_answered()
        assert clock.time() < 1.0 + AGAIN_S + 0.5
        assert {one.spec for one in socket.outcomes.values()} == {errors.NOT_READY}  # type: ignore[union-attr]
        assert {one.applied for one in socket.outcomes.values()} == {False}  # type: ignore[union-attr]
        socket.nodes[1].lead()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        assert socket.stored("S") == [101]

    run_virtually(scenario())


def test_node_that_stops_does_not_hold_up_those_behind_what_it_was_sent_again() -> None:
    async def scenario() -> None:
        socket = Socket()
        clock = asyncio.get_running_loop()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        socket.cluster.leaders["S"] = None
        for at in range(4):
            socket.publish(socket.message("S.a", safe=at == 2))
        await wait_virtually(0.5)
        stopped, reached = socket.nodes[1], asyncio.Event()
        publish_then = stopped.publish_then

        def publish_and_stop(*arguments: Any) -> None:
            stopped.delay_s = 8.0
            publish_then(*arguments)
            socket.nodes[2].lead()
            reached.set()

        stopped.publish_then = publish_and_stop  # type: ignore[method-assign]
        stopped.lead()
        await reached.wait()
        begun_s = clock.time()
        while len(socket.outcomes) < 4:
            await wait_virtually(0.01)
        assert clock.time() - begun_s < SETTLE_S + 0.5
        assert socket.acked() == {1, 3, 4, 5}
        await socket.until_answered()
        assert socket.stored("S") == [1, 3, 4, 5]
        late = socket.outcomes[2]
        assert isinstance(late, ApiError)
        assert (late.spec, late.applied) == (errors.NOT_READY, False)

    run_virtually(scenario())


def test_message_that_comes_back_is_not_sent_after_a_later_one() -> None:
    """The leader refuses one of those that had waited, and stores the ones behind it."""

    async def scenario() -> None:
        socket = Socket()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        socket.cluster.leaders["S"] = None
        for _ in range(300):
            socket.publish(socket.message("S.a"))
        await wait_virtually(0.5)
        node, check = socket.nodes[1], socket.nodes[1].check
        node.delay_s = 0
        refused = 0

        def check_once(stream: str) -> None:
            nonlocal refused
            check(stream)
            refused += len(socket.stored("S")) > 1
            if refused == 1:
                raise ApiError(errors.NOT_LEADER, applied=False)

        node.check = check_once  # type: ignore[method-assign]
        node.lead()
        await socket.until_answered()
        assert refused > 1
        stored = socket.stored("S")
        assert stored == sorted(stored)
        assert len(stored) == 300

    run_virtually(scenario())


def test_node_that_goes_away_is_not_asked_again_and_again() -> None:
    async def scenario() -> None:
        socket = Socket()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        socket.cluster.leaders["S"] = None
        for _ in range(10):
            socket.publish_batch("S", socket.message("S.a"), columns=True)
        await wait_virtually(0.5)
        leader, store = socket.nodes[1], socket.cluster.store
        again = socket.link.again

        def store_last(stream: str, message: PublishMessage) -> PubResult:
            leader.down = True
            return store(stream, message)

        socket.cluster.store = store_last  # type: ignore[method-assign]
        leader.lead()
        await wait_virtually(1.0)
        assert len(socket.stored("S")) == 2
        # Each of those that wait at most once, and then one at a time with pauses.
        assert socket.link.again - again < 30
        socket.cluster.store = store  # type: ignore[method-assign]
        leader.down = False
        await socket.until_answered()
        assert socket.stored("S") == list(range(1, 12))

    run_virtually(scenario())


@pytest.mark.parametrize("turns", [0, 5])
def test_messages_that_wait_are_unknown_when_the_link_is_closed(turns: int) -> None:
    async def scenario() -> None:
        socket = Socket()
        socket.cluster.leaders["S"] = None
        socket.publish(socket.message("S.a"), socket.message("S.a"))
        while socket.link._publisher.flows.again < 1:  # pyright: ignore[reportPrivateUsage]
            await wait_virtually(0.0001)
        for _ in range(turns):
            await asyncio.sleep(0)
        socket.publish(socket.message("S.a"))
        await socket.link.close()
        assert {one.spec for one in socket.outcomes.values()} == {errors.OUTCOME_UNKNOWN}  # type: ignore[union-attr]
        assert len(socket.outcomes) == 3

    run_virtually(scenario())


def test_nothing_is_sent_again_after_the_link_is_closed() -> None:
    async def scenario() -> None:
        socket = Socket()
        socket.publish(socket.message("S.a"))
        await socket.until_answered()
        socket.nodes[0].delay_s = 0.1
        socket.publish(socket.message("S.a"))
        socket.cluster.leaders["S"] = None
        await socket.link.close()
        await socket.until_answered()
        assert isinstance(socket.outcomes[2], ApiError)
        assert asyncio.get_running_loop().time() < 1.0

    run_virtually(scenario())


def disturb(socket: Socket, chance: random.Random) -> None:
    node = chance.choice(socket.nodes)
    what = chance.randrange(8)
    if what < 3:
        node.lead(*chance.choice((("S",), ("T",), ("S", "T"))))
        chance.shuffle(socket.cluster.spread)
    elif what == 3:
        socket.cluster.leaders["S"] = None
    elif what == 4:
        node.down = not node.down
    elif what == 5:
        node.lose = "" if node.lose else "before"
    elif what == 6:
        node.hint = chance.choice((node.right_hint, lambda stream: "", lambda stream: "n2"))
    else:
        node.delay_s = chance.choice((0.001, 0.01, 0.1))


@pytest.mark.parametrize("seed", range(20))
def test_acknowledged_messages_are_in_order_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)

    async def scenario() -> None:
        socket = Socket()
        for _ in range(150):
            for _ in range(chance.randrange(3)):
                stream, safe = chance.choice(STREAMS), chance.random() < 0.7
                count = chance.randint(1, 3)
                if chance.random() < 0.2:
                    batch: Any = [
                        socket.message(f"{stream}.{chance.choice('abcd')}", safe=safe)
                        for _ in range(count)
                    ]
                    socket.publish_batch(stream, *batch, columns=chance.random() < 0.5)
                else:
                    subjects = [
                        f"{chance.choice(STREAMS)}.{chance.choice('abcd')}" for _ in range(count)
                    ]
                    socket.publish(*[socket.message(one, safe=safe) for one in subjects])
            if chance.random() < 0.1:
                disturb(socket, chance)
            await wait_virtually(chance.choice((0.0, 0.001, 0.02, 0.2)))
        await socket.until_answered()
        acked = socket.acked()
        by_leader: dict[tuple[str, int], list[int]] = {}
        for stream in STREAMS:
            for one in socket.cluster.stored[stream]:
                shard = shard_of(one.subject, SHARDS) if stream == "SPREAD" else 0
                by_leader.setdefault((stream, shard), []).append(int(one.payload))
        for stored in by_leader.values():
            in_order = [one for one in stored if one in acked - socket.in_columns]
            assert in_order == sorted(in_order)
        assert acked <= {*itertools.chain.from_iterable(by_leader.values())}
        refused = {at: str(one) for at, one in socket.outcomes.items() if at not in acked}
        overtaken = {at for at, why in refused.items() if "a later message was stored" in why}
        assert not overtaken & socket.in_columns

    run_virtually(scenario())
