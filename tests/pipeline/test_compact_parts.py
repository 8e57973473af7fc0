"""A compaction without a JVM: files are merged, kept for readers, and deleted later."""

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.compact import rounds, work
from contrail_pipeline.compact.command import keep_of
from contrail_pipeline.compact.rounds import Compactor, Wishes
from contrail_pipeline.erase import steps as erasing
from contrail_pipeline.erase.steps import Eraser
from contrail_pipeline.erase.steps import Wishes as ErasureWishes
from contrail_pipeline.restore.parts import splits_of
from contrail_pipeline.restore.work import BATCH_SEQUENCES, numbered
from contrail_spark.errors import LakeError
from contrail_spark.lake.layout import Partition
from contrail_spark.lake.manifest import Commit, FileEntry, Range, partition_of
from contrail_spark.lake.parquet import SCHEMA
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.splits import verified_once
from contrail_spark.lake.store import Lake
from contrail_spark.schema import conform
from tests.pipeline.jobs import LocalJob, run_here
from tests.pipeline.lakes import Row, archive, made_lake, made_row, partition_of_row, write
from tests.support.command import run_contrail

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000
MIB = 1 << 20
SECRET = "s.a.secret"


class KilledError(BaseException):
    """The end of the process at some step."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "run_tasks", run_here)
    monkeypatch.setattr(erasing, "run_tasks", run_here)


def compact(lake: Lake, file_bytes: int = MIB, keep_us: int = HOUR_US, **job: Any) -> Any:
    local = LocalJob()
    local.dry_run = job.get("dry_run", False)
    Compactor(local, lake.root, Wishes(file_bytes, keep_us)).run()  # type: ignore[arg-type]
    [result] = local.results
    return result


def erase(lake: Lake, *subjects: str) -> None:
    Eraser(LocalJob(), lake.root, ErasureWishes(subjects)).run()  # type: ignore[arg-type]


def some(first: int, last: int, shard: int = 0) -> list[Row]:
    """Messages of three tokens, of which one is secret, and of a new day after each 100."""
    return [
        made_row(
            seq,
            SECRET if seq % 5 == 0 else f"s.{'abc'[seq % 3]}.x",
            shard,
            seq // 100 * DAY_US + seq,
        )
        for seq in range(first, last + 1)
    ]


def small_lake(root: Path, last: int = 240, step: int = 20, token: int | None = None) -> Lake:
    """A lake of two shards, as small archives have made it."""
    lake = Lake.ensure(root, "S", "first", token)
    for first in range(1, last + 1, step):
        more(lake, first, first + step - 1)
    return lake


def more(lake: Lake, first: int, last: int) -> None:
    shards = range(2)
    rows = [row for shard in shards for row in some(first, last, shard)]
    archive(lake, rows, [Range(shard, first, last) for shard in shards])


def content(lake: Lake) -> list[Row]:
    """All messages of the lake, whose files are verified."""
    state = lake.state()
    reader = LakeReader(lake, Selection())
    names = tuple(SCHEMA.names)
    return [
        row
        for shard, known in sorted(state.shards.items())
        for batch in reader.read(reader.range(state, shard, (1, known.archived_through)), names)
        for row in conform(batch, SCHEMA).to_pylist()
    ]


def on_disk(lake: Lake) -> set[str]:
    """All data files, and what is unfinished."""
    found = [*lake.root.rglob("*.parquet"), *(lake.root / "tmp").iterdir()]
    return {each.relative_to(lake.root).as_posix() for each in found}


def first_time(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], *, sooner: bool = False
) -> None:
    """Something happens when the first files are merged, or sooner, and not yet committed."""
    todo = [act]

    def run(*given: Any) -> list[Any]:
        if todo and sooner:
            todo.pop()()
        found = run_here(*given)
        if todo:
            todo.pop()()
        return found

    monkeypatch.setattr(rounds, "run_tasks", run)


@pytest.mark.parametrize("token", [None, 2])
def test_small_files_of_a_folder_become_one(tmp_path: Path, token: int | None) -> None:
    lake = small_lake(tmp_path / "lake", token=token)
    before, rows = lake.state(), content(lake)
    result = compact(lake)
    after = lake.state()
    places = [(each.shard, partition_of(each)) for each in after.live_files()]
    assert len(set(places)) == len(places) == 2 * 3 * (1 if token is None else 3)
    assert content(lake) == rows
    # Readers that have begun before find their files.
    assert on_disk(lake) == set(before.files) | set(after.files)
    assert after.shards == before.shards
    assert sum(each.messages for each in after.files.values()) == 480
    assert result == {
        "lake": str(lake.root),
        "commits": 1,
        "merged": len(before.files),
        "files": len(after.files),
        "messages": 480,
        "bytes_before": sum(each.bytes for each in before.files.values()),
        "bytes": sum(each.bytes for each in after.files.values()),
        "deleted": 0,
        "waiting": len(before.files),
    }
    again = compact(lake)
    assert (again["commits"], again["merged"], again["deleted"]) == (0, 0, 0)
    assert again["waiting"] == len(before.files)
    last = compact(lake, keep_us=0)
    assert (last["commits"], last["deleted"], last["waiting"]) == (0, len(before.files), 0)
    assert on_disk(lake) == set(after.files) == set(lake.state().files)
    assert content(lake) == rows


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    lake = small_lake(tmp_path / "lake", last=80)
    before = on_disk(lake)
    result = compact(lake, dry_run=True)
    assert (result["merged"], result["files"], result["messages"]) == (8, 2, 160)
    assert (result["deleted"], result["commit"]) == (0, 4)
    assert (on_disk(lake), lake.state().number) == (before, 4)
    compact(lake)
    result = compact(lake, keep_us=0, dry_run=True)
    assert (result["merged"], result["deleted"]) == (0, 8)
    assert before < on_disk(lake)


def test_sizes_are_those_before_compression(tmp_path: Path) -> None:
    # 100 kB each, of which compression leaves next to nothing.
    rows = [{**made_row(seq), "data": bytes(100_000)} for seq in range(1, 41)]
    lake = made_lake(tmp_path / "lake", *([row] for row in rows))
    assert compact(lake)["files"] == 4
    assert [each.messages for each in lake.state().live_files()] == [10] * 4
    assert compact(lake, 8 * MIB)["files"] == 1


def test_many_tiny_files_are_merged_in_one_run(tmp_path: Path) -> None:
    """What they have in common counts once in the new file, which may be merged again."""
    headers = [("Common", ["x" * 20_000])]
    rows = [{**made_row(seq), "headers": headers} for seq in range(1, 101)]
    lake = made_lake(tmp_path / "lake", *([row] for row in rows))
    result = compact(lake)
    assert result["commits"] > 1
    assert (result["merged"], result["files"], result["messages"]) == (100, 1, 100)
    assert result["bytes"] == lake.state().live_files()[0].bytes
    assert compact(lake, keep_us=0)["commits"] == 0


def test_a_compaction_that_is_killed_at_any_step_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several commits.
    monkeypatch.setattr(rounds, "GROUPS_MAX", 2)
    taken = last = 0

    def killed_at(act: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any, **named: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken > last:  # nor does the process clean up
                raise KilledError
            return act(*given, **named)

        return stepped

    made = small_lake(tmp_path / "lake", last=150, step=50)
    rows = content(made)
    for last in itertools.count():
        lake = Lake.open(shutil.copytree(made.root, tmp_path / str(last)))
        taken = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "link", "unlink", "mkdir"):
                patch.setattr(os, name, killed_at(getattr(os, name)))
            try:
                compact(lake, keep_us=0)
            except KilledError:
                pass
            else:
                break
        assert content(lake) == rows
        if last % 3:
            compact(lake, keep_us=0)
            assert content(lake) == rows
            assert on_disk(lake) == set(lake.state().files)
            assert len(lake.state().files) == 4
        else:
            erase(lake, SECRET)
            assert secrets(lake) == 0
            assert content(lake) == [row for row in rows if row["subject"] != SECRET]
    assert last > 30


@pytest.mark.parametrize("sooner", [True, False])
def test_the_slower_of_two_compactions_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sooner: bool
) -> None:
    lake = small_lake(tmp_path / "lake")
    rows, results = content(lake), []
    first_time(monkeypatch, lambda: results.append(compact(lake, keep_us=0)), sooner=sooner)
    slower = compact(lake, 2 * MIB, keep_us=0)
    assert results[0]["merged"] == 28
    assert (slower["merged"], slower["waiting"]) == (0, 0)
    assert content(lake) == rows
    assert on_disk(lake) == set(lake.state().files)


def test_compactions_and_archives_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GROUPS_MAX", 1)
    monkeypatch.setattr(rounds, "ATTEMPTS", 1_000)
    lake = small_lake(tmp_path / "lake", last=100)
    failed: list[BaseException] = []

    def run(size: int, keep_us: int) -> None:
        try:
            compact(Lake.open(lake.root), size, keep_us)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=given) for given in ((MIB, 0), (2 * MIB, HOUR_US))]
    for each in threads:
        each.start()
    for first in range(101, 401, 10):
        while lake.state().archived_through(0) < first:
            # A compaction was faster, and may have deleted what this had written.
            with suppress(LakeError, OSError):
                more(lake, first, first + 9)
    for each in threads:
        each.join()
    assert failed == []
    compact(lake, keep_us=0)
    assert [row["seq"] for row in content(lake)] == 2 * list(range(1, 401))
    assert on_disk(lake) == set(lake.state().files)
    assert len(lake.state().files) == 2 * 5


def test_an_archive_that_is_faster_is_compacted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = small_lake(tmp_path / "lake", last=80)

    def archived() -> None:
        more(lake, 81, 90)
        # As an archive does at its end: what was written for the lost commit goes away.
        assert lake.clean() == 2

    first_time(monkeypatch, archived)
    assert compact(lake, keep_us=0)["merged"] == 10
    assert [row["seq"] for row in content(lake)] == 2 * list(range(1, 91))
    assert on_disk(lake) == set(lake.state().files)
    assert len(lake.state().files) == 2


def test_files_that_disappear_while_they_are_measured_are_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = small_lake(tmp_path / "lake", last=80)
    rows, before, todo = content(lake), rounds.size_of, [lambda: compact(lake, keep_us=0)]

    def late(*given: Any) -> int | None:
        if todo:
            todo.pop()()
        return before(*given)

    monkeypatch.setattr(rounds, "size_of", late)
    assert compact(lake, 2 * MIB)["commits"] == 0
    assert content(lake) == rows


def test_a_job_that_never_stops_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = small_lake(tmp_path / "lake", last=80)

    def run(*given: Any) -> list[Any]:
        found = run_here(*given)
        state = lake.state()
        lake.commit(state, Commit(number=state.number + 1, job="test", time_us=1))
        return found

    monkeypatch.setattr(rounds, "run_tasks", run)
    with pytest.raises(Failed, match=r"other jobs have changed the lake in .* 10 times; run this"):
        compact(lake)
    assert lake.state().number == 4 + rounds.ATTEMPTS


def secrets(lake: Lake) -> int:
    """How many messages to erase are in files, whatever the manifest says of these."""
    tables = [pq.read_table(each, columns=["subject"]) for each in lake.root.rglob("*.parquet")]
    return sum(table["subject"].to_pylist().count(SECRET) for table in tables)


@pytest.mark.parametrize("token", [None, 2, 3])
def test_an_erasure_reaches_files_that_are_kept_for_readers(
    tmp_path: Path, token: int | None
) -> None:
    lake = small_lake(tmp_path / "lake", last=80, token=token)
    kept = [row for row in content(lake) if row["subject"] != SECRET]
    compact(lake)
    assert secrets(lake) == 2 * 2 * 16
    erase(lake, SECRET)
    assert secrets(lake) == 0
    assert content(lake) == kept
    compact(lake, keep_us=0)
    assert content(lake) == kept
    assert on_disk(lake) == set(lake.state().files)


def test_what_is_erased_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = small_lake(tmp_path / "lake", last=80)
    kept = [row for row in content(lake) if row["subject"] != SECRET]
    first_time(monkeypatch, lambda: erase(lake, SECRET))
    assert compact(lake)["messages"] == 128
    assert secrets(lake) == 0
    assert content(lake) == kept


@pytest.mark.parametrize("seen", [0, 3])
def test_a_reader_that_planned_before_finishes(tmp_path: Path, seen: int) -> None:
    lake = small_lake(tmp_path / "lake", last=90, step=10)
    reader = LakeReader(lake, Selection())
    split = reader.range(lake.state(), 1, (1, 90))
    paths = [lake.root / each.path for each in split.files]
    reading = reader.read(split, ())
    found = [next(reading) for _ in range(seen)]
    compact(lake)
    # An archive deletes only what was replaced long ago.
    assert lake.clean() == 0
    assert sum(pq.read_metadata(each).num_rows for each in paths) == 90
    # And even if its files are deleted at once.
    compact(lake, keep_us=0)
    assert not any(each.exists() for each in paths)
    found += reading
    assert [seq for batch in found for seq in batch["seq"].to_pylist()] == list(range(1, 91))


@pytest.mark.parametrize("token", [None, 2])
def test_a_restore_sends_the_same_batches_after_a_compaction(
    tmp_path: Path, token: int | None
) -> None:
    chance = random.Random(134)
    seqs = sorted(chance.sample(range(1, 6 * BATCH_SEQUENCES), 600))
    # Nothing is left of some batches, and others are in several files.
    seqs = [seq for seq in seqs if seq // BATCH_SEQUENCES != 3]
    rows = [made_row(seq, f"s.{seq % 3}") for seq in seqs]
    cuts = [0, *sorted(chance.sample(range(1, len(rows)), 30)), len(rows)]
    parts = [rows[first:last] for first, last in itertools.pairwise(cuts)]
    lake = made_lake(tmp_path / "lake", *parts, token=token)

    def batches(done: int) -> list[tuple[int, int]]:
        """The number of the batch of each message, in the order in which they are sent."""
        bounds = 1, lake.state().archived_through(0)
        splits = splits_of(0, bounds, lake.state().live_files(), done, 2)
        return [
            (number, seq)
            for split in verified_once(splits)
            for number, found in numbered(LakeReader(lake, Selection()).read(split, ()))
            for batch in found
            for seq in batch["seq"].to_pylist()
        ]

    before = [batches(done) for done in range(6)]
    assert [seq for _, seq in before[0]] == seqs
    compact(lake, keep_us=0)
    assert len(lake.state().files) == (1 if token is None else 3)
    assert [batches(done) for done in range(6)] == before


def test_row_groups_of_a_token_are_smaller(tmp_path: Path) -> None:
    """A range is read from the files of all tokens: of each at least a row group is decoded."""
    chance = random.Random(134)
    parts = [
        [{**made_row(seq), "data": chance.randbytes(MIB)} for seq in range(first, first + 5)]
        for first in range(1, 40, 5)
    ]
    for token, most in ((None, 33), (1, 5)):
        lake = made_lake(tmp_path / f"lake{token}", *parts, token=token)
        compact(lake, 256 * MIB)
        [entry] = lake.state().live_files()
        metadata = pq.read_metadata(lake.root / entry.path)
        sizes = [
            metadata.row_group(at).total_byte_size // MIB for at in range(metadata.num_row_groups)
        ]
        assert sum(sizes) >= 39
        assert most - 1 <= max(sizes) <= most


def test_memory_is_bounded_by_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(134)
    parts = [
        [{**made_row(seq), "data": chance.randbytes(MIB // 2)} for seq in range(first, first + 4)]
        for first in range(1, 80, 4)
    ]
    lake = made_lake(tmp_path / "lake", *parts)
    monkeypatch.setattr(work, "SLAB_BYTES", 2 * MIB)
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert compact(lake, 256 * MIB)["messages"] == 80
    finally:
        pa.set_memory_pool(usual)
    assert 2 * MIB < pool.max_memory() < 16 * MIB


def check_refused(lake: Lake, why: str) -> None:
    """The sentence names what is wrong, and the lake stays as it is."""
    before = lake.state()
    with pytest.raises(Failed, match=why) as failed:
        compact(lake)
    assert "\n" not in str(failed.value)
    assert lake.state() == before


def test_a_damaged_or_missing_file_ends_the_job(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", *(some(seq, seq) for seq in range(1, 9)))
    entry = lake.state().live_files()[3]
    path = lake.root / entry.path
    whole = path.read_bytes()
    # In the name of the writer, which nobody reads.
    at = whole.index(b"parquet-cpp-arrow")
    path.write_bytes(whole[:at] + b"P" + whole[at + 1 :])
    check_refused(lake, rf"lake: {entry.path} is damaged: its content does not match its checksum")
    path.write_bytes(whole[:-1])
    check_refused(lake, rf"{entry.path} is damaged")
    path.unlink()
    check_refused(lake, rf"lake: {entry.path} is missing")
    path.write_bytes(whole)
    assert compact(lake)["merged"] == 8


def with_entry(lake: Lake, place: Partition, rows: list[Row], **wrong: Any) -> FileEntry:
    """Commit one more file of archived sequences, with an entry that may be wrong."""
    state = lake.state()
    number = state.number + 1
    entry = msgspec.structs.replace(write(lake, number, place, rows), **wrong)
    lake.commit(state, Commit(number=number, job="test", time_us=1, added=(entry,)))
    return entry


def test_a_file_that_the_manifest_contradicts_is_not_merged(tmp_path: Path) -> None:
    rows = some(1, 3)
    lake = made_lake(tmp_path / "lake", rows, some(50, 60))
    place = partition_of_row(lake, rows[0])
    entry = with_entry(lake, place, some(11, 13), messages=2)
    check_refused(lake, rf"{entry.path} has 3 messages in its range instead of 2")


def test_messages_of_another_folder_are_not_merged(tmp_path: Path) -> None:
    rows = some(1, 3)
    lake = made_lake(tmp_path / "lake", rows, some(150, 160))
    entry = with_entry(lake, partition_of_row(lake, rows[0]), some(111, 113))
    check_refused(lake, rf"messages of other folders are in one of .*{entry.path}")


def test_files_that_overlap_are_refused(tmp_path: Path) -> None:
    rows = some(1, 3)
    lake = made_lake(tmp_path / "lake", rows, some(50, 60))
    entry = with_entry(lake, partition_of_row(lake, rows[0]), some(3, 4))
    check_refused(lake, rf"S-0-1-3-r1\.parquet and {entry.path} overlap: no lake has")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    lake = small_lake(tmp_path / "lake", last=80)
    (lake.root / "tmp").rename(lake.root / "away")
    (lake.root / "tmp").touch()
    with pytest.raises(Failed, match=rf"the lake in {lake.root}: {lake.root}/tmp: File exists"):
        compact(lake)


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("1h", HOUR_US), ("7d", 168 * HOUR_US), ("999ns", 0)]
)
def test_times_for_readers(text: str, expected: int) -> None:
    assert keep_of(text) == expected


@pytest.mark.parametrize("text", ["-1s", "7d1us", "soon", ""])
def test_wrong_times_for_readers(text: str) -> None:
    with pytest.raises(Misuse, match="--keep"):
        keep_of(text)


def test_the_command_without_work_starts_no_spark(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", some(1, 3))
    common = ("pipeline", "compact")
    done = run_contrail(*common, str(lake.root), env={})
    assert (done.exit_code, done.stdout) == (0, "nothing to merge in 1 file\n")
    more_of_it = made_lake(tmp_path / "more", some(1, 3), some(4, 6))
    done = run_contrail(*common, str(more_of_it.root), "--dry-run", env={})
    assert done.exit_code == 0
    assert done.stdout == (
        f"would merge 2 files of the lake in {more_of_it.root} into 1, and delete 0 old files\n"
    )
    for arguments, status, why in (
        ([str(tmp_path)], 1, f"there is no lake in {tmp_path}"),
        ([str(lake.root), "--keep", "169h"], 2, "--keep must be from 0 to 7d, not 169h"),
        ([str(lake.root), "--file-size", "1k"], 2, "--file-size must be from 1 MiB to 16 GiB"),
    ):
        done = run_contrail(*common, *arguments, env={})
        assert done.exit_code == status
        assert why in done.stderr
