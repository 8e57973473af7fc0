"""Damage of every kind is planted, and the audit has to find it and name it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contrail_pipeline.audit.findings import Finding
from contrail_pipeline.audit.lakes import lost_ends, range_of, ranges
from contrail_pipeline.audit.work import (
    FileTask,
    audit_range,
    check_archived,
    check_file,
)
from contrail_spark.lake.manifest import Commit, partition_of
from contrail_spark.lake.store import Lake
from tests.pipeline.audit_rig import Rows, TamperedServer, add_file, make_lake, task
from tests.pipeline.lakes import write
from tests.spark.replay_server import Refuse, row

NODES = ("n1", "n2", "n3")
Tamper = Callable[[Rows], Rows]


@pytest.fixture
def server() -> Iterator[TamperedServer]:
    server = TamperedServer(nodes=NODES)
    yield server
    server.close()


def without(*seqs: int) -> Tamper:
    return lambda rows: [one for one in rows if one["seq"] not in seqs]


def changed(seq: int, **columns: object) -> Tamper:
    return lambda rows: [{**one, **columns} if one["seq"] == seq else one for one in rows]


def doubled(seq: int) -> Tamper:
    return lambda rows: [one for each in rows for one in [each] * (1 + (each["seq"] == seq))]


def told(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.kind, one.source, one.message) for one in findings]


# The stream --------------------------------------------------------------------------------------
def test_a_right_stream_has_no_findings(server: TamperedServer) -> None:
    found = audit_range(task(server, nodes=NODES))
    assert (found.findings, found.error, found.messages) == ([], None, 100)


def test_a_message_that_comes_twice_is_named(server: TamperedServer) -> None:
    server.tamper[""] = doubled(37)
    [finding] = audit_range(task(server)).findings
    assert finding.message == "shard 0 sequence 37 comes twice"


def test_a_batch_that_begins_again_is_named(server: TamperedServer) -> None:
    server.tamper[""] = doubled(40)  # the last one of a batch
    server.batch_rows = 40
    found = audit_range(task(server))
    assert told(found.findings) == [
        ("protocol", "stream", "shard 0: received sequences 40..79 instead of 41..100")
    ]
    assert found.gaps == []


def test_a_missing_message_is_a_gap(server: TamperedServer) -> None:
    server.tamper[""] = without(1, 50, 51, 100)
    found = audit_range(task(server))
    assert found.gaps == [(1, 1), (50, 51), (100, 100)]


def test_what_retention_removes_is_no_finding(server: TamperedServer) -> None:
    asked = task(server)
    server.first_seq = 31
    found = audit_range(asked)
    assert (found.findings, found.error, found.gaps) == ([], None, [(1, 30)])


def test_a_stream_that_is_re_created_ends_the_audit(server: TamperedServer) -> None:
    asked = task(server)
    server.incarnation = "second"
    assert "re-created" in (audit_range(asked).error or "")


# Replicas ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tamper", "kind", "text"),
    [
        (without(7), "replica_missing", "sequence 7 is missing on n2, but not on n1 and n3"),
        (
            without(7, 8, 9),
            "replica_missing",
            "sequences 7..9 are missing on n2, but not on n1 and n3",
        ),
        (
            changed(7, data=b"?"),
            "replica_changed",
            "sequence 7 has another data on n2 than on n1 and n3",
        ),
        (
            changed(8, headers=[], subject="flights.X"),
            "replica_changed",
            "sequence 8 has another subject and headers on n2 than on n1 and n3",
        ),
        (
            changed(9, time=5),
            "replica_changed",
            "sequence 9 has another time on n2 than on n1 and n3",
        ),
    ],
)
def test_a_copy_that_differs_is_named(
    server: TamperedServer, tamper: Tamper, kind: str, text: str
) -> None:
    server.tamper["n2"] = tamper
    found = audit_range(task(server, nodes=NODES))
    assert told(found.findings) == [(kind, "n2", f"shard 0 {text}")]


def test_a_copy_that_has_more_is_named(server: TamperedServer) -> None:
    server.holes = {7}
    server.tamper["n3"] = lambda rows: sorted([*rows, row(0, 7)], key=lambda one: one["seq"])
    [finding] = audit_range(task(server, nodes=NODES)).findings
    assert finding.message == "shard 0 sequence 7 is on n3, but not on n1 and n2"


def test_the_majority_is_right_even_against_the_leader(server: TamperedServer) -> None:
    server.tamper["n1"] = changed(7, data=b"?")
    server.tamper[""] = changed(7, data=b"?")
    found = audit_range(task(server, nodes=NODES))
    assert [one.source for one in found.findings] == ["n1"]


def test_a_copy_that_is_only_behind_is_no_finding(server: TamperedServer) -> None:
    """A node deletes a message later than the others, but before it has applied as much."""
    server.holes = {7}
    server.applied = {"n1": 5, "n2": 4, "n3": 5}
    reads = 0

    def late(rows: Rows) -> Rows:
        nonlocal reads
        reads += 1
        if reads <= 2:  # the first read, and the one that narrows down
            return sorted([*rows, row(0, 7)], key=lambda one: one["seq"])
        return rows

    server.tamper["n2"] = late
    asked: list[int] = []

    def sleep(_: float) -> None:
        asked.append(reads)
        server.applied["n2"] = 5

    from contrail_pipeline.audit.replicas import Copies  # noqa: PLC0415

    one = task(server, nodes=NODES)
    led = audit_range(task(server)).digests
    assert Copies(one.options, one.plan, 0, NODES, sleep).compare(1, 100, led) == []
    assert asked == [2], "it waits between the two comparisons"
    assert reads == 3


def test_a_copy_that_never_catches_up_is_a_finding(
    server: TamperedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_pipeline.audit.replicas.SETTLE_S", 0.0)
    server.applied = {"n1": 5, "n2": 4, "n3": 5}
    server.tamper["n2"] = without(7)
    [finding] = audit_range(task(server, nodes=NODES)).findings
    assert finding.kind == "replica_unreadable"
    assert finding.message.endswith("n2 has not caught up in 0 s")


def test_a_copy_that_cannot_be_read_is_a_finding(server: TamperedServer) -> None:
    def gone(rows: Rows) -> Rows:
        server.faults.append(Refuse(503, "not_ready"))  # n2 is asked next
        server.tamper.pop("n1")
        return rows

    server.tamper["n1"] = gone
    [finding] = audit_range(task(server, nodes=NODES)).findings
    assert (finding.kind, finding.source) == ("replica_unreadable", "n2")
    assert "told not_ready" in finding.message


def test_an_answer_of_another_node_is_refused(server: TamperedServer) -> None:
    found = audit_range(task(server, nodes=("n1", "n9")))
    assert [one.source for one in found.findings] == ["n9"]
    assert found.findings[0].message.endswith("some node answered instead of n9")


# The lake ----------------------------------------------------------------------------------------
def rows_of(server: TamperedServer) -> Rows:
    return server.rows(0, 1, server.rows_per_shard)


def compared(server: TamperedServer, lake: Lake) -> list[tuple[str, str, str]]:
    """The findings of a task that compares all that is archived."""
    state = lake.state()
    archived = range_of(lake, state, 0, server.first_seq, state.archived_through(0))
    return told(audit_range(task(server, archived=archived)).findings)


def files_checked(lake: Lake) -> list[str]:
    found = (check_file(FileTask(lake.root, one)) for one in lake.state().live_files())
    return [one.message for one in found if one is not None]


@pytest.mark.parametrize("none", [None, []])
def test_a_right_lake_has_no_findings(
    server: TamperedServer, tmp_path: Path, none: list[Any] | None
) -> None:
    """Without headers, a message has NULL in a lake, and an empty map in an older one."""
    server.holes = {5, 60}
    rows = [{**each, "headers": each["headers"] or none} for each in rows_of(server)]
    lake = make_lake(tmp_path / "lake", rows, (1, 30), (31, 80))
    assert compared(server, lake) == []
    assert files_checked(lake) == []


def test_messages_deleted_since_are_only_in_the_lake(
    server: TamperedServer, tmp_path: Path
) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 80))
    server.holes = {5, 6, 60}
    assert compared(server, lake) == []
    server.first_seq = 20
    assert compared(server, lake) == []


@pytest.mark.parametrize(
    ("tamper", "kind", "text"),
    [
        (without(7), "lake_missing", "sequence 7 is in the stream, but not in the lake"),
        (without(7, 8), "lake_missing", "sequences 7..8 are in the stream, but not in the lake"),
        (doubled(7), "lake_doubled", "sequence 7 is in the lake more than once"),
        (
            changed(7, data=b"?"),
            "lake_changed",
            "sequence 7 has another data in the lake than in the stream",
        ),
        (
            changed(8, headers=[("Leg", ["9"])], time=9),
            "lake_changed",
            "sequence 8 has another time and headers in the lake than in the stream",
        ),
        (changed(7, shard=1), "lake_changed", "sequence 7 has another shard in the lake"),
    ],
)
def test_a_message_that_is_wrong_in_the_lake_is_named(
    server: TamperedServer, tmp_path: Path, tamper: Tamper, kind: str, text: str
) -> None:
    """The files are as their manifest says, so only the stream shows what is wrong."""
    lake = make_lake(tmp_path / "lake", tamper(rows_of(server)), (1, 30), (31, 80))
    assert compared(server, lake) == [(kind, "lake", f"shard 0 {text}")]


def test_a_file_of_a_message_twice_is_found_without_the_stream(
    server: TamperedServer, tmp_path: Path
) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30))
    again = [row(0, seq) for seq in (30, 31, 40)]
    add_file(lake, again, 31, 40)
    parts = list(ranges(lake, lake.state(), 0, 1, 40))
    assert [(one.from_seq, one.to_seq, len(one.entries)) for one in parts] == [(1, 40, 2)]
    assert told(check_archived(parts[0]).findings) == [
        ("lake_doubled", "lake", "shard 0 sequence 30 is in the lake more than once")
    ]


def damaged_file(lake: Lake) -> Path:
    return lake.root / lake.state().live_files()[0].path


def test_a_flipped_bit_in_a_file_is_found(server: TamperedServer, tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30), (31, 80))
    path = damaged_file(lake)
    content = bytearray(path.read_bytes())
    at = content.index(b"0:17")
    content[at + 3] ^= 1  # 0:16 instead
    path.write_bytes(content)
    [problem] = files_checked(lake)
    assert path.name in problem
    assert problem.endswith("its content does not match its checksum")
    [finding] = compared(server, lake)
    assert finding[2].startswith("shard 0 sequence 17 has another data"), finding


def test_a_missing_file_is_found(server: TamperedServer, tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30), (31, 80))
    path = damaged_file(lake)
    path.unlink()
    [problem] = files_checked(lake)
    assert problem == f"{path.relative_to(lake.root)} is missing"
    [(kind, _, text)] = compared(server, lake)
    assert kind == "lake_file"
    assert path.name in text


def test_files_that_are_replaced_before_they_are_read_are_no_finding(
    server: TamperedServer, tmp_path: Path
) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30), (31, 80))
    state = lake.state()
    archived = range_of(lake, state, 0, 1, 80)
    old = state.live_files()[0]
    number = state.number + 1
    again = write(lake, number, partition_of(old), rows_of(server)[:30])
    change = Commit(number=number, job="t", time_us=0, added=(again,), removed=(old.path,))
    lake.commit(state, change)
    (lake.root / old.path).unlink()
    assert told(audit_range(task(server, archived=archived)).findings) == []
    assert archived.check() == []


def test_a_stream_that_ends_before_its_lake_is_found(
    server: TamperedServer, tmp_path: Path
) -> None:
    state = make_lake(tmp_path / "lake", rows_of(server), (1, 30), (31, 80)).state()
    assert list(lost_ends(state, {0: 80})) == []
    [finding] = lost_ends(state, {0: 50})
    assert (finding.kind, finding.from_seq, finding.to_seq) == ("lost_end", 51, 80)
    assert finding.message.startswith("shard 0 ends with sequence 50, but the lake has it through")


def test_a_file_that_is_cut_off_is_found(server: TamperedServer, tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30))
    path = damaged_file(lake)
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(size - 1)
    assert files_checked(lake) == [
        f"{path.relative_to(lake.root)} has {size - 1:,} bytes instead of {size:,}"
    ]
    assert [one[0] for one in compared(server, lake)] == ["lake_file"]


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (doubled(7), "has 31 messages instead of 30"),
        (lambda rows: list(reversed(rows)), "does not have ascending sequences from 1 to 30"),
        (changed(7, shard=1), "has messages of other shards than 0"),
    ],
)
def test_a_file_that_its_manifest_describes_wrongly_is_found(
    server: TamperedServer, tmp_path: Path, tamper: Tamper, text: str
) -> None:
    lake = make_lake(tmp_path / "lake", [], incarnation="first")
    add_file(lake, tamper(server.rows(0, 1, 30)), 1, 30)
    [problem] = files_checked(lake)
    assert problem.endswith(text)


def test_ranges_of_a_lake_are_cut_by_the_size_of_their_files(
    server: TamperedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_pipeline.audit.lakes.RANGE_BYTES", 1)
    lake = make_lake(tmp_path / "lake", rows_of(server), (1, 30), (31, 80), (81, 100))
    parts = list(ranges(lake, lake.state(), 0, 1, 90))
    assert [(one.from_seq, one.to_seq) for one in parts] == [(1, 30), (31, 80), (81, 90)]
    assert [len(one.entries) for one in parts] == [1, 1, 1]
