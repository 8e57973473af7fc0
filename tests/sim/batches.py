"""Producers that number their batches: no message is stored twice, however late it is repeated."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Final

from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError, from_code
from contrail_common.model import Numbered, PublishMessage, StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.publishing import publish
from tests.sim.load import PAUSE_S, Clients, Work, check_passing, until_done

_STREAM: Final = "BATCHES"
_WINDOW_NS: Final = 10**8
_MESSAGES_MAX: Final = 8
_PARTS_MAX: Final = 3
_REPEATED: Final = 0.2


class Batches:
    """Two producers, and a stream with a window that is shorter than most faults."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.producers: dict[str, Work] = {"b0": self._publish, "b1": self._publish}
        self.consumers: dict[str, Work] = {}
        # By producer: what is stored for certain, and what may be.
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        self._open: defaultdict[str, set[str]] = defaultdict(set)
        self._stored_again: list[str] = []

    async def prepare(self, link: StorageLink, replicas: int) -> None:
        """Create the stream."""
        config = StreamConfig(
            name=_STREAM,
            subjects=("batches.>",),
            num_replicas=replicas,
            duplicate_window_ns=_WINDOW_NS,
        )
        await until_done(lambda: link.put_stream(config, "put", None, False))

    def is_complete(self) -> bool:
        """Whether the consumers have everything: there are none."""
        return True

    def finish(self) -> dict[str, Sequence[object]]:
        """The broken promises."""
        stored = Counter(one.payload.decode() for one in self._clients.stored(_STREAM))
        known = set().union(*self._known.values())
        return {
            "of numbered batches, lost": sorted(known - stored.keys()),
            "of numbered batches, stored twice": sorted(
                text for text, count in stored.items() if count > 1
            ),
            "of numbered batches, never sent": sorted(
                stored.keys() - known.union(*self._open.values())
            ),
            "of earlier batches, stored": self._stored_again,
        }

    async def _publish(self, link: StorageLink, name: str, random: Random) -> None:
        """Send each batch in parts until all of it is stored, and some of them once more."""
        sent: list[tuple[int, list[str]]] = []
        number = 0
        while self._clients.publishing:
            number += random.randint(1, 3)
            texts = [f"{name}-{number}-{at}" for at in range(random.randint(1, _MESSAGES_MAX))]
            self._open[name] = set(texts)
            parts = [
                random.sample(texts, random.randint(1, len(texts)))
                for _ in range(random.randint(0, _PARTS_MAX))
            ]
            sending = [self._until_stored(link, name, number, part) for part in (*parts, texts)]
            # Parts overlap: whichever is stored first has the message.
            if None in await asyncio.gather(*sending):
                return
            self._known[name].update(texts)
            sent.append((number, texts))
            if random.random() < _REPEATED:
                again = random.choice(sent)
                if await self._until_stored(link, name, *again):
                    self._stored_again.append(f"{name}-{again[0]}")
            await asyncio.sleep(random.random() * PAUSE_S)

    async def _until_stored(
        self, link: StorageLink, name: str, number: int, texts: list[str]
    ) -> int | None:
        """How many of the messages were new, once all are stored; None if the clients end first."""
        while self._clients.publishing:
            batch = MessageBatch.of(
                [PublishMessage(f"batches.{name}", None, one.encode(), one) for one in texts]
            )
            batch.numbered = Numbered(name, number)
            try:
                results = (await publish(link, _STREAM, batch)).results
                for one in results:
                    if one.code:
                        raise from_code(one.code, one.detail)
            except ApiError as error:
                check_passing(error)
                await asyncio.sleep(PAUSE_S)
            else:
                return sum(one.count for one in results if not one.duplicate)
        return None
