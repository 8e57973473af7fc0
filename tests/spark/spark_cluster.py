"""A standalone Spark cluster of daemons, started as an image starts them."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import HOST, free_port
from tests.support.servers import STOP_S
from tests.unit.containers.files import health_command, here

START_S = 180.0
POLL_S = 0.05
ENTRYPOINT = here(["/bin/sh", "/opt/contrail/deploy/container/start"])
LISTENING = "0A"
NAMED_BY = ("--app-id", "--executor-id")
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


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

    def executors(self) -> dict[int, str]:
        """The executors that a worker runs: application and number by process id."""
        found = {}
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, children.read_text().split()):
                # It may end at any moment.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if EXECUTOR in words:
                        named = (words[words.index(name) + 1] for name in NAMED_BY)
                        found[pid] = "/".join(named)
        return found

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


@dataclass
class SparkCluster:
    """A master and its workers, which have one core each."""

    address: str
    master: Daemon
    workers: list[Daemon]

    def newest_executors(self) -> list[int]:
        """The process ids of the executors of the application that came last."""
        found = {pid: name for worker in self.workers for pid, name in worker.executors().items()}
        newest = max((name.partition("/")[0] for name in found.values()), default="")
        return sorted(pid for pid, name in found.items() if name.partition("/")[0] == newest)


@contextlib.contextmanager
def spark_cluster(folder: Path, workers: int = 2) -> Iterator[SparkCluster]:
    """Run a cluster whose logs and files are in ``folder``."""
    port = free_port()
    address = f"spark://{HOST}:{port}"
    with contextlib.ExitStack() as stack:

        def run(service: str, variable: str, name: str, *arguments: str) -> Daemon:
            (folder / name).mkdir()
            daemon = start(service, variable, folder / name, *arguments)
            stack.callback(daemon.process.wait, STOP_S)
            stack.callback(daemon.process.kill)
            return daemon

        master = run("spark-master", "SPARK_MASTER_WEBUI_PORT", "master", "--port", str(port))
        master.await_health()
        started = [
            run("spark-worker", "SPARK_WORKER_WEBUI_PORT", f"worker{at}", address, "--cores", "1")
            for at in range(workers)
        ]
        for worker in started:
            worker.await_health()
        yield SparkCluster(address, master, started)


def container_environment(service: str) -> dict[str, str]:
    """The environment in which ENTRYPOINT becomes ``service``, with this Python first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SERVICE": service}


def start(service: str, port_variable: str, folder: Path, *arguments: str) -> Daemon:
    """Start one on loopback; ``port_variable`` is where the health check finds its page."""
    web_port = free_port()
    environment = {
        **container_environment(service),
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
