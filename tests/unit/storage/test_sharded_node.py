"""Messages of a stream with several shards: split on the way in, merged on the way out."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import Expected, PublishMessage
from contrail_common.partition import shard_of
from contrail_link.contract.publish import PubResult
from contrail_link.contract.read import (
    LastRequest,
    ManyRequest,
    RangeRequest,
    ReplayPlanRequest,
    ReplayRequest,
)
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica.shard import woken
from tests.unit.storage.sharded_rig import (
    CONFIG,
    PATIENCE_S,
    SHARDS,
    fill,
    message,
    play,
    read_all,
    running,
)

SHARDED = errors.SHARDED_UNSUPPORTED


def other_shard(key: str) -> str:
    """A key whose subject is in another shard than that of ``key``."""
    shard = shard_of(f"a.{key}", SHARDS, (2,))
    return next(str(at) for at in range(99) if shard_of(f"a.{at}", SHARDS, (2,)) != shard)


async def refused(work: Coroutine[Any, Any, Any], spec: ErrorSpec, field: str = "") -> None:
    with pytest.raises(ApiError) as error:
        await work
    assert error.value.spec is spec
    assert not field or [one.pointer for one in error.value.fields] == [field]


drafts = st.tuples(
    st.integers(0, 12),
    st.sampled_from([None, None, "id-1", "id-2", "id-3"]),
    st.sampled_from(["", "", "", "", "last_seq", "rollup", "elsewhere"]),
)
batches = st.lists(st.lists(drafts, min_size=1, max_size=25), min_size=1, max_size=5)


def asked_of(drafts: list[tuple[int, str | None, str]], base: int) -> list[PublishMessage]:
    messages = []
    for at, (key, msg_id, kind) in enumerate(drafts):
        one = message(key, b"%d" % (base + at), msg_id=msg_id)
        if kind == "last_seq":
            one.expected = Expected(last_seq=0)
        elif kind == "rollup":
            one.rollup = "all"
        elif kind == "elsewhere":
            one.subject = f"b.{key}"
        messages.append(one)
    return messages


@settings(max_examples=15, deadline=None)
@given(batches, st.integers(1, 20), st.booleans())
def test_results_come_in_order_and_cursors_read_everything_once(
    batches: list[list[tuple[int, str | None, str]]], page: int, in_columns: bool
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        stored: dict[tuple[int, int], bytes] = {}
        ids: dict[tuple[int, str], int] = {}
        for number, drafts in enumerate(batches):
            messages = asked_of(drafts, 100 * number)
            if in_columns or len(messages) == 1:
                ack = await publish(link, "S", MessageBatch.of(messages))
                results = [one for run in ack.results for one in run.each()]
            else:
                results = (await publish(link, "S", messages)).results
            assert len(results) == len(messages)
            for one, (key, msg_id, kind), result in zip(messages, drafts, results, strict=True):
                check(one, key, msg_id, kind, result, stored, ids)
        found = await read_all(link, page)
        assert {(one.shard, one.seq): one.payload for one in found} == stored
        assert len(found) == len(stored)
        assert [one.time_ns for one in found] == sorted(one.time_ns for one in found)
        for shard in range(SHARDS):
            seqs = [one.seq for one in found if one.shard == shard]
            assert seqs == list(range(1, len(seqs) + 1))

    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), scene)


def check(
    one: PublishMessage,
    key: int,
    msg_id: str | None,
    kind: str,
    result: PubResult,
    stored: dict[tuple[int, int], bytes],
    ids: dict[tuple[int, str], int],
) -> None:
    """A result is that of its message, by what was stored so far."""
    codes = {
        "last_seq": SHARDED.code,
        "rollup": errors.ROLLUP_REFUSED.code,
        "elsewhere": errors.SUBJECT_NOT_CAPTURED.code,
    }
    if kind:
        assert (result.code, result.shard) == (codes[kind], None)
        return
    shard = shard_of(f"a.{key}", SHARDS, (2,))
    assert (result.code, result.shard) == (0, shard)
    # An id meets its twin in its own shard alone.
    twin = ids.get((shard, msg_id)) if msg_id else None
    assert result.duplicate == (twin is not None)
    if twin is not None:
        assert result.seq == twin
        return
    assert (shard, result.seq) not in stored
    stored[shard, result.seq] = one.payload
    if msg_id:
        ids[shard, msg_id] = result.seq


def test_single_messages_are_answered_with_their_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        link.publish_then("", [message("k")], outcome.set_result)
        ack = await outcome
        shard = shard_of("a.k", SHARDS, (2,))
        assert (ack.stream, ack.results) == ("S", [PubResult(1, shard=shard)])
        expected = Expected(last_seq=1, last_subject_seq=1)
        ack = await publish(link, "", [message("k", expected=expected)])
        assert ack.results == [PubResult(2, shard=shard)]
        other = other_shard("k")
        for subject in (f"a.{other}", "a.*", "a.>"):
            expected = Expected(last_subject_seq=0, last_subject_seq_subject=subject)
            ack = await publish(link, "", [message("k", expected=expected)])
            assert [one.code for one in ack.results] == [SHARDED.code]
        expected = Expected(last_subject_seq=2, last_subject_seq_subject="a.k")
        ack = await publish(link, "", [message("k", expected=expected)])
        assert ack.results == [PubResult(3, shard=shard)]

    play(tmp_path, scene)


def test_messages_that_came_together_are_single_ones_to_a_stream_with_shards(
    tmp_path: Path,
) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        outcomes: list[tuple[list[int], Any]] = []
        sent = [message("k"), message("k", expected=Expected(last_seq=1)), message("k")]
        link.publish_each_then(sent, lambda *outcome: outcomes.append(outcome))
        while len(outcomes) < len(sent):
            await asyncio.sleep(0)
        shard = shard_of("a.k", SHARDS, (2,))
        assert [(at, ack.results) for at, ack in outcomes] == [
            ([at], [PubResult(at + 1, shard=shard)]) for at in range(3)
        ]

    play(tmp_path, scene)


def test_atomic_batch_is_of_one_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        def atomic(*messages: PublishMessage) -> Coroutine[Any, Any, Any]:
            batch = MessageBatch.of(messages)
            batch.atomic = True
            return publish(link, "S", batch)

        ack = await atomic(message("k"), message("k"))
        shard = shard_of("a.k", SHARDS, (2,))
        assert ack.results == [PubResult(1, count=2, shard=shard)]
        await refused(atomic(message("k"), message(other_shard("k"))), SHARDED)
        await refused(atomic(message("k", expected=Expected(last_seq=2))), SHARDED)
        await refused(atomic(message("k", rollup="all")), errors.ROLLUP_REFUSED)
        assert (await link.stream_info("S")).state.messages == 2

    play(tmp_path, scene, msgspec.structs.replace(CONFIG, allow_atomic=True))


def test_sequences_need_a_shard_and_cursors_the_stream(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 20)
        shard = shard_of("a.0", SHARDS, (2,))
        assert (await link.get_message("S", 1, shard)).shard == shard
        invalid = errors.INVALID_FIELD
        for shard in (None, -1, SHARDS):
            await refused(link.get_message("S", 1, shard), invalid, "shard")
            await refused(link.delete_message("S", 1, shard), invalid, "shard")
            await refused(link.deleted_ranges("S", 9, "", shard), invalid, "shard")
        await refused(link.read_range(RangeRequest(stream="S", from_seq=1)), invalid, "shard")
        await refused(link.last_messages(LastRequest(stream="S", up_to_seq=1)), invalid, "shard")
        await refused(link.get_messages(ManyRequest(stream="S", seqs=[1])), invalid, "shard")
        plan = ReplayPlanRequest(stream="S", from_seq=1)
        await refused(link.replay_plan(plan), invalid, "shard")
        await refused(link.replay(ReplayRequest(stream="S")), invalid, "shard")
        await refused(link.purge_stream("S", "", 5, 0), invalid, "shard")
        await refused(link.purge_stream("S", "", 0, 5), invalid, "shard")
        await refused(link.purge_stream("S", "a.*", 0, 5), invalid, "shard")

        await link.put_stream(
            msgspec.structs.replace(CONFIG, name="T", subjects=("t.>",)), "put", None, False
        )
        foreign = (await link.read_range(RangeRequest(stream="T"))).cursor
        for cursor in ("x", foreign):
            request = RangeRequest(stream="S", cursor=cursor)
            await refused(link.read_range(request), invalid, "cursor")
        own = (await link.read_range(RangeRequest(stream="S"))).cursor
        await refused(
            link.read_range(RangeRequest(stream="S", cursor=own, shard=0)), invalid, "cursor"
        )
        await link.delete_stream("S")
        await link.put_stream(CONFIG, "put", None, False)
        await refused(link.read_range(RangeRequest(stream="S", cursor=own)), invalid, "cursor")

    play(tmp_path, scene)


def test_reads_of_all_shards_select_as_reads_of_one_do(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 60)
        everything = await read_all(link, 7)
        assert [int(one.payload) for one in everything] == list(range(60))
        by_bytes = await read_all(link, 100, max_bytes=5)
        assert by_bytes == everything
        third = [one for one in everything if one.subject == "a.3"]
        assert await read_all(link, 2, subject="a.3") == third
        assert await read_all(link, 2, subject="*.*") == everything
        late = everything[33].time_ns
        assert await read_all(link, 9, start_time_ns=late) == everything[33:]
        counts, token = await link.subject_counts("S", "", 4, "")
        more, end = await link.subject_counts("S", "", 4, token or "")
        assert [name for name, _ in counts + more] == [f"a.{key}" for key in range(7)]
        assert sum(count for _, count in counts + more) == 60
        assert end is None
        newest = {one.subject: one for one in everything}
        subjects = [f"a.{key % 9}" for key in range(30)]
        many = await link.get_messages(ManyRequest(stream="S", subjects=subjects))
        assert many.messages == [newest.get(subject) for subject in subjects]
        some = await link.get_messages(ManyRequest(stream="S", subjects=subjects, max_bytes=6))
        assert some.left_out
        for at, one in enumerate(some.messages):
            assert one == (None if at in some.left_out else newest.get(subjects[at]))
        shard = everything[0].shard
        asked = ManyRequest(stream="S", seqs=[3, 99, 1], shard=shard)
        own = {one.seq: one for one in everything if one.shard == shard}
        assert (await link.get_messages(asked)).messages == [own.get(3), None, own[1]]
        one = await link.read_range(RangeRequest(stream="S", shard=shard, from_seq=2))
        assert one.messages == [each for each in everything if each.shard == shard][1:]
        assert not one.cursor
        info = await link.stream_info("S")
        assert info.state.last_ts_ns == everything[-1].time_ns
        assert info.state.first_ts_ns == everything[0].time_ns
        assert info.state.num_subjects == 7

    play(tmp_path, scene)


def test_newest_messages_are_of_the_first_pages_moment(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 70)
        everything = await read_all(link)
        newest = {one.subject: one for one in everything}
        halfway = {one.subject: one for one in everything[:35]}

        async def last(limit: int, between: Callable[[], Any], **asked: Any) -> dict[str, Any]:
            found: list[Any] = []
            token: str | None = ""
            while token is not None:
                request = LastRequest(stream="S", limit=limit, token=token, **asked)
                page, token = await link.last_messages(request)
                assert len(page) <= limit
                found += page
                await between()
            assert len({one.subject for one in found}) == len(found)
            return {one.subject: one for one in found}

        async def nothing() -> None:
            pass

        assert await last(2, lambda: fill(link, 1)) == newest
        time_ns = everything[35].time_ns
        assert await last(3, nothing, up_to_time_ns=time_ns) == halfway
        assert await last(3, nothing, up_to_time_ns=time_ns, subject="a.2") == {
            "a.2": halfway["a.2"]
        }
        shard = newest["a.2"].shard
        of_shard = {name: one for name, one in halfway.items() if one.shard == shard}
        up_to = [one.seq for one in everything[:35] if one.shard == shard][-1]
        assert await last(3, nothing, shard=shard, up_to_seq=up_to) == of_shard
        _, token = await link.last_messages(LastRequest(stream="S", limit=2))
        assert token
        foreign = LastRequest(stream="S", subject="a.*", limit=2, token=token)
        await refused(link.last_messages(foreign), errors.BAD_REQUEST)

    play(tmp_path, scene)


def test_waiting_read_sees_what_comes_into_any_shard(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        for key in range(12):
            begin = await link.read_range(RangeRequest(stream="S"))
            wait_ns = int(PATIENCE_S * 1e9)
            cursor = begin.cursor
            while begin.messages:
                begin = await link.read_range(RangeRequest(stream="S", cursor=cursor))
                cursor = begin.cursor
            request = RangeRequest(stream="S", cursor=cursor, wait_ns=wait_ns)
            waiting = asyncio.ensure_future(link.read_range(request))
            await asyncio.sleep(0)
            await publish(link, "S", [message(key, b"%d" % key)])
            found = await waiting
            assert [one.payload for one in found.messages] == [b"%d" % key]
        soon = RangeRequest(stream="S", cursor=found.cursor, wait_ns=1_000_000)
        assert (await link.read_range(soon)).messages == []
        waiting = asyncio.ensure_future(
            link.read_range(RangeRequest(stream="S", cursor=found.cursor, wait_ns=wait_ns))
        )
        await asyncio.sleep(0)
        await link.delete_stream("S")
        await refused(waiting, errors.STREAM_NOT_FOUND)  # type: ignore[arg-type]

    play(tmp_path, scene)


def test_purge_and_delete_remove_from_the_right_shards(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 70)
        assert await link.purge_stream("S", "a.3", 0, 0) == 10
        assert await link.purge_stream("S", "a.4", 0, 3) == 7
        shard = shard_of("a.0", SHARDS, (2,))
        await link.delete_message("S", 1, shard)
        await refused(link.get_message("S", 1, shard), errors.MESSAGE_NOT_FOUND)
        left = await read_all(link)
        assert len(left) == 52
        kept = [one for one in left if one.shard == shard]
        assert await link.purge_stream("S", "", kept[-1].seq, 0, shard) == len(kept) - 1
        assert await link.purge_stream("S", "", 0, 0) == 52 - len(kept) + 1
        assert await read_all(link) == []
        assert (await link.stream_info("S")).state.messages == 0
        sealed = msgspec.structs.replace(CONFIG, sealed=True, deny_purge=True, deny_delete=True)
        await link.put_stream(sealed, "put", None, False)
        ack = await publish(link, "S", [message(key) for key in range(12)])
        assert {one.code for one in ack.results} == {errors.STREAM_SEALED.code}

    play(tmp_path, scene)


def test_replay_plan_covers_every_shard_and_stays_as_it_was(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 80)
        plan = await link.replay_plan(ReplayPlanRequest(stream="S", splits=8))
        await fill(link, 20)
        rows = []
        for split in plan.splits:
            request = ReplayRequest(
                stream="S",
                format="ndjson",
                shard=split.shard,
                from_seq=split.from_seq,
                to_seq=split.to_seq,
                incarnation=plan.incarnation,
            )
            chunks = [chunk async for chunk in await link.replay(request)]
            *lines, end = b"".join(chunks).splitlines()
            assert json.loads(end) == {"end": True, "messages": split.messages}
            rows += [json.loads(line) for line in lines]
        assert sorted(int(row["data"]) for row in rows) == list(range(80))
        for row in rows:
            assert row["shard"] == shard_of(row["subject"], SHARDS, (2,))
        one = await link.replay_plan(ReplayPlanRequest(stream="S", shard=1, from_seq=2))
        assert {(split.shard, split.from_seq) for split in one.splits} == {(1, 2)}
        literal = await link.replay_plan(ReplayPlanRequest(stream="S", subject="a.2"))
        assert {split.shard for split in literal.splits} == {shard_of("a.2", SHARDS, (2,))}
        two = await link.replay_plan(ReplayPlanRequest(stream="S", subject="a.2 a.3"))
        wanted = {shard_of(subject, SHARDS, (2,)) for subject in ("a.2", "a.3")}
        assert len(wanted) > 1
        assert {split.shard for split in two.splits} == wanted
        assert {bounds.shard for bounds in two.shards} == wanted

    play(tmp_path, scene)


def test_damage_of_a_shard_stops_that_shard_alone(tmp_path: Path) -> None:
    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 30)
        shard = shard_of("a.1", SHARDS, (2,))
        node.streams.shard("S", shard).damaged = "block 1: rot"
        await refused(publish(link, "S", [message(1)]), errors.DATA_LOST)
        ack = await publish(link, "S", [message(1), message(other_shard("1"))])
        assert [one.code for one in ack.results] == [errors.DATA_LOST.code, 0]
        await refused(link.read_range(RangeRequest(stream="S")), errors.DATA_LOST)
        sound = (shard + 1) % SHARDS
        await link.read_range(RangeRequest(stream="S", shard=sound))

    play(tmp_path, scene)


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    before: list[Any] = []

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await fill(link, 50)
        before.extend(await read_all(link))

    async def after() -> None:
        async with asyncio.timeout(PATIENCE_S), running(tmp_path) as node:
            link = LocalLink(node)
            assert await read_all(link) == before
            ack = await publish(link, "S", [message(1)])
            seqs = [one.seq for one in before if one.subject == "a.1"]
            shard = shard_of("a.1", SHARDS, (2,))
            assert ack.results[0].seq > max(seqs)
            assert ack.results[0].shard == shard

    play(tmp_path, scene)
    asyncio.run(after())


def test_wait_that_is_cancelled_as_it_is_woken_ends() -> None:
    async def scene(passes: int) -> None:
        wakes, due = 0, asyncio.Event()

        async def wait() -> None:
            nonlocal wakes
            while await woken(due, 1_000):
                wakes += 1

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        due.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=PATIENCE_S)
        assert waiting.cancelled()
        assert wakes == (passes > 0)

    for passes in range(5):
        asyncio.run(scene(passes))
