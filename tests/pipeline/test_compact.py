"""`contrail pipeline compact` on a real server and a real Spark."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail
from contrail_spark.lake.manifest import partition_of
from contrail_spark.lake.store import Lake
from tests.pipeline.archives import stream_rows
from tests.pipeline.commands import run
from tests.pipeline.tiers import Tiers
from tests.support.servers import ServerProcess

SHARDS = 2
ARCHIVES = 4

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]


def test_what_many_archives_have_written_is_read_the_same_from_few_files(
    own_server: ServerProcess, spark: SparkSession, tmp_path: Path
) -> None:
    url, root = own_server.url, tmp_path / "lake"
    with Contrail(url) as client:
        tiers = Tiers(own_server, client, tmp_path, SHARDS)
        archive = ["archive", "S", str(root), "--subject-token", "2", "--server", url]
        for _ in range(ARCHIVES):
            tiers.publish(200)
            status, result = run(*archive)
            assert status == 0, result
        lake, expected = Lake.open(root), stream_rows(url)
        before = lake.state()
        assert len(before.files) >= 4 * ARCHIVES
        options = {"url": url, "stream": "S", "lake": str(root)}
        frame = spark.read.format("contrail").options(**options).load()
        tiers.retain(301)

        status, result = run("compact", str(root))
        assert (status, result["commits"]) == (0, 1), result
        after = lake.state()
        # At midnight there are more.
        places = {(each.shard, partition_of(each)) for each in before.live_files()}
        assert len(after.files) == len(places)
        replaced = before.files.keys() - after.files
        assert result["merged"] == len(replaced) >= 3 * ARCHIVES
        # They are there for an hour, and then no longer.
        assert all((root / path).exists() for path in replaced)
        status, result = run("compact", str(root), "--keep", "0")
        assert (status, result["merged"], result["deleted"]) == (0, 0, len(replaced)), result
        assert not any((root / path).exists() for path in replaced)

        assert sorted(
            (row.shard, row.seq, row.time.timestamp(), row.subject, bytes(row.data))
            for row in frame.collect()
        ) == [
            (row["shard"], row["seq"], row["time"].timestamp(), row["subject"], row["data"])
            for row in expected
        ]
        tiers.publish(100)
        status, result = run(*archive)
        assert (status, result["messages"]) == (0, 100), result
        status, result = run("audit", "S", "--lake", str(root), "--server", url)
        assert (status, result["findings"]) == (0, 0), result
