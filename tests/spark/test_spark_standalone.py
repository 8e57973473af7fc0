"""A standalone cluster of two daemons, started as an image starts them, and a job through it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_spark import session, standalone
from contrail_spark.session import MasterError, cluster_session, find_java
from tests.support.ports import HOST, free_port
from tests.support.servers import STOP_S, ServerProcess
from tests.unit.containers.files import health_command, here

START_S = 180.0
POLL_S = 0.05
TOKEN = "the-token-of-a-test"
LIMIT = 1_000
ENTRYPOINT = here(["/bin/sh", "/opt/contrail/deploy/container/start"])
LISTENING = "0A"
TERMINATED = 128 + signal.SIGTERM


@dataclass
class Daemon:
    """A Spark daemon as a container would run it."""

    process: "subprocess.Popen[bytes]"
    environment: dict[str, str]
    web_port: int
    log: Path

    def listening_ports(self) -> set[int]:
        """The TCP ports on which the process takes connections, as the kernel lists them."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        own = {os.readlink(file) for file in files}
        tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
        rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
        return {
            int(row[1].rpartition(":")[2], 16)
            for row in rows
            if row[3] == LISTENING and f"socket:[{row[9]}]" in own
        }

    def _listens(self) -> bool:
        """Whether a health check is worth a process of its own."""
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.web_port)) == 0

    def _check_health(self) -> int:
        check = subprocess.run(
            health_command(), env=self.environment, capture_output=True, check=False
        )
        return check.returncode

    def await_health(self) -> None:
        """Wait until the image's health check is content."""
        deadline = time.monotonic() + START_S
        while not self._listens() or self._check_health():
            assert time.monotonic() < deadline, self.log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(POLL_S)
                raise AssertionError(f"status {status}:\n{self.log.read_text()}")


def start(service: str, port_variable: str, folder: Path, *arguments: str) -> Daemon:
    """Start one on loopback; ``port_variable`` is where the health check finds its page."""
    web_port = free_port()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "SERVICE": service,
        "SPARK_LOCAL_HOSTNAME": HOST,
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        port_variable: str(web_port),
    }
    log = folder / f"{service}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*ENTRYPOINT, *arguments, "--web-port", str(web_port)],
            env=environment,
            cwd=folder,
            stdout=out,
            stderr=out,
        )
    return Daemon(process, environment, web_port, log)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Daemon, Daemon]]:
    """The master's address, the master and a worker."""
    folder = tmp_path_factory.mktemp("cluster")
    port = free_port()
    master = f"spark://{HOST}:{port}"
    running = [start("spark-master", "SPARK_MASTER_WEBUI_PORT", folder, "--port", str(port))]
    try:
        running[0].await_health()
        running.append(
            start("spark-worker", "SPARK_WORKER_WEBUI_PORT", folder, master, "--cores", "2")
        )
        running[1].await_health()
        yield master, running[0], running[1]
    finally:
        for daemon in running:
            daemon.process.kill()
            daemon.process.wait(STOP_S)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that answers to the token alone."""
    with ServerProcess(tmp_path / "data", token=TOKEN) as server:
        yield server


@pytest.mark.slow
@pytest.mark.spark
def test_flights_of_a_running_server_are_reported_by_executors_of_a_cluster(
    daemons: tuple[str, Daemon, Daemon], guarded: ServerProcess, tmp_path: Path
) -> None:
    master, _, worker = daemons
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    # In a process of its own: this one has a session already, and Spark keeps one a process.
    command = [sys.executable, "-m", "contrail_flights", "--limit", str(LIMIT)]
    command += ["--url", guarded.url, "--token-file", "token", "--spark-master", master]
    job = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3 * START_S
    )
    assert job.returncode == 0, job.stderr + worker.log.read_text()
    agreed = re.findall(r"^ok +(.*): (\S+)", job.stdout, re.MULTILINE)
    assert ("published", f"{LIMIT:,}") in agreed
    assert ("read by Spark", f"{LIMIT:,}") in agreed
    assert {"report.md", "spark.log"} <= {file.name for file in (tmp_path / "reports").iterdir()}
    assert list((worker.log.parent / "spark-work").glob("app-*/0/stderr"))
    assert guarded.alive


@pytest.mark.spark
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel shows no socket table")
def test_a_master_takes_jobs_on_its_own_port_alone(daemons: tuple[str, Daemon, Daemon]) -> None:
    address, master, _ = daemons
    port = int(address.rpartition(":")[2])
    assert master.listening_ports() == {port, master.web_port}


@pytest.mark.spark
def test_daemons_are_their_own_processes_and_end_on_sigterm(
    daemons: tuple[str, Daemon, Daemon],
) -> None:
    _, master, worker = daemons
    for daemon in (worker, master):
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(STOP_S) in (TERMINATED, -signal.SIGTERM)
    assert "RECEIVED SIGNAL TERM" in master.log.read_text()


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
