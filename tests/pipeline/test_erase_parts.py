"""The parts of an erasure, without a JVM: which files are found, rewritten, deleted and proven."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contrail_client import Contrail, Message
from contrail_client.cli.ending import Failed, Misuse
from contrail_common.subjects import matches
from contrail_pipeline.erase import steps, work
from contrail_pipeline.erase.command import check_receipt, parse_range
from contrail_pipeline.erase.steps import Eraser, Wishes, everything
from contrail_pipeline.erase.work import Doomed, Scan, scan
from contrail_spark.client import ReplayClient
from contrail_spark.lake.layout import TEMPORARY, temporary_name
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.parquet import PartitionedWriter
from contrail_spark.lake.reader import LakeReader
from contrail_spark.lake.selection import Selection
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from tests.pipeline.jobs import LocalJob, run_here
from tests.pipeline.lakes import Row, archive, made_lake, made_row, partition_of_row, write
from tests.support.servers import ServerProcess

SECRET = "s.ann.visit"


class KilledError(BaseException):
    """The end of the process at some step."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "run_tasks", run_here)


def erase(lake: Lake, *subjects: str, **wishes: Any) -> dict[str, Any]:
    job = LocalJob()
    Eraser(job, lake.root, Wishes(subjects, **wishes)).run()  # type: ignore[arg-type]
    [receipt] = job.results
    return receipt


def people(first: int, last: int) -> list[Row]:
    names = ("ann", "bob", "eve")
    return [made_row(seq, f"s.{names[seq % 3]}.visit") for seq in range(first, last + 1)]


def seqs(lake: Lake) -> list[int]:
    state = lake.state()
    reader = LakeReader(lake, Selection())
    split = reader.range(state, 0, (1, state.archived_through(0)))
    return [seq for batch in reader.read(split, ()) for seq in batch["seq"].to_pylist()]


def found_anywhere(lake: Lake, *subjects: str) -> int:
    """Messages of the subjects in any data file, whether it belongs to the lake or not."""
    paths = [
        str(each.relative_to(lake.root))
        for each in lake.root.rglob("*")
        if each.suffix == ".parquet"
    ]
    found = scan(Scan(str(lake.root), tuple(paths), Doomed(subjects), thorough=True))
    assert [each.problem for each in found if each.problem] == []
    return sum(each.doomed for each in found)


@pytest.mark.parametrize("token", [None, 2])
def test_only_files_with_the_subject_are_rewritten(tmp_path: Path, token: int | None) -> None:
    lake = made_lake(
        tmp_path / "lake",
        people(1, 60),
        [made_row(61, "s.bob.visit"), made_row(62, "s.zoe.visit")],
        [made_row(63, SECRET)],
        token=token,
    )
    before = lake.state()
    receipt = erase(lake, SECRET)
    after = lake.state()
    assert seqs(lake) == [*(seq for seq in range(1, 61) if seq % 3), 61, 62]
    assert found_anywhere(lake, SECRET) == 0
    assert receipt["messages"] == 21
    assert {each["path"] for each in receipt["rewritten"]} == set(before.files) - set(after.files)
    assert len(receipt["rewritten"]) == 2
    for each in receipt["rewritten"]:
        assert each["sha256"] == before.files[each["path"]].sha256
        for new in each["new"]:
            assert new["sha256"] == after.files[new["path"]].sha256
    assert receipt["proof"]["found"] == 0
    assert receipt["proof"]["messages"] == 42
    assert [lake.verify(each) for each in after.live_files()] == [None] * len(after.files)
    assert SECRET.encode() not in b"".join(
        each.read_bytes() for each in lake.root.rglob("*") if each.is_file()
    )
    if token is not None:
        assert list(lake.root.rglob("token=ann")) == []


@pytest.mark.parametrize("seed", range(5))
def test_any_filters_and_ranges_are_erased_exactly(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    rows = [
        made_row(seq, f"s.{random_.choice('abcd')}.{random_.choice('xy')}") for seq in range(1, 200)
    ]
    lake = made_lake(tmp_path / "lake", rows[:90], rows[90:120], rows[120:], token=2)
    filters = random_.sample(["s.a.x", "s.b.>", "s.*.y", "s.c.*", "none"], 2)
    low = random_.randrange(1, 180)
    receipt = erase(lake, *filters, ranges=((None, low, low + 20),))
    kept = [
        row["seq"]
        for row in rows
        if not any(matches(each, row["subject"]) for each in filters)
        and not low <= row["seq"] <= low + 20
    ]
    assert seqs(lake) == kept
    assert receipt["messages"] == len(rows) - len(kept)
    assert erase(lake, *filters)["messages"] == 0


@pytest.mark.parametrize("step", range(14))
def test_an_erasure_that_was_killed_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30), people(31, 60), people(61, 90), token=2)
    taken = 0

    def killed_at(act: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*given: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == step + 1:
                raise KilledError
            return act(*given)

        return stepped

    with monkeypatch.context() as patch:
        for module, name in (
            (os, "link"),
            (os, "unlink"),
            (work, "_rewritten"),
            (steps, "delete"),
        ):
            patch.setattr(module, name, killed_at(getattr(module, name)))
        with suppress(KilledError):
            erase(lake, "s.ann.>")
    assert found_anywhere(lake, "s.bob.>") >= 30
    # Somebody else is to be erased first: leftovers of both are found.
    erase(lake, "s.bob.>")
    erase(lake, "s.ann.>")
    assert found_anywhere(lake, "s.ann.>", "s.bob.>") == 0
    assert seqs(lake) == list(range(2, 91, 3))


def test_old_versions_and_orphans_are_erased_too(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    rows = people(1, 9)
    orphan = write(lake, 1, partition_of_row(lake, rows[0]), rows)
    harmless = [made_row(seq, "s.bob.visit") for seq in (1, 2)]
    clean = write(lake, 1, partition_of_row(lake, rows[0]), harmless)
    left = lake.root / TEMPORARY / temporary_name(1, "killed")
    left.write_bytes(b"PAR1 and " + SECRET.encode())
    receipt = erase(lake, SECRET)
    gone = {each["path"]: each["messages"] for each in receipt["deleted"]}
    assert gone[orphan.path] == 3
    assert gone[f"{TEMPORARY}/{left.name}"] == 0
    assert clean.path not in gone
    assert found_anywhere(lake, SECRET) == 0
    assert not left.exists()


def test_what_a_running_job_has_written_can_no_longer_be_added(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    state = lake.state()
    rows = people(31, 60)
    entry = write(lake, state.number + 1, partition_of_row(lake, rows[0]), rows)
    erase(lake, "s.zoe.>", SECRET)
    assert lake.state().number > state.number
    assert not (lake.root / entry.path).exists()
    assert found_anywhere(lake, SECRET) == 0


def test_files_that_another_job_adds_meanwhile_are_rewritten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    before, parts = work._scanned, iter([people(31, 60), people(61, 90)])

    def scanned(*given: Any) -> Any:
        found = before(*given)
        if rows := next(parts, None):
            archive(lake, rows, [Range(0, rows[0]["seq"], rows[-1]["seq"])])
        return found

    monkeypatch.setattr(work, "_scanned", scanned)
    erase(lake, SECRET)
    assert found_anywhere(lake, SECRET) == 0
    assert seqs(lake) == [seq for seq in range(1, 91) if seq % 3]


def test_an_unfinished_file_that_another_job_cleans_up_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    before, parts = PartitionedWriter.finish, iter([people(31, 60)])

    def finish(writer: PartitionedWriter) -> Any:
        writer._flush()
        if rows := next(parts, None):
            archive(lake, rows, [Range(0, 31, 60)])
            lake.clean()
        return before(writer)

    monkeypatch.setattr(PartitionedWriter, "finish", finish)
    erase(lake, SECRET)
    assert found_anywhere(lake, SECRET) == 0
    assert seqs(lake) == [seq for seq in range(1, 61) if seq % 3]


def test_a_file_that_is_added_during_the_proof_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    before, parts = steps.everything, iter([people(31, 60)])

    def then_added(root: Path) -> Any:
        found = before(root)
        if rows := next(parts, None):
            archive(lake, rows, [Range(0, 31, 60)])
        return found

    monkeypatch.setattr(steps, "everything", then_added)
    receipt = erase(lake, SECRET)
    assert receipt["messages"] == 20
    assert receipt["commit"] == lake.state().number
    assert found_anywhere(lake, SECRET) == 0


def test_a_job_that_never_stops_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    before = steps.everything

    def with_another(root: Path) -> Any:
        number = lake.state().number + 1
        (lake.root / TEMPORARY / temporary_name(number, "busy")).write_bytes(b"")
        return before(root)

    monkeypatch.setattr(steps, "everything", with_another)
    with pytest.raises(Failed, match=r"other jobs have changed the lake in .* 10 times"):
        erase(lake, SECRET)


def test_nothing_is_proven_with_a_damaged_or_a_strange_file(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30), [made_row(31, "s.bob.visit")])
    strange = lake.root / "data" / "notes.txt"
    strange.write_text("hello")
    with pytest.raises(Failed, match=r"does not belong there .*: data/notes\.txt; remove it"):
        erase(lake, SECRET)
    strange.unlink()
    path = lake.root / lake.state().live_files()[1].path
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Failed, match=rf"{path.name} cannot be read"):
        erase(lake, SECRET)


def test_a_missing_file_is_no_other_job(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30), people(31, 60))
    path = lake.state().live_files()[1].path
    (lake.root / path).unlink()
    with pytest.raises(Failed, match=f"{path} is missing"):
        erase(lake, SECRET)


def test_nothing_is_proven_behind_a_link_to_a_folder(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    [day] = (lake.root / "data").iterdir()
    day.rename(tmp_path / "elsewhere")
    day.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Failed, match=f"does not belong there .*data/{day.name}"):
        erase(lake, SECRET)


def test_a_link_is_not_deleted_in_place_of_a_file(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30), people(31, 60))
    path = lake.root / lake.state().live_files()[1].path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Failed, match=f"does not belong there .*{path.name}"):
        erase(lake, SECRET)
    assert lake.state().number == 2, "nothing was erased before"


def test_a_dry_run_names_the_damage_that_would_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalJob, "dry_run", True)
    lake = made_lake(tmp_path / "lake", people(1, 30), people(31, 60))
    first, second = (lake.root / each.path for each in lake.state().live_files())
    assert erase(lake, SECRET)["messages"] == 20
    second.write_bytes(second.read_bytes()[:-3])
    with pytest.raises(Failed, match=rf"{second.name} cannot be read"):
        erase(lake, SECRET)
    first.unlink()
    with pytest.raises(Failed, match=rf"{first.name} is missing"):
        erase(lake, "s.nobody")


def test_a_damaged_file_does_not_get_a_new_checksum(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    [entry] = lake.state().live_files()
    path = lake.root / entry.path
    whole = path.read_bytes()
    # In the name of the writer, which nobody reads.
    at = whole.index(b"parquet-cpp-arrow")
    path.write_bytes(whole[:at] + b"P" + whole[at + 1 :])
    with pytest.raises(Failed, match="does not match its checksum"):
        erase(lake, SECRET)
    assert lake.state().live_files() == [entry]


def test_all_files_of_a_lake_have_a_kind(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 3), people(4, 6))
    data, documents, unknown = everything(lake.root)
    assert data == sorted(lake.state().files)
    assert sorted(documents) == [
        "lake.json",
        "manifest/00000001.json",
        "manifest/00000002.json",
    ]
    assert unknown == []


def test_ranges_of_several_shards_need_one(tmp_path: Path) -> None:
    lake = Lake.ensure(tmp_path / "lake", "S", "first", None)
    rows = [made_row(seq, shard=shard) for shard in range(2) for seq in range(1, 11)]
    archive(lake, rows, [Range(shard, 1, 10) for shard in range(2)])
    with pytest.raises(Misuse, match=r"several shards.*--seq SHARD:3-4"):
        erase(lake, ranges=((None, 3, 4),))
    # 9:5 may have been meant as a range.
    with pytest.raises(Misuse, match=r"--seq 9:5: the lake has no messages of shard 9"):
        erase(lake, ranges=((9, 5, 5),))
    assert erase(lake, ranges=((1, 3, 4),))["messages"] == 2
    assert seqs(lake) == list(range(1, 11))
    # The first shard had no messages.
    lake = Lake.ensure(tmp_path / "other", "S", "first", None)
    archive(lake, rows[10:], [Range(1, 1, 10)])
    with pytest.raises(Misuse, match=r"several shards.*--seq SHARD:3\b"):
        erase(lake, ranges=((None, 3, 3),))


def test_sequences_of_each_shard_are_erased_in_the_stream_too(
    running: ServerProcess, tmp_path: Path
) -> None:
    with Contrail(running.url) as client:
        client.create_stream("SH", {"subjects": ["sh.>"], "shards": 2, "shard_by": [2]})
        client.publish_batch("SH", [Message(f"sh.{at % 8}", b"x") for at in range(40)])
        plan = ReplayClient(parse_options({"url": running.url, "stream": "SH"})).plan()
        lake = Lake.ensure(tmp_path / "lake", "SH", plan.incarnation, None)
        rows = [made_row(seq, shard=shard) for shard in range(2) for seq in range(1, 3)]
        archive(lake, rows, [Range(shard, 1, 2) for shard in range(2)])

        def erased(*ranges: tuple[int, int, int]) -> int:
            job = LocalJob(client, running.url)
            Eraser(job, lake.root, Wishes((), ranges, in_stream=True)).run()  # type: ignore[arg-type]
            [receipt] = job.results
            return sum(each.messages for each in receipt["erasures"])

        assert erased((0, 2, 2), (1, 1, 1)) == 2
        assert client.get_stream("SH").state.messages == 38
        with pytest.raises(Misuse, match="stream SH has no shard 9"):
            erased((9, 5, 5))
        with pytest.raises(Misuse, match=r"shard 1 of stream SH ends with sequence \d+, before 99"):
            erased((0, 3, 3), (1, 3, 99))
        assert client.get_stream("SH").state.messages == 38


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", (None, 17, 17)), ("17-20", (None, 17, 20)), ("3:1-2", (3, 1, 2)), ("0:5", (0, 5, 5))],
)
def test_ranges_are_read(text: str, expected: tuple[int | None, int, int]) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", ":1", "0", "5-4", "1:2:3", "1" * 19, "²"])
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(Misuse, match="--seq"):
        parse_range(text)


def test_a_stream_that_was_created_again_is_not_touched(
    running: ServerProcess, tmp_path: Path
) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    with Contrail(running.url) as client:
        client.create_stream("S", {"subjects": ["s.>"]})
        client.publish("s.new", "x")
        eraser = Eraser(
            LocalJob(client, running.url),  # type: ignore[arg-type]
            lake.root,
            Wishes((), ((None, 1, 1),), in_stream=True),
        )
        with pytest.raises(Failed, match=r"created again since the lake .* without --stream"):
            eraser.run()
        assert client.get_stream("S").state.messages == 1
    assert seqs(lake) == list(range(1, 31))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lake/receipt.json", "outside of the lake"),
        ("lake/../linked/receipt.json", "outside of the lake"),
        ("nowhere/receipt.json", "there is no folder .*nowhere"),
        (".", "is a folder"),
    ],
)
def test_a_receipt_that_cannot_be_kept_is_refused_first(
    tmp_path: Path, name: str, why: str
) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    (tmp_path / "linked").symlink_to(lake)
    with pytest.raises(Misuse, match=why):
        check_receipt(tmp_path / name, lake)
    check_receipt(tmp_path / "receipt.json", lake)


def test_a_receipt_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    job = LocalJob()
    wishes = Wishes((SECRET,), receipt=tmp_path)
    with pytest.raises(Failed, match="the messages are erased, but the receipt"):
        Eraser(job, lake.root, wishes).run()  # type: ignore[arg-type]
    assert [each["messages"] for each in job.results] == [10]


def test_a_receipt_is_a_file_of_its_own(tmp_path: Path) -> None:
    lake = made_lake(tmp_path / "lake", people(1, 30))
    path = tmp_path / "receipt.json"
    receipt = erase(lake, SECRET, receipt=path)
    assert f'"subjects":["{SECRET}"]' in path.read_text()
    assert receipt["lake"] == str(lake.root)
