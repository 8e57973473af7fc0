"""The newest message of each subject as of a point, while messages come and go between pages."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StoredMessage, StreamConfig
from contrail_link.contract.read import LastRequest
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.reading.last_reader import LastBounds, LastReader
from tests.support.each import each
from tests.unit.link.link_rig import storage
from tests.unit.storage.dispatcher_rig import DispatcherRig, run
from tests.unit.storage.machine_rig import configure, removal_of
from tests.unit.storage.naive_subjects import naive_matches

SUBJECTS = ["b", *(f"a.{number}" for number in range(6))]
FILTERS = ["", "b", "a.*", "a.3", "c"]

subjects = st.lists(st.sampled_from(SUBJECTS), min_size=1, max_size=6)
steps = st.one_of(
    st.tuples(st.just("publish"), subjects),
    st.tuples(st.just("delete"), st.integers(1, 40)),
    st.tuples(st.just("purge"), st.sampled_from(SUBJECTS)),
    st.tuples(st.just("trim"), st.integers(1, 30)),
    st.tuples(st.just("limit"), st.integers(1, 3)),
    st.tuples(st.just("make room"), st.none()),
)
bounds = st.builds(LastBounds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))


class Stream:
    """A stream whose live messages are also known one by one."""

    def __init__(self) -> None:
        self.rig = DispatcherRig()
        self.subjects: dict[int, str] = {}

    def do(self, step: tuple[str, object]) -> None:
        machine = self.rig.machine
        match step:
            case ("publish", list(names)):
                for at, name in enumerate(names):
                    self.subjects[machine.counters.last_seq + 1 + at] = name
                self.rig.publish(*names)
            case ("delete", int(seq)) if machine.is_live(seq):
                self.rig.apply(cmd.DeleteMessage(seq))
            case ("purge", str(name)):
                self.rig.apply(removal_of(machine, [name]))
            case ("trim", int(to_seq)):
                self.rig.apply(cmd.Trim(to_seq, 1_000))
            case ("make room", _):
                self.rig.reclaim()
            case ("limit", int(limit)):
                config = StreamConfig(name="S", subjects=("a.*", "b"), max_msgs_per_subject=limit)
                self.rig.apply(configure(config))
                self.rig.apply(cmd.EnforceLimits(1_000))

    def live(self, name: str) -> list[int]:
        """Live sequences of the subject."""
        known = (seq for seq, subject in self.subjects.items() if subject == name)
        return sorted(seq for seq in known if self.rig.machine.is_live(seq))

    def newest(self, pattern: str, point_seq: int) -> dict[str, int]:
        """Subject to its newest live message as of the point."""
        found = {}
        for name in SUBJECTS:
            if naive_matches(pattern or ">", name):
                seqs = [seq for seq in self.live(name) if seq <= point_seq]
                if seqs:
                    found[name] = seqs[-1]
        return found


@given(
    st.lists(steps, min_size=1, max_size=12),
    st.lists(steps, max_size=12),
    st.sampled_from(FILTERS),
    st.integers(0, 40),
    st.integers(1, 3),
    bounds,
)
def test_pages_hold_what_the_naive_model_has_whatever_happens_between_them(
    before: list[tuple[str, object]],
    between: list[tuple[str, object]],
    pattern: str,
    up_to_seq: int,
    limit: int,
    bound: LastBounds,
) -> None:
    async def scene() -> None:
        stream = Stream()
        for step in before:
            stream.do(step)
        reader = LastReader(stream.rig.reader, bound)
        last_seq = stream.rig.machine.counters.last_seq
        point_seq = min(up_to_seq or last_seq, last_seq)
        pinned = stream.newest(pattern, point_seq)
        seen: dict[str, int] = {}
        token: str | None = ""
        happens = iter(between)
        while token is not None:
            request = LastRequest(
                stream="S", subject=pattern, up_to_seq=up_to_seq, limit=limit, token=token
            )
            page, token = await reader.read(stream.rig.shard, request)
            assert len(page) <= limit
            assert page == sorted(page, key=lambda message: message.seq)
            now = stream.newest(pattern, point_seq)
            for message in page:
                assert message.subject not in seen
                assert now[message.subject] == message.seq
                seen[message.subject] = message.seq
            for step in happens:
                stream.do(step)
                break
        for name, seq in pinned.items():
            if stream.rig.machine.is_live(seq):
                assert seen[name] == seq
        assert seen.keys() <= pinned.keys()

    run(scene())


def scene_of(work: Callable[[DispatcherRig, LastReader], Coroutine[None, None, None]]) -> None:
    """Run ``work`` on a stream of 3,000 messages in blocks of 100, ``b`` once at the beginning."""

    async def whole() -> None:
        rig = DispatcherRig()
        rig.publish("b")
        for _ in range(30):
            rig.publish(*(f"a.{number % 10}" for number in range(100)))
        await work(rig, LastReader(rig.reader))

    run(whole())


async def pages(
    rig: DispatcherRig, reader: LastReader, request: LastRequest
) -> list[list[StoredMessage]]:
    found = []
    token: str | None = ""
    while token is not None:
        asked = LastRequest(
            stream="S",
            subject=request.subject,
            up_to_seq=request.up_to_seq,
            limit=request.limit,
            token=token,
        )
        page, token = await reader.read(rig.shard, asked)
        found.append(page)
    return found


def test_rare_subject_as_of_now_takes_one_block() -> None:
    async def work(rig: DispatcherRig, _: LastReader) -> None:
        reader = LastReader(rig.reader, LastBounds(blocks=1))
        found = await pages(rig, reader, LastRequest(stream="S", subject="b"))
        assert [[message.seq for message in page] for page in found] == [[1]]

    scene_of(work)


def test_search_beyond_the_bound_continues_from_the_token() -> None:
    async def work(rig: DispatcherRig, _: LastReader) -> None:
        rig.publish("b")
        request = LastRequest(stream="S", subject="b", up_to_seq=3_001)
        blocks = len(rig.blocks.directory(rig.machine.shard_id))
        # After a block without a match, the search passes over the others.
        for bound, requests in ((1, blocks - 1), (2, 2), (3, 1)):
            reader = LastReader(rig.reader, LastBounds(blocks=bound))
            found = await pages(rig, reader, request)
            assert [len(page) for page in found] == [0] * (requests - 1) + [1]
            assert found[-1][0].seq == 1

    scene_of(work)


def test_page_ends_with_the_message_that_reaches_its_bytes() -> None:
    async def work(rig: DispatcherRig, _: LastReader) -> None:
        reader = LastReader(rig.reader, LastBounds(page_bytes=4))
        found = await pages(rig, reader, LastRequest(stream="S"))
        assert [len(page) for page in found] == [4, 4, 3]

    scene_of(work)


@each("changed", ["subject", "up_to_seq", "incarnation", "garbage"])
def test_token_of_another_request_is_refused(changed: str) -> None:
    async def work(rig: DispatcherRig, reader: LastReader) -> None:
        _, token = await reader.read(rig.shard, LastRequest(stream="S", limit=1))
        assert token
        if changed == "incarnation":
            rig.apply(cmd.DropStream())
            rig.apply(cmd.ConfigureStream(rig.config, "another", bytes(32)))
        if changed == "garbage":
            token = token[:-4]
        request = LastRequest(
            stream="S",
            subject="b" if changed == "subject" else "",
            up_to_seq=9 if changed == "up_to_seq" else 0,
            token=token,
        )
        with pytest.raises(ApiError) as refused:
            await reader.read(rig.shard, request)
        assert refused.value.spec is errors.BAD_REQUEST

    scene_of(work)


def test_time_before_the_first_message_has_nothing() -> None:
    async def work(rig: DispatcherRig, reader: LastReader) -> None:
        for up_to_time_ns, count in ((1, 0), (rig.log_ns, 0), (rig.log_ns + 1, 11)):
            request = LastRequest(stream="S", up_to_time_ns=up_to_time_ns)
            assert len((await reader.read(rig.shard, request))[0]) == count

    scene_of(work)


def test_read_of_a_stream_that_was_dropped_meanwhile_is_refused() -> None:
    async def work(rig: DispatcherRig, reader: LastReader) -> None:
        rig.reader.held = True
        reading = asyncio.create_task(reader.read(rig.shard, LastRequest(stream="S")))
        await asyncio.sleep(0)
        rig.apply(cmd.DropStream())
        rig.reader.held = False
        rig.reader.step()
        with pytest.raises(ApiError) as refused:
            await reading
        assert refused.value.spec is errors.STREAM_NOT_FOUND

    scene_of(work)


def test_token_continues_after_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        request = LastRequest(stream="S", limit=2)
        async with storage(tmp_path) as link:
            messages = [PublishMessage(f"a.{number % 5}", None, b"x") for number in range(20)]
            await publish(link, "S", messages)
            first, token = await link.last_messages(request)
            await publish(link, "S", messages[:3])
        async with storage(tmp_path) as link:
            seen = [message.seq for message in first]
            while token is not None:
                more = LastRequest(stream="S", limit=2, token=token)
                page, token = await link.last_messages(more)
                seen += [message.seq for message in page]
        assert sorted(seen) == [16, 17, 18, 19, 20]

    run(scene())
