"""Random erasures on three nodes that lose each other and restart: in the end no file has them."""

import asyncio
import random
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.support.folders import files_with
from tests.unit.storage.cluster_rig import NAMES, Nodes, running, until
from tests.unit.storage.erase_rig import secret, traces

STEPS = 10
WIPED = 0.3
"""How many of the nodes that return have lost their disk."""
UNSURE = {
    error.code
    for error in (
        errors.OUTCOME_UNKNOWN,
        errors.NOT_LEADER,
        errors.NOT_READY,  # a node that has just returned
        errors.SEQUENCE_NOT_FOUND,
    )
}


class Story:
    """What happened: messages by number with their sequences, and what was erased."""

    def __init__(self, nodes: Nodes, chance: random.Random) -> None:
        self.nodes, self.chance = nodes, chance
        self.seqs: dict[int, int] = {}
        self.erased: set[int] = set()
        self.unsure: set[int] = set()
        self.receipts: list[str] = []
        self.next = 1

    async def write(self, name: str) -> None:
        """Publish a few messages, and erase some of all, through one node."""
        link = LocalLink(self.nodes[name])
        for _ in range(self.chance.randint(1, 5)):
            number, self.next = self.next, self.next + 1
            try:
                ack = await publish(link, "S", [secret(number)])
            except ApiError as error:
                if error.spec.code not in UNSURE:
                    raise
                return
            if ack.results[0].seq:
                self.seqs[number] = ack.results[0].seq
        left = sorted(self.seqs.keys() - self.erased - self.unsure)
        chosen = self.chance.sample(left, min(len(left), self.chance.randint(1, 2)))
        try:
            receipt = await link.erase("S", [self.seqs[one] for one in chosen], "")
        except ApiError as error:
            if error.spec.code not in UNSURE:
                raise
            self.unsure |= set(chosen)  # deleted or not, and without a receipt
        else:
            self.erased |= set(chosen)
            self.receipts.append(receipt.erasure_id)


def is_whole(node: StorageNode) -> bool:
    """Whether the node counts in all its groups: only then may the next one lose its disk."""
    return not any(group.flags for group in node.groups.values())


async def told(nodes: Nodes, seed: int) -> Story:
    story = Story(nodes, chance := random.Random(seed))
    config = StreamConfig(name="S", subjects=("S.*",), num_replicas=3)
    await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
    await nodes.until_listed("S")
    shard_id = nodes["a"].meta.streams["S"].shard_id
    await until(lambda: all(shard_id in node.applier.shards for node in nodes.all()))
    group = nodes["a"].applier.shards[shard_id].group
    for _ in range(STEPS):
        leader = nodes.leader(group)
        if leader:
            await story.write(leader)
        match chance.randrange(5):
            case 0:
                nodes.links.heal()
                nodes.links.part(chance.choice(NAMES))
                await until(
                    lambda: any(nodes[one].groups.leads(group) for one in nodes.links.nodes)
                )
            case 1:
                nodes.links.heal()
                away = chance.choice(NAMES)
                await nodes.stop(away)
                await until(lambda: bool(nodes.leader(group)))
                await story.write(nodes.leader(group))
                if chance.random() < WIPED:
                    nodes.wipe(away)
                await nodes.start(away)
                await until(lambda away=away: is_whole(nodes[away]))
            case 2:
                nodes.links.withheld.add((chance.choice(NAMES), group))
            case 3:
                nodes.links.heal()
            case _:
                pass
    nodes.links.heal()
    return story


async def end(nodes: Nodes, story: Story, folder: Path) -> None:
    """All receipts are done, and what was erased is in no file; the rest can be read."""

    def done() -> bool:
        ledgers = [node.meta.erasures.receipts for node in nodes.all()]
        known = [ledger.get(one) for ledger in ledgers for one in story.receipts]
        return all(one is not None and one.done_ns for one in known)

    await until(done)
    texts = [text for number in story.erased for text in traces(number)]
    assert files_with(folder, texts) == {}
    for number in story.seqs.keys() - story.erased - story.unsure:
        seq = story.seqs[number]
        message = await nodes.call("a", lambda link, seq=seq: link.get_message("S", seq))
        assert message.payload == secret(number).payload


def run(folder: Path, seed: int) -> None:
    async def scene() -> None:
        async with running(folder) as nodes:
            story = await told(nodes, seed)
            await end(nodes, story, folder)

    asyncio.run(scene())


def test_random_erasures_leave_nothing_and_take_nothing_else(tmp_path: Path) -> None:
    run(tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
def test_many_random_erasures_leave_nothing_and_take_nothing_else(
    tmp_path: Path, seed: int
) -> None:
    run(tmp_path, seed)
