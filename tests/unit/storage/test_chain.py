"""The digest of what a group has applied: the same for the same entries and results only."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_link import publishing
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core.chain import (
    NO_CHAIN,
    Chain,
    decode_applied,
    encode_applied,
    next_digest,
)
from contrail_storage.core.key_layout import SHARD_GROUP
from contrail_storage.core.results import Appended, Refused
from contrail_storage.core.stream.shard_state import Counters
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.repair.rebuild import rebuild
from tests.unit.storage.test_open_damaged_node import killed

COUNTERS = Counters(1, 2, 2, 30, 5, bytes(16), 7)
APPENDED = Appended(1, 2)


def digest(**changed: object) -> bytes:
    given = {
        "before": bytes(16), "index": 3, "term": 1, "crc": 9,
        "results": [APPENDED], "counters": [(4, COUNTERS)],
    }  # fmt: skip
    return next_digest(**(given | changed))


def test_everything_that_may_differ_changes_the_digest() -> None:
    refused = Appended(1, 2, {1: Refused(errors.STREAM_NOT_FOUND.code)})
    others = [
        digest(before=b"x" * 16),
        digest(index=4),
        digest(term=2),
        digest(crc=8),
        digest(results=[]),
        digest(results=[Appended(2, 2)]),
        digest(results=[refused]),
        digest(results=[Appended(1, 2, {1: 1})]),
        digest(results=[Refused(errors.STREAM_NOT_FOUND.code)]),
        digest(counters=[]),
        digest(counters=[(5, COUNTERS)]),
        digest(counters=[(4, Counters(1, 2, 2, 31, 5, bytes(16), 7))]),
    ]
    assert len({digest(), *others}) == len(others) + 1


def test_sentence_of_a_refusal_is_not_compared() -> None:
    code = errors.STREAM_NOT_FOUND.code
    assert digest(results=[Refused(code, "one")]) == digest(results=[Refused(code, "another")])


def test_row_comes_back_and_that_of_release_0_2_has_no_chain() -> None:
    chain = Chain(1_700_000_000_000_000_000, b"d" * 16, 7)
    assert decode_applied(encode_applied(7, 3, chain)) == (7, chain)
    assert decode_applied((7).to_bytes(8, "big") + (3).to_bytes(8, "big")) == (7, NO_CHAIN)


async def use(_: StorageNode, link: LocalLink) -> None:
    """Commands of many kinds, some of which are refused."""
    config = StreamConfig(name="S", subjects=("s.>",), max_msgs=50)
    with suppress(ApiError):
        await link.put_stream(config, "create", None, False)
        await link.put_consumer("S", ConsumerConfig(name="c", durable=True), "create", None, False)
    info = await link.stream_info("S")
    for number in range(info.state.last_seq, info.state.last_seq + 30):
        batch = [
            PublishMessage(f"s.{at % 3}", None, b"x" * at, msg_id=f"{number}-{at % 2}")
            for at in range(4)
        ]
        await publishing.publish(link, "S", batch)
    with suppress(ApiError):
        wrong = PublishMessage("s.1", None, b"no", expected=Expected(last_seq=1))
        await publishing.publish(link, "S", [wrong])
    pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=5))
    assert pulled is not None
    await link.acknowledge("S", "c", [AckItem(0, 1, 1, [1], "ack")], True)
    info = await link.stream_info("S")
    await link.delete_message("S", info.state.last_seq - 1)
    await link.purge_stream("S", "s.2", 0, 0)


@pytest.mark.parametrize("stored", [False, True], ids=["from the log", "after a checkpoint"])
def test_replay_of_entries_ends_at_the_digest_of_the_leader(tmp_path: Path, stored: bool) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> tuple[dict[int, Chain], dict[int, int]]:
        await use(node, link)
        if stored:
            await node.checkpoint()
            await use(node, link)
        await asyncio.to_thread(node.log.rotate)
        return dict(node.applier.chains), node.applied()

    chains, applied = killed(tmp_path / "data", tmp_path / "copy", scene)
    assert chains.keys() == applied.keys() == {0, 1}
    node = StorageNode.open(NodeOptions(tmp_path / "copy"), SingleMemberGroups())
    try:
        assert bool(node.applier.chains) is stored
        assert node.log.recovery.groups[SHARD_GROUP].entries
        rebuilt = rebuild(
            node.options,
            node.keyring,
            node.log,
            applied,
            without=frozenset(),
            writable=False,
            given_up=lambda: False,
        )
        rebuilt.store.close()
        assert rebuilt.applier.chains == chains
    finally:
        node.close()
