"""Expectations about wildcards on a node: searches, races with removals, and the order kept."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishOutcome, PubResult
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.streams import expectations
from tests.unit.storage.sharded_rig import play

PLAIN = StreamConfig(name="S", subjects=("a.>",), allow_atomic=True)
UNKNOWN = errors.LAST_UNSETTLED.code
WRONG = errors.WRONG_LAST_SEQUENCE.code


def message(subject: str, pattern: str | None = None, last_seq: int = 0) -> PublishMessage:
    if pattern is None:
        return PublishMessage(subject, None, b"x")
    expected = Expected(last_subject_seq=last_seq, last_subject_seq_subject=pattern)
    return PublishMessage(subject, None, b"x", expected=expected)


def behind_removals(monkeypatch: pytest.MonkeyPatch, node: StorageNode, seqs: list[int]) -> None:
    """Have each proposal of a publish with proofs come after a removal of one of ``seqs``."""
    propose = expectations._propose
    left = iter(seqs)

    def behind_a_removal(*args: Any) -> None:
        if (seq := next(left, 0)) != 0:
            node.shard_logs.command(
                node.streams.shard("S").machine.shard_id, cmd.DeleteMessage(seq)
            )
        propose(*args)

    monkeypatch.setattr(expectations, "_propose", behind_a_removal)


async def results(link: LocalLink, *messages: PublishMessage) -> list[tuple[int, int]]:
    """Code and sequence of each message, published together."""
    ack = await publish(link, "S", list(messages))
    return [(one.code, one.seq) for one in ack.results]


def test_each_expectation_is_checked_in_its_place(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        assert await results(link, message("a.1.x", "a.*.x", 0)) == [(0, 1)]
        assert await results(link, message("a.2.x", "a.*.x", 0)) == [(WRONG, 0)]
        await results(link, *[message(f"a.{key}.y") for key in range(40)])
        batch = [message(f"a.{at}.x", "a.*.x", 41 + at if at else 1) for at in range(20)]
        assert await results(link, *batch) == [(0, 42 + at) for at in range(20)]
        mixed = [message("a.1.x", "a.>", 61), message("a.1.y", "a.*.x", 9), message("a.1.z")]
        assert await results(link, *mixed) == [(0, 62), (WRONG, 0), (0, 63)]
        atomic = MessageBatch.of([message("a.1.x", "a.>", 63), message("a.1.y", "a.*.x", 9)])
        atomic.atomic = True
        ack = await publish(link, "S", atomic)
        assert [one.code for one in ack.results] == [WRONG] * 2
        assert node.streams.shard("S").machine.counters.last_seq == 63

    play(tmp_path, scene, PLAIN)


@pytest.mark.parametrize("races", range(4))
def test_search_is_repeated_if_its_message_is_removed(
    tmp_path: Path, races: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times; then the publisher may try again."""

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await results(link, *[message(f"a.{key}") for key in range(5)])
        shard = node.streams.shard("S")

        behind_removals(monkeypatch, node, [5, 4, 3][:races])
        found = await results(link, message("a.new", "a.*", 5 - races))
        assert found == [(UNKNOWN, 0) if races == expectations.TRIES else (0, 6)]
        assert shard.machine.counters.messages == 5 - races + (races < expectations.TRIES)
        assert not shard.publishes_wait

    play(tmp_path, scene, PLAIN)


def test_message_of_a_batch_is_not_stored_behind_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await results(link, message("a.1"), message("a.2"))
        behind_removals(monkeypatch, node, [2])
        batch = [message("a.3", "a.*", 1), message("a.4")]
        assert await results(link, *batch) == [(UNKNOWN, 0), (0, 3)]

    play(tmp_path, scene, PLAIN)


@pytest.mark.parametrize("races", range(4))
def test_proof_about_a_subject_is_made_when_it_is_needed(
    tmp_path: Path, races: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish whose expectation the table decides is proposed at once, also behind a removal."""

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await results(link, *[message("a.1")] * 6)
        shard, found = node.streams.shard("S"), expectations.Expectations._find
        searches: list[set[str]] = []

        async def counted(self: Any, shard: Any, patterns: set[str]) -> Any:
            searches.append(patterns)
            return await found(self, shard, patterns)

        monkeypatch.setattr(expectations.Expectations, "_find", counted)
        assert await results(link, message("a.1", "a.1", 6)) == [(0, 7)]
        assert searches == []
        behind_removals(monkeypatch, node, [6, 5, 4][:races])
        # In one turn, so that the publish does not see the removal.
        node.shard_logs.command(shard.machine.shard_id, cmd.DeleteMessage(7))
        [outcome] = collected(link, [message("a.1", "a.1", 6 - races)])
        ack = await outcome
        expected = (UNKNOWN, 0) if races == expectations.TRIES else (0, 8)
        assert [(one.code, one.seq) for one in ack.results] == [expected]
        assert searches == [{"a.1"}] * min(1 + races, expectations.TRIES)

    play(tmp_path, scene, PLAIN)


@pytest.mark.parametrize("more", [0, 1])
def test_patterns_are_searched_alone_or_together(tmp_path: Path, more: int) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        kinds = expectations._ALONE_MAX + more
        subjects = [f"a.{at}.{at % kinds}" for at in range(5 * kinds)]
        await results(link, *[message(subject) for subject in subjects])
        await link.delete_message("S", 5 * kinds - 1)
        last = [4 * kinds + kind + 1 for kind in range(kinds)]
        last[kinds - 2] -= kinds
        batch = [message("a.n", f"a.*.{kind}", last[kind]) for kind in range(kinds)]
        assert await results(link, *batch) == [(0, 5 * kinds + at + 1) for at in range(kinds)]
        batch = [message("a.n", f"a.*.{kind}", last[kind] + 1) for kind in range(kinds)]
        assert await results(link, *batch) == [(WRONG, 0)] * kinds

    play(tmp_path, scene, PLAIN)


def collected(link: LocalLink, messages: list[PublishMessage]) -> list["asyncio.Future[Any]"]:
    """Publish each, without waiting for the one before."""
    outcomes: list[asyncio.Future[Any]] = []
    for one in messages:
        outcomes.append(asyncio.get_running_loop().create_future())
        link.publish_then("S", [one], outcomes[-1].set_result)
    return outcomes


def test_publishes_keep_their_order(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        count = 3 * expectations._PROPOSED_TOGETHER
        sent = [message(f"a.{at}", "a.>" if at % 5 == 3 else None, at) for at in range(count)]
        outcomes = collected(link, sent)
        # More come while those that wait are proposed.
        await outcomes[10]
        outcomes += collected(link, [message("a.later", "a.>", count), message("a.last")])
        acks = await asyncio.gather(*outcomes)
        assert [ack.results for ack in acks] == [[PubResult(at + 1)] for at in range(count + 2)]

    play(tmp_path, scene, PLAIN)


@pytest.mark.parametrize("where", ["_Names.search", "_proven"])
def test_failure_refuses_only_the_publish_that_met_it(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = expectations._proven

    def fail(*args: Any) -> Any:
        if where == "_Names.search" or args[0].expected is not None:
            raise RuntimeError("not enough memory")
        return work(*args)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        monkeypatch.setattr(f"contrail_storage.streams.expectations.{where}", fail)
        outcomes = collected(link, [message("a.1", "a.*", 0), message("a.2")])
        refused, stored = await asyncio.gather(*outcomes)
        assert isinstance(refused, ApiError)
        assert (refused.spec, refused.applied) == (errors.INTERNAL, False)
        assert stored.results == [PubResult(1)]
        monkeypatch.undo()
        assert await results(link, message("a.1", "a.*", 1)) == [(0, 2)]
        assert node.shard_log.queued_bytes == 0

    play(tmp_path, scene, PLAIN)


def test_stream_that_is_gone_after_the_search(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await results(link, message("a.1"))
        [outcome] = collected(link, [message("a.1", "a.*", 1)])
        await link.delete_stream("S")
        error: PublishOutcome = await outcome
        assert isinstance(error, ApiError) or error.results[0].code, error

    play(tmp_path, scene, PLAIN)


@pytest.mark.parametrize("pattern", ["a.*.x", "a.1.x"])
@pytest.mark.parametrize("alone", [True, False])
def test_last_message_behind_acks_is_found_before_the_publish(
    tmp_path: Path, pattern: str, alone: bool
) -> None:
    """The newest messages of a subject are gone; one far below them is its last."""
    config = StreamConfig(name="S", subjects=("a.>",), retention="interest")

    async def scene(node: StorageNode, link: LocalLink) -> None:
        consumer = ConsumerConfig(name="c", durable=True)
        await link.put_consumer("S", consumer, "create", None, False)
        subjects = ["a.1.x", *["a.2.y"] * 8, "a.1.x"]
        await results(link, *[message(subject) for subject in subjects])
        pulled = await link.pull(PullRequest(stream="S", consumer="c", batch=20, no_wait=True))
        newest = pulled.deliveries[-1]
        item = AckItem(*pulled.address(newest), [newest.message.seq], "ack")
        await link.acknowledge("S", "c", [item], sync=True)
        assert node.streams.shard("S").machine.last_live("a.1.x") is None
        more = [] if alone else [message("a.1.y", "a.2.y", 8), message("a.1.y", "a.2.y", 9)]
        found = await results(link, message("a.3.x", pattern, 1), *more)
        assert found == [(0, 11), *[(WRONG, 0), (0, 12)][: len(more)]]

    play(tmp_path, scene, config)


@pytest.mark.parametrize("fields", [{"storage": "memory"}, {"erasure": "subject_key"}])
def test_streams_in_memory_and_with_subject_keys(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = StreamConfig(name="S", subjects=("a.>",), **fields)

    async def scene(node: StorageNode, link: LocalLink) -> None:
        sent = [message("a.1", "a.*", 0), message("a.2", "a.*", 1), message("a.3"), message("b")]
        acks = await asyncio.gather(*collected(link, sent[:3]))
        assert [ack.results for ack in acks] == [[PubResult(at + 1)] for at in range(3)]

    play(tmp_path, scene, config)
