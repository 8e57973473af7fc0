"""Clients that remove messages in every way, and look for what should be gone."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.publishing import publish
from tests.sim.load import PAUSE_S, Clients, Work, passing, until_done

GONE: Final = "GONE"
_SUBJECTS: Final = "gone.a", "gone.b", "gone.c"
_LOOKS: Final = 5


@dataclass(slots=True)
class _Stored:
    """A message that was acknowledged; its content is found nowhere else."""

    subject: str
    content: bytes


class Removals:
    """Publishes, deletes, purges and erases. One client does it all, so it knows what is there."""

    def __init__(self, clients: Clients) -> None:
        self.producers: dict[str, Work] = {"remover": self._remove}
        self.consumers: dict[str, Work] = {}
        self._clients = clients
        self._stored: dict[int, _Stored] = {}
        # Sequences whose removal was confirmed, and those that may have been removed.
        self._gone: set[int] = set()
        self._unsure: set[int] = set()
        self._seen_again: list[int] = []
        # By id of the erasure: the contents that its receipt is about.
        self._erasures: dict[str, list[bytes]] = {}
        self._found: list[str] = []

    async def prepare(self, link: StorageLink, replicas: int) -> None:
        """Create the stream."""
        config = StreamConfig(name=GONE, subjects=("gone.>",), num_replicas=replicas)
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
        for contents in self._erasures.values():
            self._search(contents)
        there = {one.seq: one.payload for one in self._clients.stored(GONE)}
        expected = self._stored.keys() - self._gone - self._unsure
        return {
            "removed and seen again": sorted(there.keys() & self._gone) + self._seen_again,
            "lost beside what was removed": [
                seq for seq in sorted(expected) if there.get(seq) != self._stored[seq].content
            ],
            "erased and on a disk": self._found,
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
        subject = random.choice(_SUBJECTS)
        content = b"<%d %s>" % (number, random.randbytes(8).hex().encode())
        content += b"." * random.randrange(3_000)
        [result] = (await publish(link, GONE, [PublishMessage(subject, None, content)])).results
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
            await self._confirmed({seq}, link.delete_message(GONE, seq))
        elif chance < 0.5:
            below = {one for one in there if one < seq and self._stored[one].subject == subject}
            await self._confirmed(below, link.purge_stream(GONE, subject, seq, 0))
        elif chance < 0.55:
            below = {one for one in there if one < seq}
            await self._confirmed(below, link.purge_stream(GONE, "", seq, 0))
        elif chance < 0.65:
            some = random.sample(there, min(len(there), random.randint(1, 3)))
            await self._erase(link, some, "", some)
        elif chance < 0.68:
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
        self, link: StorageLink, seqs: list[int], subject: str, removed: list[int]
    ) -> None:
        try:
            receipt = await link.erase(GONE, seqs, subject)
        except ApiError as error:
            if error.applied is not False:
                self._unsure |= set(removed)
            raise
        self._gone |= set(removed)
        contents = [self._stored[seq].content for seq in removed]
        self._erasures[receipt.erasure_id] = contents

    async def _look(self, link: StorageLink, random: Random) -> None:
        """Look for a removed message, and for traces of an erased one whose receipt is complete."""
        if self._gone:
            seq = random.choice(sorted(self._gone))
            try:
                await link.get_message(GONE, seq)
            except ApiError as error:
                if error.spec is not errors.MESSAGE_NOT_FOUND:
                    raise
            else:
                self._seen_again.append(seq)
        if self._erasures and random.random() < 1 / _LOOKS:
            erasure_id = random.choice(list(self._erasures))
            receipt = await link.erasure(erasure_id, 0)
            if receipt.status == "done":
                self._search(self._erasures[erasure_id])

    async def _wait_for_receipts(self, link: StorageLink) -> None:
        for erasure_id in self._erasures:
            while True:
                receipt = await until_done(
                    lambda erasure_id=erasure_id: link.erasure(erasure_id, 10**9)
                )
                if receipt.status == "done":
                    break

    def _search(self, contents: list[bytes]) -> None:
        """Note the nodes whose disks have any of the contents."""
        marks = [content.partition(b">")[0] for content in contents]
        for name, node in self._clients.cluster.nodes.items():
            for where, data in node.disk.contents():
                self._found += [f"{mark!r} on {name} in {where}" for mark in marks if mark in data]
