"""The command on real servers, with Spark: what it prints, and its exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message
from contrail_pipeline.audit.digest import CHUNK
from contrail_pipeline.audit.repeated import repeated_ids
from contrail_spark.client import ReplayClient
from contrail_spark.options import parse_options
from contrail_spark.session import Profile, find_java
from tests.pipeline.audit_rig import SCHEMA, make_lake
from tests.spark.stored import stored
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess, WholeServers

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]

MESSAGES = 3 * CHUNK + 1_000
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with stream FLIGHTS: ids, headers, two shards, and deleted messages."""
    with ServerProcess(tmp_path_factory.mktemp("server") / "data") as server:
        with Contrail(server.url) as client:
            fill(client, {"subjects": ["flights.>"], "shards": 2, "shard_by": [2]}, MESSAGES)
            for seq in (5, 6, 900):
                client.delete_message("FLIGHTS", seq, shard=1)
        yield server


def fill(client: Contrail, config: Any, count: int) -> None:
    client.create_stream("FLIGHTS", config)
    for first in range(0, count, 5_000):
        client.publish_batch("FLIGHTS", [one(at) for at in range(first, min(first + 5_000, count))])


def one(at: int) -> Message:
    headers = {"Leg": ["a", "bc"]} if at % 5 == 0 else None
    return Message(f"flights.{at % 10}", f"payload {at}", headers=headers, msg_id=f"id-{at}")


def audit(url: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the lines of JSON."""
    done = run_contrail(
        "pipeline", "audit", "FLIGHTS", "--server", url, "--json", *arguments, env={}
    )
    return done.exit_code, [json.loads(line) for line in done.output.splitlines()]


def test_a_right_stream_ends_with_status_0_and_the_same_checksums_again(
    server: ServerProcess,
) -> None:
    status, lines = audit(server.url)
    assert status == 0, lines
    *_, summary = lines
    assert (summary["ok"], summary["messages"], summary["findings"]) == (True, MESSAGES - 3, 0)
    shards = [line for line in lines if "shard" in line]
    assert [(one["shard"], one["deleted"], one["counts_compared"]) for one in shards] == [
        (0, 0, True), (1, 3, True)
    ]  # fmt: skip
    assert sum(one["message_ids"] for one in shards) == MESSAGES - 3
    ranges = [line for line in lines if "range" in line]
    assert len(ranges) >= MESSAGES // CHUNK
    assert audit(server.url) == (0, lines)


def test_dry_run_starts_no_spark(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    status, [line] = audit(server.url, "--dry-run")
    assert (status, line["dry_run"], line["sequences"]) == (0, True, MESSAGES)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--replicas",), 2, "has one copy"),
        (("--lake", "nothing"), 1, "there is no lake in"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    server: ServerProcess, arguments: tuple[str, ...], status: int, text: str
) -> None:
    found, [line] = audit(server.url, *arguments)
    assert found == status
    assert text in line["message"]


def test_a_lake_is_compared_and_its_damage_is_named(server: ServerProcess, tmp_path: Path) -> None:
    rows = [row for row in stored(server.url, "FLIGHTS", *SCHEMA.names) if row["shard"] == 0]
    for row in rows:
        row["time"] = int(row["time"].timestamp() * 1_000_000 + 0.5)
    plan = ReplayClient(parse_options({"url": server.url, "stream": "FLIGHTS"})).plan()
    whole = (1, 40_000), (40_001, rows[-1]["seq"] - 10)
    lake = make_lake(tmp_path / "lake", rows, *whole, incarnation=plan.incarnation)
    status, lines = audit(server.url, "--lake", str(lake.root))
    assert (status, lines[-1]["lake_files"]) == (0, 2), lines[-3:]

    first, second = lake.state().live_files()
    (lake.root / first.path).unlink()
    content = bytearray((lake.root / second.path).read_bytes())
    content[len(content) // 2] ^= 4
    (lake.root / second.path).write_bytes(content)
    status, lines = audit(server.url, "--lake", str(lake.root))
    assert status == 1
    messages = [line["message"] for line in lines if line.get("finding") == "lake_file"]
    assert [message for message in messages if message.startswith(first.path)] == [
        f"{first.path} is missing"
    ]
    assert f"{second.path} is damaged: its content does not match its checksum" in messages
    done = run_contrail(
        "pipeline", "audit", "FLIGHTS", "--server", server.url, "--lake", str(lake.root), env={}
    )
    assert done.exit_code == 1
    assert f"{first.path} is missing" in done.output


def test_ids_that_are_repeated_within_the_window_are_named(
    server: ServerProcess, spark: SparkSession
) -> None:
    with Contrail(server.url) as client:
        client.create_stream("IDS", {"subjects": ["ids"], "duplicate_window": "100ms"})
        seqs = [client.publish("ids", b"", msg_id="twice").seq]
        while len(seqs) < 3:  # until the window has passed
            ack = client.publish("ids", b"", msg_id="twice")
            seqs += [] if ack.duplicate else [ack.seq]
    options = {"url": server.url, "stream": "IDS"}
    assert repeated_ids(spark, options, 100_000_000) == []
    found = repeated_ids(spark, options, 3_600 * 10**9)
    assert [(one.from_seq, one.message.split(",")[0]) for one in found] == [
        (2, "shard 0 sequence 2 has the id 'twice' of sequence 1"),
        (3, "shard 0 sequence 3 has the id 'twice' of sequence 2"),
    ]


@pytest.mark.cluster
def test_copies_of_a_cluster_are_compared_and_a_lost_node_is_named(tmp_path: Path) -> None:
    with WholeServers(tmp_path) as servers:
        with Contrail(servers.url) as client:
            config = {"subjects": ["flights.>"], "num_replicas": 3, "shards": 2}
            fill(client, config, 10_000)
        first = servers.edges[0].url
        status, lines = audit(first, "--replicas")
        assert status == 0, lines
        assert sorted(lines[-1]["replicas"]) == ["n1", "n2", "n3"]
        servers.processes[2].kill()
        status, lines = audit(first, "--replicas")
        assert status == 1
        found = [line for line in lines if "finding" in line]
        assert {(one["finding"], one["source"]) for one in found} == {("replica_unreadable", "n3")}


def test_the_module_runs_under_spark_submit(server: ServerProcess) -> None:
    main = subprocess.check_output(
        [sys.executable, "-c", "import contrail_pipeline.__main__ as m; print(m.__file__)"],
        text=True,
    ).strip()
    _, flags = Profile.QUICK.value
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]"]
    submit += ["--driver-java-options", flags, main]
    java = str(find_java().home)
    done = subprocess.run(
        [*submit, "audit", "FLIGHTS", "--server", server.url, "--json"],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": java},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["messages"] == MESSAGES - 3
