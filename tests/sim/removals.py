"""Clients that remove messages in every way, and look for what should be gone."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Erasure, PublishMessage, StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.publishing import publish
from tests.sim.load import PAUSE_S, Clients, Work, passing, until_done

_LOOKS: Final = 5


@dataclass(slots=True)
class _Stored:
    """A message that was acknowledged; its content is found nowhere else."""

    subject: str
    content: bytes


class Removals:
    """Publishes, deletes, purges and erases. One client does it all, so it knows what is there."""

    stream = "GONE"
    erasure: Erasure = "rewrite"
    erased_subjects = 0.03
    """How often a removal is the erasure of a subject."""

    def __init__(self, clients: Clients) -> None:
        self.producers: dict[str, Work] = {f"remover of {self.stream}": self._remove}
        self.consumers: dict[str, Work] = {}
        self._clients = clients
        self._stored: dict[int, _Stored] = {}
        # Sequences whose removal was confirmed, and those that may have been removed.
        self._gone: set[int] = set()
        self._unsure: set[int] = set()
        self._seen_again: list[int] = []
        # By id of the erasure: bytes that no disk has once it is done.
        self._erasures: dict[str, list[bytes]] = {}
        self._found: list[str] = []

    async def prepare(self, link: StorageLink, replicas: int) -> None:
        """Create the stream."""
        config = StreamConfig(
            name=self.stream,
            subjects=(f"{self.stream.lower()}.>",),
            num_replicas=replicas,
            erasure=self.erasure,
        )
        await until_done(lambda: link.put_stream(config, "put", None, False))

    def is_complete(self) -> bool:
        """Nobody consumes."""
        return True

    def finish(self) -> dict[str, Sequence[object]]:
        """The broken promises."""
        cluster = self._clients.cluster
        task = cluster.client("eraser", self._wait_for_receipts)
        cluster.until(task.done, 120.0)
        task.result()
        for traces in self._erasures.values():
            self._found += self.found_on_disks(traces)
        there = {one.seq: one.payload for one in self._clients.stored(self.stream)}
        expected = self._stored.keys() - self._gone - self._unsure
        seen_again = sorted(there.keys() & self._gone) + self._seen_again
        return {
            f"{self.stream}: removed and seen again": seen_again,
            f"{self.stream}: lost beside what was removed": [
                seq for seq in sorted(expected) if there.get(seq) != self._stored[seq].content
            ],
            f"{self.stream}: erased and on a disk": self._found,
        }

    async def _remove(self, link: StorageLink, name: str, random: Random) -> None:
        del name
        for number in itertools.count(1):
            if not self._clients.publishing:
                return
            async with passing(PAUSE_S):
                await self._store(link, number, random)
            async with passing(PAUSE_S):
                await self._remove_some(link, random)
            async with passing(PAUSE_S):
                await self._look(link, random)
            await asyncio.sleep(random.random() * PAUSE_S)

    async def _store(self, link: StorageLink, number: int, random: Random) -> None:
        subject = f"{self.stream.lower()}.{random.choice('abc')}"
        content = f"<{self.stream} {number} {random.randbytes(8).hex()}>".encode()
        content += b"." * random.randrange(3_000)
        message = PublishMessage(subject, None, content)
        [result] = (await publish(link, self.stream, [message])).results
        if not result.code:
            self._stored[result.seq] = _Stored(subject, content)

    async def _remove_some(self, link: StorageLink, random: Random) -> None:
        there = sorted(self._stored.keys() - self._gone - self._unsure)
        if not there:
            return
        seq = random.choice(there)
        subject = self._stored[seq].subject
        chance = random.random()
        if chance < 0.4:
            await self._confirmed({seq}, link.delete_message(self.stream, seq))
        elif chance < 0.5:
            below = {one for one in there if one < seq and self._stored[one].subject == subject}
            await self._confirmed(below, link.purge_stream(self.stream, subject, seq, 0))
        elif chance < 0.55:
            below = {one for one in there if one < seq}
            await self._confirmed(below, link.purge_stream(self.stream, "", seq, 0))
        elif chance < 0.65:
            some = random.sample(there, min(len(there), random.randint(1, 3)))
            await self._erase(link, some, "", some)
        elif chance < 0.65 + self.erased_subjects:
            if random.random() < 0.2:
                await self._erase(link, [], f"{self.stream.lower()}.*", there)
            else:
                all_of = [one for one in there if self._stored[one].subject == subject]
                await self._erase(link, [], subject, all_of)

    async def _confirmed(self, seqs: set[int], removal: object) -> None:
        """Await a removal, and note the sequences as gone, or as perhaps gone."""
        try:
            await removal  # type: ignore[misc]
        except ApiError as error:
            if error.applied is not False:
                self._unsure |= seqs
            raise
        self._gone |= seqs

    async def _erase(
        self, link: StorageLink, seqs: list[int], pattern: str, removed: list[int]
    ) -> None:
        traces = self._traces(pattern, removed)
        try:
            receipt = await link.erase(self.stream, seqs, pattern)
        except ApiError as error:
            if error.applied is not False:
                self._unsure |= set(removed)
            raise
        self._gone |= set(removed)
        self._erasures[receipt.erasure_id] = traces

    def _traces(self, pattern: str, removed: list[int]) -> list[bytes]:
        """What an erasure must leave on no disk."""
        del pattern
        return [self._stored[seq].content.partition(b">")[0] for seq in removed]

    async def _look(self, link: StorageLink, random: Random) -> None:
        """Look for a removed message, and for traces of an erased one whose receipt is complete."""
        if self._gone:
            seq = random.choice(sorted(self._gone))
            try:
                await link.get_message(self.stream, seq)
            except ApiError as error:
                if error.spec is not errors.MESSAGE_NOT_FOUND:
                    raise
            else:
                self._seen_again.append(seq)
        if self._erasures and random.random() < 1 / _LOOKS:
            erasure_id = random.choice(list(self._erasures))
            receipt = await link.erasure(erasure_id, 0)
            if receipt.status == "done":
                self._found += self.found_on_disks(self._erasures[erasure_id])

    async def _wait_for_receipts(self, link: StorageLink) -> None:
        for erasure_id in self._erasures:
            while True:
                receipt = await until_done(
                    lambda erasure_id=erasure_id: link.erasure(erasure_id, 10**9)
                )
                if receipt.status == "done":
                    break

    def found_on_disks(self, traces: Sequence[bytes]) -> list[str]:
        """Where disks have any of the traces."""
        return [
            f"{one!r} on {name} in {where}"
            for name, node in self._clients.cluster.nodes.items()
            for where, data in node.disk.contents()
            for one in traces
            if one in data
        ]
