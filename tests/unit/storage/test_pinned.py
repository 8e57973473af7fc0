"""Consumers that begin with the last message of each subject: list, dispatcher, bounds."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.publishing import publish
from contrail_storage.consumers import starts
from contrail_storage.core import commands as cmd
from contrail_storage.core import pinned as pinned_module
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.results import ConsumerPut, Refused, Writes
from contrail_storage.link import LocalLink
from tests.support.each import each
from tests.unit.storage.dispatcher_rig import DispatcherRig, run, turns
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    picture,
)
from tests.unit.storage.test_restore_node import running

SUBJECTS = ["a.1", "a.2", "a.3", "b"]

seq_lists = st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True).map(sorted)


def pinned_of(seqs: list[int], end_seq: int) -> Pinned:
    return Pinned(np.array(seqs, np.int64), np.arange(len(seqs), dtype=np.uint32), end_seq)


@given(seq_lists, st.integers(1, 4), st.integers(0, 70))
def test_list_is_a_set_of_sequences_and_all_after_them(
    seqs: list[int], gap: int, from_seq: int
) -> None:
    pinned = pinned_of(seqs, seqs[-1] + gap)
    wanted = [seq for seq in range(80) if seq in seqs or seq >= pinned.end_seq]
    assert np.flatnonzero(pinned.mask(np.arange(80))).tolist() == wanted
    assert pinned.next(from_seq) == next(seq for seq in wanted if seq >= from_seq)
    assert pinned.rest(from_seq)[0].tolist() == [seq for seq in seqs if seq >= from_seq]


@given(seq_lists, st.integers(1, 5))
def test_stored_and_logged_forms_give_the_list_back(seqs: list[int], row: int) -> None:
    pinned = pinned_of(seqs, seqs[-1] + 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pinned_module, "ROW", row)
        rows = list(pinned.rows())
    assert len(rows) == -(-len(seqs) // row)
    for found in (Pinned.decode(pinned.encode(), pinned.end_seq), Pinned.of_rows(rows, 1)):
        assert found is not None
        assert found.seqs.tolist() == seqs
        assert found.sids.tolist() == list(range(len(seqs)))


@each(
    ("seqs", "end_seq", "cut"),
    [([3, 3], 9, 0), ([5, 4], 9, 0), ([0], 9, 0), ([9], 9, 0), ([9], 10, 0), ([1], 9, 1)],
)
def test_list_that_cannot_be_is_refused_in_apply(seqs: list[int], end_seq: int, cut: int) -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",))))
    rig.apply(1, append_of([Message("a", b"x")] * 8))
    data = pinned_of(seqs, end_seq).encode()
    [result] = rig.apply(1, cmd.PutConsumer(consumer_config("red"), 1, data[cut:], end_seq))
    assert isinstance(result, Refused)
    [result] = rig.apply(1, cmd.PutConsumer(consumer_config("red"), 1, b"", 0))
    assert result == ConsumerPut(1, created=True)


def test_rows_of_the_list_are_removed_when_the_consumer_has_passed_it() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",))))
    rig.apply(1, append_of([Message("a", b"x")] * 8))
    before = set(rig.store.rows)
    pinned = pinned_of([2, 5], 9)
    rig.apply(1, cmd.PutConsumer(consumer_config("red"), 2, pinned.encode(), 9))
    rig.apply(1, cmd.Deliver(1, 1, [2, 5], 8))
    rig.restart()
    assert rig.machine.consumers[1].pinned is not None
    made = picture(rig.machine)
    rig.restart()
    assert picture(rig.machine) == made
    rig.apply(1, cmd.Deliver(1, 1, [], 9))
    assert rig.machine.consumers[1].pinned is None
    assert not [key for key in set(rig.store.rows) - before if key.startswith(b"F")]
    rig.restart()
    assert rig.machine.consumers[1].pinned is None


def test_removed_consumer_takes_its_list_with_it() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",))))
    rig.apply(1, append_of([Message("a", b"x")] * 8))
    rig.apply(1, cmd.PutConsumer(consumer_config("red"), 2, pinned_of([2], 9).encode(), 9))
    assert [key for key in rig.store.rows if key.startswith(b"F")]
    rig.apply(1, cmd.DropConsumer(1))
    assert not [key for key in rig.store.rows if key.startswith(b"F")]


def test_interest_holds_of_what_was_there_only_what_is_pinned() -> None:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a",), retention="interest")))
    rig.apply(1, cmd.PutConsumer(consumer_config("red"), 1), append_of([Message("a", b"x")] * 4))
    rig.apply(1, cmd.PutConsumer(consumer_config("blue"), 4, pinned_of([4], 5).encode(), 5))
    rig.apply(1, append_of([Message("a", b"x")]))
    rig.apply(1, cmd.Deliver(1, 1, [1, 2, 3, 4, 5], 6))
    rig.apply(1, cmd.Acknowledge(1, 1, [1, 2, 3, 4, 5]))
    assert [seq for seq in range(1, 6) if rig.machine.is_live(seq)] == [4, 5]


steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(st.sampled_from(SUBJECTS), min_size=1, max_size=5)),
    st.tuples(st.just("delete"), st.integers(1, 30)),
    st.tuples(st.just("pull"), st.integers(1, 4)),
    st.tuples(st.just("record"), st.none()),
    st.tuples(st.just("lead anew"), st.none()),
)


@given(
    st.lists(st.lists(st.sampled_from(SUBJECTS), min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(steps, max_size=14),
    st.sampled_from(["explicit", "none"]),
    st.sampled_from([("a.*",), (">",), ("a.1", "b")]),
)
def test_dispatcher_gives_the_last_messages_and_what_came_later_and_counts_them(
    batches: list[list[str]],
    script: list[tuple[str, object]],
    ack_policy: str,
    filters: tuple[str, ...],
) -> None:
    async def scene() -> None:
        rig = DispatcherRig(consumer_fields={"ack_policy": ack_policy, "filter_subjects": filters})
        for batch in batches:
            rig.publish(*batch)
        end_seq = rig.machine.counters.last_seq + 1
        table, everything = rig.machine.subjects, rig.wanted()
        last = {
            table.last_of(sid): sid for sid, _ in table.live() if table.last_of(sid) in everything
        }
        if last:
            seqs = np.array(sorted(last), np.int64)
            sids = np.array([last[seq] for seq in sorted(last)], np.uint32)
            rig.consumer.pin(Pinned(seqs, sids, end_seq), Writes())
        else:
            rig.consumer.next_seq = end_seq
        given_out: list[int] = []
        rig.dispatcher = rig.new_dispatcher()
        for kind, argument in [*script, ("pull", 99)]:
            match kind, argument:
                case "publish", list(names):
                    rig.publish(*names)
                case "delete", int(seq) if rig.machine.is_live(seq):
                    rig.apply(cmd.DeleteMessage(seq))
                case "pull", int(count):
                    due = [seq for seq in rig.wanted() if seq in last or seq >= end_seq]
                    due = [seq for seq in due if seq not in given_out]
                    assert await rig.dispatcher.num_pending() == len(due)
                    found = await rig.pull_seqs(count)
                    assert found == due[:count]
                    given_out += found
                    assert await rig.dispatcher.num_pending() == len(due) - len(found)
                case "record", _:
                    await rig.record()
                case "lead anew", _:
                    await rig.record()
                    rig.dispatcher.close()
                    rig.dispatcher = rig.new_dispatcher()
        await turns()

    run(scene())


@pytest.mark.parametrize(("subjects", "taken"), [(3, True), (4, False)])
def test_list_holds_as_many_subjects_as_its_bound(
    subjects: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "SUBJECTS_MAX", 3)
    config = ConsumerConfig(
        name="c", durable=True, deliver_policy="last_per_subject", filter_subjects=("a.*",)
    )

    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            stream = StreamConfig(name="S", subjects=("a.*",))
            await link.put_stream(stream, "create", None, False)
            messages = [PublishMessage(f"a.{number}", None, b"x") for number in range(subjects)]
            await publish(link, "S", messages * 2)
            if not taken:
                with pytest.raises(ApiError, match="allows at most 3") as refused:
                    await link.put_consumer("S", config, "create", None, False)
                assert refused.value.spec is errors.START_INVALID
                return
            info, _ = await link.put_consumer("S", config, "create", None, False)
            assert info.num_pending == 3

    run(scene())


def test_archive_keeps_what_a_consumer_is_to_get_first(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(tmp_path) as node:
            link = LocalLink(node)
            stream = StreamConfig(name="S", subjects=("a.*",))
            await link.put_stream(stream, "create", None, False)
            messages = [PublishMessage(f"a.{number % 7}", None, b"x") for number in range(30)]
            await publish(link, "S", messages)
            config = ConsumerConfig(
                name="c", durable=True, deliver_policy="last_per_subject", filter_subjects=("a.*",)
            )
            await link.put_consumer("S", config, "create", None, False)
            pull = PullRequest(stream="S", consumer="c", batch=2, no_wait=True)
            assert [one.message.seq for one in (await link.pull(pull)).deliveries] == [24, 25]
            await publish(link, "S", messages[:1])
            await link.consumer_info("S", "c")
            archive = b"".join([piece async for piece in await link.snapshot("S", True)])
            await link.delete_stream("S")
            token = await link.begin_restore("S")
            await link.append_restore(token, 0, archive)
            await link.commit_restore(token)
            assert (await link.consumer_info("S", "c")).num_pending == 6
            pull = PullRequest(stream="S", consumer="c", batch=9, no_wait=True)
            found = [one.message.seq for one in (await link.pull(pull)).deliveries]
            assert found == [26, 27, 28, 29, 30, 31]

    run(scene())
