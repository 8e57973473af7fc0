"""Stream names, their subjects and shard ids."""

import itertools
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.model import StreamConfig
from contrail_common.subjects import matches_any, overlaps
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.meta_machine import STREAMS_MAX, MetaMachine, StreamEntry
from contrail_storage.core.results import Done, Refused, Reserved, Result, Writes
from tests.support.calls import calls_of
from tests.unit.storage.machine_rig import RowStore

NAMES = ["A", "B", "C"]
SUBJECTS = [("a",), ("a.*",), ("a.>",), ("b.*", "b.x.>"), ("*.x",), ("c",)]


class Kept:
    """A meta machine with its rows."""

    def __init__(self) -> None:
        self.meta = MetaMachine()
        self.store = RowStore()

    def apply(self, command: cmd.MetaCommand) -> Result:
        writes = Writes()
        result = self.meta.apply(command, writes)
        self.store.write(writes.rows)
        return result

    def make(self, name: str, *subjects: str) -> int:
        """Reserve and list; answers the shard."""
        reserved = self.apply(cmd.ReserveStream(name, subjects, "i"))
        assert isinstance(reserved, Reserved)
        assert isinstance(self.apply(cmd.ListStream(name, subjects)), Done)
        return reserved.shard_id

    def restart(self) -> None:
        self.meta = MetaMachine()
        self.meta.load(self.store.scan(b"M"))


def code(result: Result) -> int:
    assert isinstance(result, Refused)
    return result.code


def test_stream_passes_through_its_stages() -> None:
    kept = Kept()
    assert kept.apply(cmd.ReserveStream("A", ("a",), "i")) == Reserved(1)
    assert kept.meta.streams["A"].stage == "reserved"
    assert kept.apply(cmd.ListStream("A", ("a",))) == Done()
    assert kept.meta.streams["A"].stage == "listed"
    assert kept.apply(cmd.ListStream("A", ("a",))) == Done(changed=False)
    assert kept.apply(cmd.UnlistStream("A")) == Done()
    assert kept.meta.streams["A"].stage == "unlisted"
    assert kept.apply(cmd.ReleaseStream("A")) == Done()
    assert kept.meta.streams == {}


def test_name_stays_taken_until_it_is_released() -> None:
    kept = Kept()
    kept.make("A", "a")
    kept.apply(cmd.UnlistStream("A"))
    assert code(kept.apply(cmd.ReserveStream("A", ("z",), "i"))) == errors.STREAM_EXISTS.code
    kept.apply(cmd.ReleaseStream("A"))
    assert kept.make("A", "a") == 2


def test_shard_id_is_never_used_again_not_even_after_a_restart() -> None:
    kept = Kept()
    shards = []
    for _ in range(5):
        shards.append(kept.make("A", "a"))
        kept.apply(cmd.ReleaseStream("A"))
        kept.restart()
    assert shards == [1, 2, 3, 4, 5]


def test_stream_in_memory_is_renewed_in_another_shard_with_its_configuration() -> None:
    kept = Kept()
    config = StreamConfig(name="A", subjects=("a",), storage="memory")
    number = keys.IN_MEMORY | 1
    assert kept.apply(cmd.ReserveStream("A", ("a",), "i", in_memory=True)) == Reserved(number)
    assert code(kept.apply(cmd.RenewStream("A", "j"))) == errors.STREAM_NOT_FOUND.code
    kept.apply(cmd.ListStream("A", ("a",), config))
    kept.restart()
    assert kept.meta.streams["A"].config == config
    assert kept.apply(cmd.RenewStream("A", "j")) == Reserved(number + 1)
    kept.restart()
    entry = kept.meta.streams["A"]
    assert (entry.shard_id, entry.incarnation, entry.config) == (number + 1, "j", config)
    assert kept.make("B", "b") == 3
    kept.restart()
    assert kept.meta.streams["A"].stage == "listed"


def test_stream_in_files_is_not_renewed() -> None:
    kept = Kept()
    kept.make("A", "a")
    assert code(kept.apply(cmd.RenewStream("A", "j"))) == errors.STREAM_NOT_FOUND.code
    assert code(kept.apply(cmd.RenewStream("B", "j"))) == errors.STREAM_NOT_FOUND.code


def test_entry_of_before_there_were_streams_in_memory_decodes() -> None:
    row = msgspec.msgpack.encode(["A", 1, "i", ["a"], "listed"])
    meta = MetaMachine()
    meta.load([(keys.small_key(keys.STREAM, cmd.META_SHARD, 1), row)])
    assert meta.streams["A"].config is None


def test_subjects_that_overlap_those_of_another_stream_are_refused() -> None:
    kept = Kept()
    kept.make("A", "a.*")
    refused = kept.apply(cmd.ReserveStream("B", ("b", "*.x"), "i"))
    assert refused == Refused(errors.SUBJECT_OVERLAP.code, "*.x overlaps with a.* of stream A")
    kept.make("B", "b")
    assert code(kept.apply(cmd.ListStream("B", ("a.b",)))) == errors.SUBJECT_OVERLAP.code
    assert kept.meta.streams["B"].subjects == ("b",)


def test_stream_may_change_to_subjects_that_overlap_its_own() -> None:
    kept = Kept()
    kept.make("A", "a.*")
    assert kept.apply(cmd.ListStream("A", ("a.>",))) == Done()


@pytest.mark.parametrize("subjects", [("s.7.x.y",), ("t.*", "u.>"), ("s.7.>",)])
def test_changes_and_routes_cost_the_same_beside_many_streams(subjects: tuple[str, ...]) -> None:
    def calls(streams: int) -> list[int]:
        kept, found = Kept(), []
        for number in range(streams):
            kept.make(f"S{number}", f"s.{number}.x", f"q.{number}.>")
        for command in (
            cmd.ReserveStream("T", subjects, "i"), cmd.ListStream("T", subjects),
            cmd.ListStream("T", ("v",)), cmd.UnlistStream("T"), cmd.ReleaseStream("T"),
        ):  # fmt: skip
            found.append(calls_of(partial(kept.meta.apply, command, Writes())))
        return [*found, calls_of(lambda: kept.meta.capturing("q.7.new"))]

    assert calls(2_000) == calls(10)


@pytest.mark.long
def test_streams_are_bounded() -> None:
    kept = Kept()
    for number in range(STREAMS_MAX - 2):
        kept.apply(cmd.ReserveStream(f"S{number}", (), "i"))
    kept.restart()
    too_many = cmd.ReserveStream("more", (), "i", 3)
    assert code(kept.apply(too_many)) == errors.STREAM_LIMIT.code
    assert isinstance(kept.apply(cmd.ReserveStream("more", (), "i", 2)), Reserved)
    assert code(kept.apply(cmd.ReserveStream("last", (), "i"))) == errors.STREAM_LIMIT.code
    kept.apply(cmd.ReleaseStream("more"))
    assert isinstance(kept.apply(cmd.ReserveStream("last", (), "i")), Reserved)


def test_stream_with_shards_gets_ids_in_a_row_and_keeps_them_over_a_restart() -> None:
    kept = Kept()
    assert kept.make("A", "a") == 1
    assert kept.apply(cmd.ReserveStream("B", ("b",), "i", 64)) == Reserved(2)
    assert kept.apply(cmd.ReserveStream("C", ("c",), "i")) == Reserved(66)
    kept.restart()
    assert list(kept.meta.streams["B"].shard_ids) == list(range(2, 66))
    assert kept.apply(cmd.ReserveStream("D", ("d",), "i")) == Reserved(67)
    for shards in (0, 65):
        refused = kept.apply(cmd.ReserveStream("E", ("e",), "i", shards))
        assert code(refused) == errors.STREAM_CONFIG_INVALID.code


def test_row_of_a_stream_from_before_shards_has_one() -> None:
    kept = Kept()
    kept.make("A", "a")
    for key, value in dict(kept.store.scan(b"M")).items():
        row = msgspec.msgpack.decode(value) if value[0] & 0x90 == 0x90 else None
        if isinstance(row, list):
            kept.store.write([("put", key, msgspec.msgpack.encode(row[:5]))])
    kept.restart()
    assert list(kept.meta.streams["A"].shard_ids) == [1]


names, subjects = st.sampled_from(NAMES), st.sampled_from(SUBJECTS)
histories = st.lists(
    st.one_of(
        st.builds(cmd.ReserveStream, names, subjects, st.just("i")),
        st.builds(cmd.ListStream, names, subjects),
        st.builds(cmd.UnlistStream, names),
        st.builds(cmd.ReleaseStream, names),
    ),
    max_size=20,
)


def captured(meta: MetaMachine, subject: str) -> StreamEntry | None:
    listed = [entry for entry in meta.streams.values() if entry.stage == "listed"]
    return next((entry for entry in listed if matches_any(entry.subjects, subject)), None)


@given(histories, st.integers(0, 20))
def test_no_two_streams_ever_share_a_subject_and_a_restart_changes_nothing(
    history: list[cmd.MetaCommand], restart_at: int
) -> None:
    kept, shards = Kept(), list[int]()
    for at, command in enumerate(history):
        if at == restart_at:
            before = dict(kept.meta.streams)
            kept.restart()
            assert kept.meta.streams == before
        assert kept.meta.names == sorted(kept.meta.streams)
        result = kept.apply(command)
        if isinstance(result, Reserved):
            shards.append(result.shard_id)
        for left, right in itertools.combinations(kept.meta.streams.values(), 2):
            assert not any(overlaps(a, b) for a in left.subjects for b in right.subjects)
        for subject in ("a", "a.x", "b.x.y", "z"):
            assert kept.meta.capturing(subject) == captured(kept.meta, subject)
    assert shards == list(range(1, len(shards) + 1))
    # A replica that loads the rows refuses with the same words.
    refusals = [kept.meta.overlap(one, "C") for one in SUBJECTS]
    kept.restart()
    assert [kept.meta.overlap(one, "C") for one in SUBJECTS] == refusals
