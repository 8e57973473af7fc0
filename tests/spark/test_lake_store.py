"""A lake on disk: created once, committed to by one job at a time, and checked when read."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from contrail_spark.errors import LakeConflictError, LakeError, LakeNotFoundError
from contrail_spark.lake.layout import TEMPORARY, DataFile, Partition
from contrail_spark.lake.manifest import CHECKPOINT_EVERY, REMOVED_KEPT_US, Commit, Range
from contrail_spark.lake.store import Lake
from tests.spark.lakes import DAY, archived, entry

HOUR_US = 3_600_000_000
FILE = DataFile(Partition(DAY), "S", 0, 1, 10, 1)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.ensure(tmp_path / "lake", "S", "i1", None)


def manifest(lake: Lake, number: int) -> Path:
    return lake.root / "manifest" / f"{number:08}.json"


def written(lake: Lake, name: str, content: bytes) -> Path:
    path = lake.root / TEMPORARY / name
    path.write_bytes(content)
    return path


def test_a_lake_is_made_once(lake: Lake) -> None:
    assert Lake.ensure(lake.root, "S", "i1", None).info == lake.info
    assert Lake.open(str(lake.root)).info == lake.info
    assert lake.state().number == 0
    assert not list((lake.root / TEMPORARY).iterdir())


@pytest.mark.parametrize(
    ("stream", "incarnation", "token", "why"),
    [
        ("T", "i1", None, "holds stream S, not T"),
        ("S", "i2", None, "stream S was deleted and created again since the lake"),
        ("S", "i1", 2, "is partitioned by day, not by day and subject token 2"),
    ],
)
def test_another_stream_is_refused(
    lake: Lake, stream: str, incarnation: str, token: int | None, why: str
) -> None:
    with pytest.raises(LakeError, match=why):
        Lake.ensure(lake.root, stream, incarnation, token)


def test_folders_that_are_no_lake_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LakeNotFoundError, match="there is no lake in"):
        Lake.open(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LakeError, match="has other files and no lake"):
        Lake.ensure(tmp_path, "S", "i1", None)
    for action in (lambda: Lake.ensure(file, "S", "i1", None), lambda: Lake.open(file)):
        with pytest.raises(LakeError, match="file"):
            action()
    (tmp_path / "lake.json").write_text("{")
    with pytest.raises(LakeError, match=r"lake\.json is damaged"):
        Lake.open(tmp_path)


def test_a_new_lake_does_not_begin_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(LakeError, match="has other files and no lake"):
        Lake.ensure(tmp_path / "new" / ".." / "other", "S", "first", None)
    assert [each.name for each in (tmp_path / "other").iterdir()] == ["file"]
    with pytest.raises(LakeError, match="Not a directory"):
        Lake.check_new(tmp_path / "other" / "file")
    Lake.check_new(tmp_path / "new")
    Lake.check_new(tmp_path / "nowhere")


def test_a_lake_that_has_lost_its_name_is_not_begun_again(lake: Lake) -> None:
    lake.commit(lake.state(), archived(1, 1, 10))
    (lake.root / "lake.json").unlink()
    with pytest.raises(LakeError, match="has other files and no lake"):
        Lake.ensure(lake.root, "OTHER", "i2", None)


def test_a_lake_that_another_job_begins_meanwhile_is_used(lake: Lake) -> None:
    Lake.check_new(lake.root)


def test_a_copy_without_the_folder_of_temporary_files_is_a_lake(lake: Lake) -> None:
    (lake.root / TEMPORARY).rmdir()
    assert lake.leftovers() == []
    after = lake.commit(lake.state(), archived(1, 1, 10))
    assert lake.state() == after


def test_a_lake_that_was_begun_by_a_killed_job_is_made(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "tmp").mkdir()
    assert Lake.ensure(tmp_path, "S", "i1", None).state().number == 0


def test_the_second_of_two_commits_is_refused(lake: Lake) -> None:
    begun = lake.state()
    after = lake.commit(begun, archived(1, 1, 10))
    assert lake.state() == after
    with pytest.raises(LakeConflictError, match="another job has changed the lake"):
        lake.commit(begun, archived(1, 1, 20))
    assert lake.state() == after
    assert not list((lake.root / TEMPORARY).iterdir())


def test_one_of_many_at_once_wins_each_commit(lake: Lake) -> None:
    def run(_: int) -> int:
        won = 0
        while won < 20:
            state = lake.state()
            first = state.archived_through(0) + 1
            try:
                lake.commit(state, archived(state.number + 1, first, first + 9))
            except LakeConflictError:
                continue
            won += 1
        return won

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [20] * 4
    state = lake.state()
    assert state.number == 80
    assert state.archived_through(0) == 800
    assert [each.from_seq for each in state.live_files()] == list(range(1, 801, 10))


def test_checkpoints_replace_what_came_before(lake: Lake) -> None:
    state = lake.state()
    states = [state]
    for number in range(1, 2 * CHECKPOINT_EVERY + 2):
        state = lake.commit(state, archived(number, number, number))
        states.append(state)
        # At each place around a checkpoint.
        if number % CHECKPOINT_EVERY in (0, 1, CHECKPOINT_EVERY - 1):
            assert lake.state() == state
    for number in range(1, 2 * CHECKPOINT_EVERY):
        manifest(lake, number).unlink()
    assert lake.state() == states[-1]
    manifest(lake, 2 * CHECKPOINT_EVERY).unlink()
    with pytest.raises(LakeError, match=r"00000128\.json is missing"):
        lake.state()


def test_a_missing_or_damaged_commit_is_named(lake: Lake) -> None:
    state = lake.state()
    for number in range(1, 4):
        state = lake.commit(state, archived(number, number, number))
    content = manifest(lake, 2).read_bytes()
    manifest(lake, 2).write_bytes(content.replace(b'"messages":1', b'"messages":2'))
    with pytest.raises(LakeError, match=r"00000002\.json is damaged: its content does not match"):
        lake.state()
    manifest(lake, 2).write_bytes(b"")
    with pytest.raises(LakeError, match=r"00000002\.json is damaged"):
        lake.state()
    manifest(lake, 2).unlink()
    with pytest.raises(LakeError, match=r"is damaged: .*00000002\.json is missing"):
        lake.state()
    for file in lake.root.joinpath("manifest").iterdir():
        file.unlink()
    lake.root.joinpath("manifest").rmdir()
    with pytest.raises(LakeError, match="the folder manifest is missing"):
        lake.state()


def test_a_contradiction_is_not_committed(lake: Lake) -> None:
    change = Commit(number=1, job="x", time_us=0, covered=(Range(0, 2, 3),))
    with pytest.raises(LakeError, match="covers sequences"):
        lake.commit(lake.state(), change)
    assert lake.state().number == 0


def test_files_are_compared_with_their_entries(lake: Lake) -> None:
    content = b"parquet"
    file = lake.publish(written(lake, "r1-a", content), FILE, hashlib.sha256(content).hexdigest())
    good = msgspec.structs.replace(
        entry(1, 1, 10), bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    assert good.path == file.path
    path = lake.root / file.path
    assert lake.verify(good) is None
    path.write_bytes(b"parquet2")
    assert lake.verify(good) == f"{file.path} has 8 bytes instead of 7"
    path.write_bytes(b"Parquet")
    assert lake.verify(good) == (f"{file.path} is damaged: its content does not match its checksum")
    path.unlink()
    assert lake.verify(good) == f"{file.path} is missing"
    path.mkdir()
    assert "instead of 7" in str(lake.verify(good))


def test_a_file_is_never_replaced(lake: Lake) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in (b"a", b"b", b"c")]
    found = [
        lake.publish(written(lake, f"r1-{at}", content), FILE, digests[content[0] - ord("a")])
        for at, content in enumerate((b"a", b"a", b"b", b"c", b"b"))
    ]
    assert [each.copy for each in found] == [0, 0, 1, 2, 1]
    assert [(lake.root / each.path).read_bytes() for each in found] == [
        b"a", b"a", b"b", b"c", b"b",
    ]  # fmt: skip


def test_what_killed_jobs_have_left_is_deleted(lake: Lake) -> None:
    kept, garbage = FILE, DataFile(Partition(DAY), "S", 0, 1, 5, 1)
    later = DataFile(Partition(DAY), "S", 0, 11, 20, 2)
    for file in (kept, garbage, later):
        lake.publish(written(lake, "x", file.path.encode()), file, file.path)
        (lake.root / TEMPORARY / "x").unlink()
    written(lake, "r1-old", b"")
    written(lake, "r2-new", b"")
    assert lake.clean() == 0
    lake.commit(lake.state(), archived(1, 1, 10))
    assert (lake.has_commit(1), lake.has_commit(2)) == (True, False)
    assert lake.clean() == 2
    there = {path.relative_to(lake.root).as_posix() for path in lake.root.rglob("*.parquet")}
    assert there == {kept.path, later.path}
    assert [path.name for path in (lake.root / TEMPORARY).iterdir()] == ["r2-new"]


def remove(lake: Lake, file: DataFile, ago_us: int) -> None:
    """Remove a file from the lake with a commit that was made some time ago."""
    state, time_us = lake.state(), time.time_ns() // 1_000 - ago_us
    change = Commit(number=state.number + 1, job="t", time_us=time_us, removed=(file.path,))
    lake.commit(state, change)


def test_removed_files_are_kept_for_readers(lake: Lake) -> None:
    files = [DataFile(Partition(DAY), "S", 0, at, at, at) for at in range(1, 4)]
    for file in files:
        lake.publish(written(lake, "x", file.path.encode()), file, file.path)
        (lake.root / TEMPORARY / "x").unlink()
        lake.commit(lake.state(), archived(file.commit, file.from_seq, file.to_seq))
    remove(lake, files[0], 0)
    remove(lake, files[1], HOUR_US)
    remove(lake, files[2], REMOVED_KEPT_US)
    paths = [lake.root / file.path for file in files]
    assert lake.leftovers() == [paths[2]]
    assert lake.clean() == 1
    assert [each.exists() for each in paths] == [True, True, False]
    assert lake.leftovers(2 * HOUR_US) == []
    assert lake.leftovers(HOUR_US) == [paths[1]]
    assert lake.clean(HOUR_US) == 1
    assert lake.clean(0) == 1
    assert [each.exists() for each in paths] == [False] * 3


def test_checkpoints_remember_removed_files_until_they_are_deleted(lake: Lake) -> None:
    state, remembered = lake.state(), []
    for number in range(1, 4 * CHECKPOINT_EVERY, 2):
        seq = (number + 1) // 2
        file = DataFile(Partition(DAY), "S", 0, seq, seq, number)
        lake.publish(written(lake, "x", file.path.encode()), file, file.path)
        (lake.root / TEMPORARY / "x").unlink()
        lake.commit(state, archived(number, seq, seq))
        remove(lake, file, 0)
        state = lake.state()
        assert file.path in state.removed
        if state.number == 2 * CHECKPOINT_EVERY:
            assert lake.clean(0) == CHECKPOINT_EVERY
        if state.number % CHECKPOINT_EVERY == 0:
            whole = lake.commit_at(state.number).checkpoint
            assert whole is not None
            remembered.append(len(whole.removed))
    per_checkpoint = CHECKPOINT_EVERY // 2
    assert remembered == [at * per_checkpoint for at in (1, 2, 1, 2)]


def test_a_clock_that_is_ahead_makes_no_removed_file_forgotten(lake: Lake) -> None:
    file = DataFile(Partition(DAY), "S", 0, 1, 1, 1)
    lake.publish(written(lake, "x", file.path.encode()), file, file.path)
    lake.commit(lake.state(), archived(1, 1, 1))
    remove(lake, file, 0)
    while (state := lake.state()).number < CHECKPOINT_EVERY:
        ahead_us = time.time_ns() // 1_000 + 2 * REMOVED_KEPT_US
        lake.commit(state, Commit(number=state.number + 1, job="t", time_us=ahead_us))
    assert lake.leftovers(HOUR_US) == []
    # One that was removed by such a machine is deleted when nothing is to be kept.
    later = DataFile(Partition(DAY), "S", 0, 2, 2, CHECKPOINT_EVERY + 1)
    lake.publish(written(lake, "y", later.path.encode()), later, later.path)
    lake.commit(state, archived(later.commit, 2, 2))
    remove(lake, later, -REMOVED_KEPT_US)
    assert lake.leftovers(HOUR_US) == []
    assert len(lake.leftovers(0)) == 2
