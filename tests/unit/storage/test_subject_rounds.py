"""Numbers of subjects come round again, and every live message keeps its subject."""

import random
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import AckItem, PullRequest
from contrail_link.contract.publish import PublishAck
from contrail_link.contract.read import LastRequest, RangeRequest, ReplayRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Appended, Refused, Step, Writes
from contrail_storage.core.subjects import subject_names, subject_table
from contrail_storage.core.subjects.subject_names import END, RUN, SubjectNames, rank_order
from contrail_storage.core.subjects.subject_table import PAGE
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from tests.unit.storage.archive_rig import messages_of, packed, records_of, restored
from tests.unit.storage.dispatcher_rig import run
from tests.unit.storage.machine_rig import Message, Rig, append_of, configure, picture, removal_of
from tests.unit.storage.test_restore_node import running

LIVE = st.sets(st.integers(0, 60), max_size=40)


@given(LIVE, st.integers(0, 60), st.integers(0, 8))
def test_every_number_has_its_place_wherever_the_run_of_new_ones_ends(
    live: set[int], start: int, more: int
) -> None:
    end = min((sid for sid in live if sid >= start), default=61)
    live.discard(start) if start == end else None
    end = max(end, start + 1)
    sids = np.array(sorted(live - {start}), np.int64)
    sids = sids[rank_order(sids, end)]
    texts = pa.array([f"s.{sid}" for sid in sids.tolist()], pa.string())
    names = SubjectNames.of_live(sids, [texts], start, end)
    known = {sid: f"s.{sid}" for sid in sids.tolist()}
    for _ in range(more):
        if names.next_id == end:
            break
        known[names.next_id] = f"n.{names.next_id}"
        names.append(known[names.next_id])
    for sid in range(64):
        slot = names.slot(sid)
        assert slot == int(names.slots(np.array([sid]))[0]) or slot >= len(names.texts)
        inside = 0 <= slot < len(names.texts)
        assert (names.texts[slot] if inside else None) == known.get(sid)
        assert not inside or names.number(slot) == sid
    every = np.arange(len(names.texts))
    assert names.slots(names.numbers(every)).tolist() == every.tolist()
    listed = [(names.base + at) & 0xFFFF_FFFF for at in range(min(len(names), 64))]
    assert [names[at] for at in range(len(listed))] == [known.get(sid) for sid in listed]


def stream(first_number: int, **fields: object) -> Rig:
    rig = Rig()
    config = {"name": "S", "subjects": (">",), "allow_atomic": True} | fields
    rig.apply(1, configure(StreamConfig(**config)))  # type: ignore[arg-type]
    rig.begin_numbers_at(first_number)
    return rig


def subjects_of(rig: Rig) -> dict[int, str]:
    """The subject of every live message, by the numbers that stand in the blocks."""
    machine, found = rig.machine, {}
    for seq in range(machine.counters.first_seq, machine.counters.last_seq + 1):
        if machine.is_live(seq):
            facts = machine.facts_at(seq)
            found[seq] = machine.subjects.name(int(facts.subject_ids[seq - facts.base_seq]))
    return found


@pytest.mark.long
def test_work_queue_keeps_every_message_under_its_subject_past_the_last_number() -> None:
    rig = stream(END - 5, retention="workqueue")
    rig.apply(1, append_of([Message("kept.first")]))
    expected = {1: "kept.first"}
    queue: deque[int] = deque()
    for turn in range(3 * PAGE):
        name = f"job.{turn % 7}" if turn % 3 else f"once.{turn}"
        (result,) = rig.apply(1, append_of([Message(name)]))
        assert isinstance(result, Appended)
        expected[result.first_seq] = name
        queue.append(result.first_seq)
        if turn in (2, 500, 2_000):
            kept = append_of([Message(f"kept.{turn}")])
            expected[rig.machine.counters.last_seq + 1] = f"kept.{turn}"
            rig.apply(1, kept)
        while len(queue) > turn % 5:
            seq = queue.popleft()
            rig.apply(1, cmd.DeleteMessage(seq))
            del expected[seq]
        if turn < 20 or turn % 300 == 0:
            before = picture(rig.machine)
            rig.restart()
            assert picture(rig.machine) == before
            assert subjects_of(rig) == expected
    assert subjects_of(rig) == expected
    table = rig.machine.subjects
    assert table.ids["kept.first"] >= END - 5
    assert table.numbered.origin
    assert table.next_id < 4 * PAGE
    rig.apply(1, cmd.Trim(rig.machine.counters.last_seq, 10_000))
    assert {name for _, name in table.live()} == set(subjects_of(rig).values())


def test_archive_of_a_table_that_came_round_is_restored() -> None:
    rig = stream(END - 2, subjects=("s.*",), duplicate_window_ns=10**9)
    for turn in range(6):
        rig.apply(1, append_of([Message(f"s.{turn}", b"%d" % turn)] * 2))
    rig.apply(1, cmd.DeleteMessage(3))
    rig.apply(1, cmd.DeleteMessage(4))
    assert rig.machine.subjects.numbered.origin
    other = restored(packed(records_of(rig)))
    assert list(messages_of(other)) == list(messages_of(rig))
    for each in (rig, other):
        each.apply(2, append_of([Message("s.0"), Message("s.new")]))
        each.restart()
    assert subjects_of(other) == subjects_of(rig)


def test_archive_with_numbers_above_two_to_the_31_is_restored() -> None:
    rig = stream((1 << 31) + 5, subjects=("s.*",), duplicate_window_ns=10**9)
    rig.apply(1, append_of([Message("s.a"), Message("s.b")]))
    assert subjects_of(restored(packed(records_of(rig)))) == {1: "s.a", 2: "s.b"}


@pytest.mark.parametrize("atomic", [False, True])
def test_new_subject_is_refused_where_no_number_is_left_and_known_ones_go_on(
    monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    monkeypatch.setattr(subject_table, "PAGE", 4)
    monkeypatch.setattr(subject_names, "RUN", 8)
    monkeypatch.setattr(subject_names, "END", 16)
    rig = stream(0)
    for number in range(16):
        rig.apply(1, append_of([Message(f"s.{number}")]))
    batch = [Message("s.3"), Message("more")]
    (result,) = rig.apply(1, append_of(batch, atomic=atomic))
    assert isinstance(result, Appended)
    refused = (result.exceptions or {})[1]
    assert isinstance(refused, Refused)
    assert refused.code == errors.STORE_FAILED.code
    assert refused.detail == "the stream has reached its maximum number of subjects"
    assert rig.machine.counters.last_seq == (16 if atomic else 17)
    rig.restart()
    rig.apply(1, removal_of(rig.machine, [f"s.{number}" for number in range(8)]))
    rig.apply(1, append_of(batch, atomic=atomic))
    rig.restart()
    kept = [f"s.{number}" for number in range(8, 16)]
    assert list(subjects_of(rig).values()) == [*kept, "s.3", "more"]


@pytest.mark.long
@given(st.data())
def test_next_run_has_the_numbers_that_are_asked_for_and_none_that_is_live(
    data: st.DataObject,
) -> None:
    table, writes = subject_table.SubjectTable(1), Writes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject_names, "RUN", 8)
        patch.setattr(subject_names, "END", 64)
        live: dict[str, int] = {}
        for turn in range(data.draw(st.integers(1, 40))):
            count = data.draw(st.integers(1, 6))
            if not table.has_capacity(count):
                assert {sid // 8 for sid in live.values()} == set(range(8))
            else:
                table.reserve(count, writes)
                for at in range(count):
                    sid = table.add_one(f"{turn}.{at}", 1, Step(turn, 0, writes))
                    assert sid not in live.values()
                    live[f"{turn}.{at}"] = sid
            for name in data.draw(st.sets(st.sampled_from(sorted(live)))) if live else ():
                table.take_out_one(live.pop(name), 1, 1, Step(turn, 0, writes))
            assert {name: table.ids[name] for name in live} == live
            assert dict(table.live()) == {sid: name for name, sid in live.items()}


# On a node --------------------------------------------------------------------------------------


async def everything(link: LocalLink) -> list[tuple[int, str, bytes]]:
    """Sequence, subject and payload of every message; all ways of reading must agree."""
    found = await link.read_range(RangeRequest(stream="S", limit=1_000))
    read = [(each.seq, each.subject, bytes(each.payload)) for each in found.messages]
    body = b""
    async for chunk in await link.replay(ReplayRequest(stream="S", format="ndjson")):
        body += chunk
    lines = [msgspec.json.decode(line) for line in body.splitlines()]
    assert [(line["seq"], line["subject"]) for line in lines if "seq" in line] == [
        (seq, subject) for seq, subject, _ in read
    ]
    arrow = b""
    async for chunk in await link.replay(ReplayRequest(stream="S", format="arrow")):
        for piece in chunk if isinstance(chunk, list | tuple) else [chunk]:
            arrow += bytes(piece)
    table = pa.ipc.open_stream(arrow).read_all()
    assert table.column("subject").to_pylist() == [subject for _, subject, _ in read]
    newest, token = [], None
    while True:
        page, token = await link.last_messages(LastRequest(stream="S", limit=2, token=token))
        newest += [(each.seq, each.subject) for each in page]
        if token is None:
            break
    last = {subject: seq for seq, subject, _ in read}
    assert sorted(newest) == sorted((seq, subject) for subject, seq in last.items())
    return read


async def work_on(node: StorageNode, expected: dict[int, tuple[str, bytes]], turns: int) -> None:
    """Publish jobs and acknowledge most of them."""
    link, rng = LocalLink(node), random.Random(7)
    for turn in range(turns):
        name, body = f"job.{turn % 5}", b"%d" % turn
        ack = await publish(link, "S", [PublishMessage(name, None, body)])
        assert isinstance(ack, PublishAck)
        expected[ack.results[0].seq] = name, body
        if turn % 4:
            pull = PullRequest(stream="S", consumer="c", batch=1, no_wait=True)
            pulled = await link.pull(pull)
            for one in pulled.deliveries:
                assert expected[one.message.seq] == (one.message.subject, one.message.payload)
                if rng.random() < 0.9:
                    address = pulled.shard_id, pulled.consumer_id, pulled.epoch
                    await link.acknowledge(
                        "S", "c", [AckItem(*address, [one.message.seq], "ack")], True
                    )
                    del expected[one.message.seq]


def test_node_shows_acked_messages_under_their_subjects_past_the_last_number(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        expected: dict[int, tuple[str, bytes]] = {}
        async with running(tmp_path) as node:
            link = LocalLink(node)
            config = StreamConfig(name="S", subjects=(">",), retention="workqueue")
            await link.put_stream(config, "create", None, False)
            await link.put_consumer(
                "S", ConsumerConfig(name="c", durable=True), "create", None, False
            )
            table = node.streams.shard("S").machine.subjects
            table.restore_next_id(END - 10, Writes())
            await work_on(node, expected, 60)
            assert table.rounds == 1
            wanted = [(seq, *each) for seq, each in sorted(expected.items())]
            assert await everything(link) == wanted
        async with running(tmp_path) as node:
            assert await everything(LocalLink(node)) == wanted
            await work_on(node, expected, 60)
            wanted = [(seq, *each) for seq, each in sorted(expected.items())]
            assert await everything(LocalLink(node)) == wanted
        async with running(tmp_path) as node:
            assert await everything(LocalLink(node)) == wanted

    run(scene())


def test_bounds_of_runs_keep_pages_whole() -> None:
    assert RUN % PAGE == 0
    assert END % RUN == 0
    assert END < 0xFFFF_FFFF
