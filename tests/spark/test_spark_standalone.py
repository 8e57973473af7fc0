"""A standalone cluster of two daemons, started as an image starts them, and a job through it."""

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail
from contrail_spark import session, standalone
from contrail_spark.session import MasterError, cluster_session, find_java
from tests.spark.kills import COLUMNS, Kill, Nodes, differences, fill, survive
from tests.spark.spark_cluster import START_S, SparkCluster, spark_cluster
from tests.spark.stored import stored
from tests.support.ports import HOST, free_port
from tests.support.servers import STOP_S, ServerProcess

TOKEN = "the-token-of-a-test"
LIMIT = 1_000
MESSAGES = 16_000
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and two workers. Like containers, they are their own processes, and end on SIGTERM.

    This is checked here, because no other test can use them afterwards.
    """
    with spark_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
        for daemon in (*cluster.workers, cluster.master):
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(STOP_S) in (TERMINATED, -signal.SIGTERM)
        assert "RECEIVED SIGNAL TERM" in cluster.master.log.read_text()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that answers to the token alone."""
    with ServerProcess(tmp_path / "data", token=TOKEN) as server:
        yield server


@pytest.mark.slow
@pytest.mark.spark
def test_flights_of_a_running_server_are_reported_by_executors_of_a_cluster(
    cluster: SparkCluster, guarded: ServerProcess, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    # In a process of its own: this one has a session already, and Spark keeps one a process.
    command = [sys.executable, "-m", "contrail_flights", "--limit", str(LIMIT)]
    command += ["--url", guarded.url, "--token-file", "token", "--spark-master", cluster.address]
    job = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3 * START_S
    )
    assert job.returncode == 0, job.stderr + cluster.master.log.read_text()
    agreed = re.findall(r"^ok +(.*): (\S+)", job.stdout, re.MULTILINE)
    assert ("published", f"{LIMIT:,}") in agreed
    assert ("read by Spark", f"{LIMIT:,}") in agreed
    assert {"report.md", "spark.log"} <= {file.name for file in (tmp_path / "reports").iterdir()}
    for worker in cluster.workers:
        assert list((worker.log.parent / "spark-work").glob("app-*/*/stderr"))
    assert guarded.alive


def test_rows_that_are_lost_doubled_or_changed_are_found(tmp_path: Path) -> None:
    def copy(row: dict[str, Any], data: bytes | None = None) -> bool:
        """Publish a row of SOURCE to OUT as a job does; whether it was there."""
        subject = row["subject"].replace("in.", "out.")
        place = f"SOURCE:{row['shard']}:{row['seq']}"
        headers = dict(row["headers"] or ())
        data = row["data"] if data is None else data
        return client.publish(subject, data, headers=headers, msg_id=place).duplicate

    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        fill(Nodes(server), [b"%d" % at for at in range(12)], window="100ms")
        _lost, doubled, changed, *others = stored(server.url, "SOURCE", *COLUMNS)
        for row in (doubled, *others):
            copy(row)
        assert len(differences("copy", server.url, tmp_path)) == 2
        while copy(doubled):
            pass  # until the duplicate window has passed
        copy(changed, b"another")
        found = differences("copy", server.url, tmp_path)
    counts = Counter(text.rpartition(": ")[2] for text in found)
    assert counts == {"0 instead of 1": 2, "1 instead of 0": 1, "2 instead of 1": 1}


@pytest.mark.spark
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel shows no socket table")
def test_a_master_takes_jobs_on_its_own_port_alone(cluster: SparkCluster) -> None:
    port = int(cluster.address.rpartition(":")[2])
    assert cluster.master.listening_ports() == {port, cluster.master.web_port}


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("write", [Kill("executor", 0.2)]),
        ("copy", [Kill("executor", 0.1), Kill("driver", 0.5)]),
        pytest.param("files", [Kill("driver", 0.3)], marks=pytest.mark.slow),
    ],
)
def test_job_whose_processes_are_killed_loses_and_doubles_nothing(
    kind: str, kills: list[Kill], cluster: SparkCluster, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        chance = random.Random(kind)
        folder = tmp_path / "job"
        survive(kind, kills, Nodes(server), cluster, folder, messages=MESSAGES, chance=chance)
    if kills[0].victim == "executor":
        assert "Lost executor" in (folder / "driver.log").read_text()


def test_a_master_that_does_not_answer_is_named() -> None:
    master = f"spark://{HOST}:{free_port()}"
    with pytest.raises(MasterError, match=f"no Spark master answers at {master}"):
        cluster_session("test", master)


@pytest.mark.spark
def test_a_job_that_no_worker_takes_ends_with_a_message(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "EXECUTOR_TIMEOUT_S", 0.0)
    with pytest.raises(MasterError, match="no worker of spark://a:1 accepted the job within 0 s"):
        session._await_executor(spark, "spark://a:1")


def test_a_worker_of_no_master_is_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert standalone.main(["worker", "http://127.0.0.1:7077"]) == 1
    assert "is not a master URL such as spark://" in capsys.readouterr().err


def test_java_of_the_daemons_is_the_one_of_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(standalone.os, "execv", lambda _, command: executed.append(command))
    for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_IP", "SPARK_WORKER_OPTS", "PYTHONPATH"):
        # Set and unset, so that the test leaves nothing behind.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    expected = find_java()
    standalone.main(["worker", "spark://a:1", "--cores", "2", "--work-dir", "w"])
    [[program, *arguments]] = executed
    assert program == f"{os.environ['SPARK_HOME']}/bin/spark-class"
    assert os.environ["JAVA_HOME"] == str(expected.home)
    assert arguments == [
        "org.apache.spark.deploy.worker.Worker",
        *("--host", HOST, "--port", "0", "--webui-port", "8081"),
        *("--memory", "1g", "--work-dir", "w", "--cores", "2", "spark://a:1"),
    ]
