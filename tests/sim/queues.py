"""Streams whose messages go once they are settled, and a consumer that gives up."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final, Literal

from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckItem, PullRequest
from tests.cluster.journal import Journal
from tests.sim.load import LOAD, PAUSE_S, Clients, Work, passing, until_done

_TRIES: Final = 3
_FEW: Final = "few"
# By stream: its retention and its consumers.
_QUEUES: Final[dict[str, tuple[Literal["workqueue", "interest"], tuple[str, ...]]]] = {
    "WORK": ("workqueue", ("worker",)),
    "NEWS": ("interest", ("left", "right")),
}


class Queues:
    """A work queue, a stream that keeps what somebody waits for, and `max_deliver`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._journals = {stream: Journal() for stream in _QUEUES}
        # (sequence, attempt) of each delivery to the consumer that gives up.
        self._attempts: list[tuple[int, int]] = []
        self.producers: dict[str, Work] = {
            f"to {stream}": partial(self._publish, stream) for stream in _QUEUES
        }
        self.consumers: dict[str, Work] = {
            f"{consumer} of {stream}": partial(self._consume, stream, consumer)
            for stream, (_, consumers) in _QUEUES.items()
            for consumer in consumers
        }
        self.consumers[_FEW] = self._give_up

    async def prepare(self, link: StorageLink, replicas: int) -> None:
        """Create the streams and their consumers."""
        for name, (retention, consumers) in _QUEUES.items():
            config = StreamConfig(
                name=name,
                subjects=(f"{name.lower()}.>",),
                num_replicas=replicas,
                retention=retention,
            )
            await until_done(lambda config=config: link.put_stream(config, "put", None, False))
            for consumer in consumers:
                settings = ConsumerConfig(name=consumer, durable=True, ack_wait_ns=10**9)
                await self._put(link, name, settings)
        few = ConsumerConfig(
            name=_FEW, durable=True, max_deliver=_TRIES, backoff_ns=(10**8, 3 * 10**8)
        )
        await self._put(link, LOAD, few)

    async def _put(self, link: StorageLink, stream: str, config: ConsumerConfig) -> None:
        await until_done(lambda: link.put_consumer(stream, config, "put", None, False))

    def is_complete(self) -> bool:
        """Whether every consumer got everything."""
        return all(
            self._journals[stream].wait_for_all_delivered(consumer, 0)
            for stream, (_, consumers) in _QUEUES.items()
            for consumer in consumers
        )

    def finish(self) -> dict[str, Sequence[object]]:
        """The broken promises."""
        tries = Counter(seq for seq, _ in self._attempts)
        found: dict[str, Sequence[object]] = {
            "delivered more often than allowed": [
                f"{seq}: {count}" for seq, count in tries.items() if count > _TRIES
            ],
            "attempts that were counted twice": [
                one for one, count in Counter(self._attempts).items() if count > 1
            ],
        }
        for stream, journal in self._journals.items():
            found[f"{stream}: delivered again after a confirmed acknowledgement"] = [
                f"{one.seq} to {one.consumer}"
                for one in journal.deliveries
                if one.asked_s > journal.settled_s.get((one.consumer, one.seq), float("inf"))
            ]
            found[f"{stream}: acknowledged under two sequences"] = [
                name for name, entry in journal.sent.items() if len(entry.seqs) > 1
            ]
            found[f"{stream}: settled by all and still there"] = self._left(stream, journal)
        return found

    def _left(self, stream: str, journal: Journal) -> list[int]:
        consumers = _QUEUES[stream][1]
        return [
            one.seq
            for one in self._clients.stored(stream)
            if all((consumer, one.seq) in journal.settled_s for consumer in consumers)
        ]

    async def _publish(self, stream: str, link: StorageLink, name: str, random: Random) -> None:
        name = name.replace(" ", "-")
        journal = self._journals[stream]
        await self._clients.publish_numbered(link, name, random, stream, journal)

    async def _consume(
        self, stream: str, consumer: str, link: StorageLink, name: str, random: Random
    ) -> None:
        del name
        await self._clients.consume(link, random, stream, consumer, self._journals[stream])

    async def _give_up(self, link: StorageLink, name: str, random: Random) -> None:
        """Pull, and acknowledge half of the messages."""
        del name
        while self._clients.consuming:
            async with passing(PAUSE_S):
                request = PullRequest(stream=LOAD, consumer=_FEW, batch=50, expires_ns=2 * 10**8)
                pull = await link.pull(request)
                self._attempts += [(one.message.seq, one.num_delivered) for one in pull.deliveries]
                items = [
                    AckItem(*pull.address(one), [one.message.seq], "ack")
                    for one in pull.deliveries
                    if one.message.seq % 2
                ]
                if items:
                    await link.acknowledge(LOAD, _FEW, items, random.random() < 0.5)
