"""`contrail pipeline erase` on a real server and a real Spark, also killed and run again."""

import json
from pathlib import Path

import pytest

from contrail_client import Contrail
from contrail_spark.lake.store import Lake
from tests.pipeline.commands import run, running
from tests.pipeline.lakes import made_lake, made_row
from tests.pipeline.tiers import Tiers
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]


def test_a_subject_is_erased_in_stream_and_lake(own_server: ServerProcess, tmp_path: Path) -> None:
    with Contrail(own_server.url) as client:
        tiers = Tiers(own_server, client, tmp_path, shards=1)
        tiers.publish(240)
        lake = tiers.archive()
        tiers.retain(121)
        common = ["erase", str(lake.root), "--subject", "s.1.>", "--server", own_server.url]
        status, error = run(*common)
        assert (status, error["error"]) == (2, "misused")
        status, result = run(*common, "--dry-run", "--stream")
        assert (status, result["messages"]) == (0, 60)
        path = tmp_path / "receipt.json"
        inside = str(lake.root / "receipt.json")
        status, error = run(*common, "--yes", "--receipt", inside)
        assert (status, error["error"]) == (2, "misused")
        status, receipt = run(*common, "--yes", "--stream", "--receipt", str(path))
        assert status == 0, receipt
        assert json.loads(path.read_text()) == receipt
        assert client.get_stream("S").state.messages == 90
        assert sum(each.messages for each in lake.state().live_files()) == 180
    assert receipt["messages"] == 60
    assert receipt["proof"]["found"] == 0
    assert receipt["proof"]["messages"] == 180
    [erasure] = receipt["erasures"]
    assert (erasure["status"], erasure["messages"]) == ("done", 30)
    for each in receipt["deleted"]:
        assert not (lake.root / each["path"]).exists()


def test_a_killed_erasure_is_completed_by_the_next(tmp_path: Path) -> None:
    parts = [
        [made_row(seq, f"s.{seq % 4}") for seq in range(start, start + 500)]
        for start in range(1, 10_000, 500)
    ]
    lake = made_lake(tmp_path / "lake", *parts)
    files = set(lake.state().files)
    log = tmp_path / "job.log"
    arguments = ["erase", str(lake.root), "--subject", "s.3"]
    with running(log, *arguments, "--yes") as process:
        # Killed when the first new file is there.
        while not any("-r21" in path.name for path in lake.root.rglob("*.parquet")):
            assert process.poll() is None, log.read_text()
    assert {path.relative_to(lake.root).as_posix() for path in lake.root.rglob("*.parquet")} > files
    status, receipt = run(*arguments, "--yes")
    assert status == 0, receipt
    left = Lake.open(lake.root).state().live_files()
    assert sum(each.messages for each in left) == 7_500
    assert receipt["proof"]["found"] == 0
    on_disk = {path.relative_to(lake.root).as_posix() for path in lake.root.rglob("*.parquet")}
    assert {each.path for each in left} <= on_disk
    assert not on_disk & files
