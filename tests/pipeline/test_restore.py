"""`contrail pipeline restore` on a real server, also killed in the midst and run again."""

from pathlib import Path

import pytest

from contrail_client import Contrail
from contrail_spark.client import ReplayClient
from contrail_spark.lake.manifest import Range
from contrail_spark.lake.store import Lake
from contrail_spark.options import parse_options
from tests.pipeline.commands import run, running
from tests.pipeline.lakes import archive, made_lake, made_row
from tests.spark.stored import message_ids, stored
from tests.support.servers import ServerProcess

MESSAGES = 60_000
KILLS_AT = (0.2, 0.7)
"""Parts of the messages of each shard that are stored when the job is killed."""

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]


def test_killed_restore_loses_and_repeats_nothing(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    lake = Lake.ensure(tmp_path / "lake", "S", "first", None)
    for start in range(1, MESSAGES, MESSAGES // 3):
        last = start + MESSAGES // 3 - 1
        rows = [
            made_row(seq, f"s.{seq % 5}", shard)
            for shard in range(2)
            for seq in range(start, last + 1)
        ]
        archive(lake, rows, [Range(shard, start, last) for shard in range(2)], row_group=5_000)
    with Contrail(own_server.url) as client:
        # No order between the shards of the lake: it is kept within each.
        client.ensure_stream("R", {"subjects": ["s.>"], "duplicate_window": "100ms"})
        arguments = ["restore", str(lake.root), "R", "--server", own_server.url]
        log = tmp_path / "job.log"
        before = 0
        for part in KILLS_AT:
            with running(log, *arguments) as process:
                wanted = int(part * 2 * MESSAGES)
                while not client.read_range("R", from_seq=wanted, limit=1, wait="5s").messages:
                    assert process.poll() is None, log.read_text()
            assert before < client.get_stream("R").state.messages < 2 * MESSAGES
            before = client.get_stream("R").state.messages
        status, result = run(*arguments)
        # The server may have stored one more request of the killed job after the count.
        assert status == 0, result
        assert 0 < result["stored"] <= 2 * MESSAGES - before
        status, result = run(*arguments)
        assert (status, result["stored"]) == (0, 0), result
        found = stored(own_server.url, "R", "headers", "subject", "data")
        for shard in range(2):
            own = [row for row in found if row["data"].startswith(b"%d:" % shard)]
            assert [row["data"] for row in own] == [
                b"%d:%d" % (shard, seq) for seq in range(1, MESSAGES + 1)
            ]
        assert len(set(message_ids(own_server.url, "R"))) == 2 * MESSAGES


def test_a_stream_is_created_and_filled_with_what_was_selected(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    rows = [made_row(seq, f"s.{seq % 3}") for seq in range(1, 101)]
    lake = made_lake(tmp_path / "lake", rows, token=2)
    with Contrail(own_server.url) as client:
        common = ["restore", str(lake.root), "NEW", "--server", own_server.url]
        status, error = run(*common)
        assert (status, error["error"]) == (3, "stream_not_found")
        wrong = (
            (["--from-seq", "9", "--to-seq", "8"], "--from-seq 9 is above --to-seq 8"),
            (["--start-time", "today"], "--start-time: must be milliseconds since 1970, or RFC"),
            (["--subject", "a..b"], "--subject 'a..b': a subject filter must not contain"),
        )
        for given, text in wrong:
            status, error = run(*common, *given)
            assert (status, error["error"]) == (2, "misused")
            assert error["message"].startswith(text)
        selected = ["--subject", "s.1", "--from-seq", "20", "--end-time", "1970-01-01T00:01:00Z"]
        status, result = run(*common, "--create", *selected, "--dry-run")
        assert (status, result["create"], result["messages_max"]) == (0, True, 34)
        status, result = run(*common, "--create", *selected, "--subject-prefix", "x.", "--origin")
        assert (status, result["stored"]) == (0, 13), result
        assert list(client.get_stream("NEW").config["subjects"]) == ["x.>"]
        found = stored(own_server.url, "NEW", "subject", "headers")
    assert {row["subject"] for row in found} == {"x.s.1"}
    seqs = [int(dict(row["headers"])["Nats-Sequence"][0]) for row in found]
    assert seqs == list(range(22, 60, 3))


def test_a_restore_into_the_stream_of_the_lake_is_refused(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    with Contrail(own_server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"]})
        plan = ReplayClient(parse_options({"url": own_server.url, "stream": "S"})).plan()
        lake = Lake.ensure(tmp_path / "lake", "S", plan.incarnation, None)
        archive(lake, [made_row(1)], [Range(0, 1, 1)])
        status, error = run("restore", str(lake.root), "S", "--server", own_server.url)
    assert (status, error["error"]) == (1, "failed")
    assert "is the archive of this stream S" in error["message"]
