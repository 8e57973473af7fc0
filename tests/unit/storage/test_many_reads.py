"""Many messages at once: what single reads return, whatever happens while blocks are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.columns.blocks import Block, message_size
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StoredMessage
from contrail_link.contract.read import LastRequest, ManyRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.link import LocalLink
from contrail_storage.reading.many_reads import ManyReader, Room
from contrail_storage.replica.shard import Shard
from tests.unit.link.link_rig import remote, run, served, storage
from tests.unit.storage.dispatcher_rig import DispatcherRig
from tests.unit.storage.test_last_reader import SUBJECTS, Stream, steps

LARGE = 1 << 20


class Meanwhile(ManyReader):
    """A reader whose stream changes each time after it has read blocks."""

    def __init__(self, stream: Stream, changes: list[tuple[str, object]]) -> None:
        super().__init__(stream.rig.blocks, stream.rig.reader)
        self.newest_then: list[dict[str, int]] = [stream.newest("", LARGE)]
        self._stream = stream
        self._changes: Iterator[tuple[str, object]] = iter(changes)

    async def _load(self, shard: Shard, groups: Any) -> list[Block | None]:
        blocks = await super()._load(shard, groups)
        for change in self._changes:
            self._stream.do(change)
            self.newest_then.append(self._stream.newest("", LARGE))
            break
        return blocks


def played(changes: list[tuple[str, object]]) -> Stream:
    stream = Stream()
    for change in changes:
        stream.do(change)
    return stream


@given(
    st.lists(steps, min_size=1, max_size=12),
    st.lists(steps, max_size=6),
    st.lists(st.integers(1, 45), min_size=1, max_size=20),
)
def test_messages_that_are_there_all_the_time_are_found_by_sequence(
    before: list[tuple[str, object]], meanwhile: list[tuple[str, object]], seqs: list[int]
) -> None:
    async def scene() -> None:
        stream = played(before)
        machine, reader = stream.rig.machine, Meanwhile(stream, meanwhile)
        at_first = [machine.is_live(seq) for seq in seqs]
        many = await reader.read(stream.rig.shard, np.array(seqs, np.int64), Room(LARGE))
        assert not many.left_out
        for seq, was_live, message in zip(seqs, at_first, many.found, strict=True):
            if message is not None:
                assert was_live
                assert (message.seq, message.subject) == (seq, stream.subjects[seq])
            else:
                assert not (was_live and machine.is_live(seq))

    run(scene())


@given(
    st.lists(steps, min_size=1, max_size=12),
    st.lists(steps, max_size=6),
    st.lists(st.sampled_from([*SUBJECTS, "c"]), min_size=1, max_size=12),
)
def test_newest_of_each_subject_is_what_it_was_at_some_moment(
    before: list[tuple[str, object]], meanwhile: list[tuple[str, object]], names: list[str]
) -> None:
    async def scene() -> None:
        stream = played(before)
        reader = Meanwhile(stream, meanwhile)
        many = await reader.newest(stream.rig.shard, names, Room(LARGE))
        assert not many.left_out
        for name, message in zip(names, many.found, strict=True):
            seq = None if message is None else message.seq
            assert seq in [then.get(name) for then in reader.newest_then]

    run(scene())


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.integers(1, 35), min_size=1, max_size=30),
    st.integers(1, 60),
)
def test_answer_has_what_fits_and_says_what_was_left_out(
    sizes: list[int], seqs: list[int], max_bytes: int
) -> None:
    async def scene() -> None:
        rig = DispatcherRig()
        for size in sizes:
            rig.publish("b", "b", size=size)
        many = await ManyReader(rig.blocks, rig.reader).read(
            rig.shard, np.array(seqs, np.int64), Room(max_bytes)
        )
        found = [one for one in many.found if one is not None]
        left_out = set(many.left_out)
        for at, (seq, message) in enumerate(zip(seqs, many.found, strict=True)):
            assert (message is not None or at in left_out) == (seq <= 2 * len(sizes))
            assert message is None or at not in left_out
        total = sum(len(one.payload) for one in found)
        assert total <= max_bytes or len(found) == 1
        assert found or not left_out

    run(scene())


async def single(link: LocalLink, seq: int) -> StoredMessage | None:
    try:
        return await link.get_message("S", seq)
    except ApiError as error:
        if error.spec is not errors.MESSAGE_NOT_FOUND:
            raise
        return None


@pytest.mark.parametrize("over_tcp", [False, True], ids=["local", "tcp"])
def test_node_returns_what_single_reads_return(tmp_path: Path, over_tcp: bool) -> None:
    async def scene() -> None:
        async with storage(tmp_path) as local:
            for number in range(40):
                headers = {"N": [f"v{number}"]} if number % 3 else None
                sent = [
                    PublishMessage(f"a.{number * at % 7}", headers, b"%d" % at * (at % 50))
                    for at in range(100)
                ]
                await publish(local, "S", sent)
            for seq in range(5, 4_000, 11):
                await local.delete_message("S", seq)
            seqs = [at * 7_919 % 4_100 + 1 for at in range(1_000)]
            subjects = [f"a.{at % 9}" for at in range(30)]
            alone = [await single(local, seq) for seq in seqs]
            newest = [
                (await local.last_messages(LastRequest(stream="S", subject=name)))[0]
                for name in subjects
            ]
            async with served(local) as (_, port), remote(port) as far:
                link = far if over_tcp else local
                many = await link.get_messages(ManyRequest(stream="S", seqs=seqs))
                last = await link.get_messages(ManyRequest(stream="S", subjects=subjects))
                few = await link.get_messages(ManyRequest(stream="S", seqs=seqs, max_bytes=999))
            assert (many.messages, many.left_out) == (alone, [])
            assert [[one] if one else [] for one in last.messages] == newest
            assert few.left_out
            for at, (one, whole) in enumerate(zip(few.messages, alone, strict=True)):
                assert one == (None if at in few.left_out else whole)
            sizes = [message_size(one.headers, len(one.payload)) for one in few.messages if one]
            assert 0 < sum(sizes) <= 999

    run(scene())


def test_stream_that_is_dropped_meanwhile_is_refused() -> None:
    rigs: list[DispatcherRig] = []

    class Dropped(ManyReader):
        async def _load(self, shard: Shard, groups: Any) -> list[Block | None]:
            blocks = await super()._load(shard, groups)
            rigs[0].apply(cmd.DropStream())
            return blocks

    async def scene() -> None:
        stream = played([("publish", ["b"])])
        rigs.append(stream.rig)
        reader = Dropped(stream.rig.blocks, stream.rig.reader)
        with pytest.raises(ApiError) as refused:
            await reader.read(stream.rig.shard, np.array([1], np.int64), Room(LARGE))
        assert refused.value.spec is errors.STREAM_NOT_FOUND

    run(scene())
