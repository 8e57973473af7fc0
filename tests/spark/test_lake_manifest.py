"""Commits of a lake: what they add up to, and which are refused."""

import itertools
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_spark.errors import LakeError
from contrail_spark.lake.layout import parse_data_path
from contrail_spark.lake.manifest import (
    Checkpoint,
    Commit,
    FileEntry,
    Range,
    ShardState,
    State,
    apply,
    checkpoint_of,
    decode,
    decode_info,
    encode,
    is_garbage,
    merged,
    restored,
)
from tests.spark.lakes import archived, entry
from tests.support.each import each

HOUR_US = 3_600_000_000


def test_files_and_positions_add_up() -> None:
    state = apply(State(), archived(1, 1, 10))
    state = apply(state, archived(2, 11, 20))
    state = apply(state, archived(3, 1, 5, shard=1))
    assert [each.from_seq for each in state.live_files()] == [1, 11, 1]
    assert state.archived_through(0) == 20
    assert state.archived_through(1) == 5
    assert state.archived_through(2) == 0


def test_lost_ranges_are_kept_in_order() -> None:
    first = Commit(
        number=1, job="archive", time_us=0, covered=(Range(0, 1, 30),), lost=(Range(0, 1, 20),)
    )
    second = Commit(
        number=2,
        job="archive",
        time_us=0,
        covered=(Range(0, 31, 60),),
        lost=(Range(0, 51, 60), Range(0, 31, 40)),
    )
    state = apply(apply(State(), first), second)
    assert state.shards[0] == ShardState(archived_through=60, lost=((1, 20), (31, 40), (51, 60)))


def test_replaced_files_are_remembered() -> None:
    state = apply(apply(State(), archived(1, 1, 10)), archived(2, 11, 20))
    old = tuple(state.files)
    whole = entry(3, 1, 20)
    state = apply(state, Commit(number=3, job="compact", time_us=7, added=(whole,), removed=old))
    assert state.live_files() == [whole]
    assert state.removed == dict.fromkeys(old, 7)


COVERED = (Range(0, 11, 20),)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"number": 3}, "commit 3 does not follow 1"),
        ({"number": 1}, "commit 1 does not follow 1"),
        ({"covered": (Range(0, 12, 20),)}, "covers sequences 12..20 of shard 0, which is archived"),
        ({"covered": (Range(0, 10, 20),)}, "covers sequences 10..20 of shard 0, which is archived"),
        ({"covered": (Range(0, 11, 10),)}, "covers sequences 11..10"),
        ({"covered": (Range(1, 2, 3),)}, "covers sequences 2..3 of shard 1"),
        ({"lost": (Range(0, 10, 11),)}, "loses sequences that were archived before"),
        ({"lost": (Range(0, 11, 21),)}, "loses sequences that it does not cover"),
        ({"lost": (Range(1, 1, 1),)}, "loses sequences that it does not cover"),
        ({"removed": ("data/x",)}, "removes data/x, which is not in the lake"),
        ({"added": (entry(2, 11, 21),)}, "is beyond what is archived"),
        ({"added": (entry(2, 11, 20, shard=1),)}, "is beyond what is archived"),
        ({"added": (entry(2, 11, 20), entry(2, 11, 20))}, "a second time"),
        ({"added": (entry(1, 1, 10),)}, "was written for commit 1"),
        ({"added": (msgspec.structs.replace(entry(2, 11, 20), path="../x"),)}, "is no path"),
        ({"added": (msgspec.structs.replace(entry(2, 11, 20), to_seq=19),)}, "does not name"),
        ({"added": (msgspec.structs.replace(entry(2, 11, 20), messages=11),)}, "11 messages"),
        ({"added": (msgspec.structs.replace(entry(2, 11, 20), messages=0),)}, "0 messages"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], why: str) -> None:
    state = apply(State(), archived(1, 1, 10))
    fields: dict[str, object] = {"number": 2, "job": "x", "time_us": 0, "covered": COVERED}
    with pytest.raises(LakeError, match=why.replace("..", r"\.\.")):
        apply(state, Commit(**fields | change))  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_other_bytes_are_damage(content: bytes) -> None:
    for read in (lambda: decode(content, 1, "x.json"), lambda: decode_info(content, "x.json")):
        with pytest.raises(LakeError, match=r"^x\.json (is damaged|has format)"):
            read()


@given(data=st.data())
def test_every_changed_byte_of_a_commit_is_noticed(data: st.DataObject) -> None:
    content = encode(archived(1, 1, 10)).rstrip(b"\n")
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    changed = content[:at] + bytes([other]) + content[at + 1 :]
    try:
        found = decode(changed, 1, "x.json")
    except LakeError:
        return
    # A byte of a name that is not read, or white space, may differ; what is committed may not.
    assert found == archived(1, 1, 10)


@given(cut=st.integers(0, 10_000))
def test_a_commit_that_was_cut_is_damaged(cut: int) -> None:
    content = encode(archived(1, 1, 10)).rstrip(b"\n")
    with pytest.raises(LakeError, match="is damaged"):
        decode(content[: cut % len(content)], 1, "x.json")


def test_newer_formats_and_other_numbers_are_refused() -> None:
    content = encode(archived(1, 1, 10))
    newer = content.replace(b'"format":1', b'"format":2')
    with pytest.raises(LakeError, match=r"x has format 2, but this version reads format 1 only"):
        decode(newer, 1, "x")
    with pytest.raises(LakeError, match=r"x is damaged: it is commit 1"):
        decode(content, 2, "x")
    with pytest.raises(LakeError, match=r"lake has format 2"):
        decode_info(b'{"format":2,"new":[]}', "lake")


@each(
    ("change", "why"),
    [
        ({"token": 0}, "token must be at least 1, not 0"),
        ({"token": -1}, "token must be at least 1, not -1"),
        ({"stream": ""}, "the stream '': a name must not be empty"),
        ({"stream": "../S"}, "the stream '../S': a name must not contain"),
        ({"incarnation": ""}, "the incarnation of the stream is empty"),
        ({"created_us": -1}, "created_us must not be negative"),
    ],
)
def test_what_no_job_writes_to_the_file_of_the_lake_is_damage(
    change: dict[str, object], why: str
) -> None:
    sound: dict[str, object] = {"format": 1, "stream": "S", "incarnation": "a", "created_us": 0}
    assert decode_info(msgspec.json.encode(sound | {"token": 1}), "lake.json").token == 1
    with pytest.raises(LakeError, match=f"lake.json is damaged: {re.escape(why)}"):
        decode_info(msgspec.json.encode(sound | change), "lake.json")


ranges = st.tuples(st.integers(1, 50), st.integers(0, 10)).map(lambda each: (each[0], sum(each)))


@given(st.lists(ranges))
def test_merged_ranges_have_the_same_sequences(given_ranges: list[tuple[int, int]]) -> None:
    result = merged(given_ranges)
    assert {seq for first, last in given_ranges for seq in range(first, last + 1)} == {
        seq for first, last in result for seq in range(first, last + 1)
    }
    assert all(left[1] + 1 < right[0] for left, right in itertools.pairwise(result))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.booleans()), max_size=20))
def test_a_checkpoint_is_the_whole_state(steps: list[tuple[int, int, bool]]) -> None:
    state = State()
    for number, (shard, count, is_lost) in enumerate(steps, 1):
        first = state.archived_through(shard) + 1
        covered = Range(shard, first, first + count - 1)
        file = entry(number, covered.from_seq, covered.to_seq, shard=shard)
        replaced = tuple(state.files)[:1] if count % 5 == 0 else ()
        state = apply(
            state,
            Commit(
                number=number,
                job="x",
                time_us=number,
                covered=(covered,),
                lost=(covered,) if is_lost else (),
                added=() if is_lost else (file,),
                removed=replaced,
            ),
        )
    commit = Commit(number=state.number, job="x", time_us=0, checkpoint=checkpoint_of(state))
    assert restored(decode(encode(commit), state.number, "x"), "x") == state


def test_a_state_needs_a_checkpoint() -> None:
    with pytest.raises(LakeError, match="x is damaged: it has no checkpoint"):
        restored(Commit(number=64, job="x", time_us=0), "x")
    assert Checkpoint(files=(), shards={}, removed=()) == checkpoint_of(State())


def test_garbage_is_what_no_commit_can_add_any_more() -> None:
    def found(file: FileEntry) -> bool:
        parsed = parse_data_path(file.path)
        assert parsed is not None
        return is_garbage(parsed, state, until_us)

    until_us = HOUR_US
    state = apply(State(), archived(1, 1, 10))
    assert not found(entry(1, 1, 10)), "in the lake"
    assert found(entry(1, 1, 9)), "commit 1 was made without it"
    assert not found(entry(2, 11, 20)), "commit 2 may still add it"
    removal = Commit(number=2, job="x", time_us=HOUR_US + 1, removed=tuple(state.files))
    state = apply(state, removal)
    assert not found(entry(1, 1, 10)), "readers may still need it"
    until_us += 1
    assert found(entry(1, 1, 10)), "readers have had their time"
