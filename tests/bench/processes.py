"""Child processes that are measured: started on a free port, watched through /proc, ended."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.figures import BenchError, Run
from tests.bench.stages import Costs

HOST: Final = "127.0.0.1"
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """A process of ``tests.bench.profiler``, and the file for its costs."""

    pid: int
    file: Path

    def costs(self) -> Costs:
        """What its functions have cost so far."""
        self.file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        wait_until(self.file.exists, "the answer of a profiler")
        rows = msgspec.json.decode(self.file.read_bytes())
        return {(stage, name): cost for stage, name, cost in rows}


Pids = int | tuple[int, ...] | Profiled
"""One process, or several that are measured as one, or one with a profiler."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far: of a server, of this process, and of the whole machine.

    ``costs`` are those of the functions of a server with a profiler.
    """

    at_s: float
    server_s: float
    client_s: float
    machine_s: float
    costs: Costs | None = None

    @classmethod
    def now(cls, server_pid: Pids | None) -> "Usage":
        """Read the clocks; ``server_pid`` None leaves the server out."""
        server_s = 0.0 if server_pid is None else cpu_s(server_pid)
        costs = server_pid.costs() if isinstance(server_pid, Profiled) else None
        return cls(time.perf_counter(), server_s, time.process_time(), _machine_s(), costs)

    def run(self, later: "Usage", messages: int, value: float | None = None) -> Run:
        """The run from now until ``later``; ``value`` None is that of messages a second."""
        rate = messages / (later.at_s - self.at_s)
        return Run(
            rate if value is None else value,
            server_us=(later.server_s - self.server_s) / messages * 1e6,
            client_us=(later.client_s - self.client_s) / messages * 1e6,
            other_cores=self.other_cores(later),
            costs=self._costs_until(later, messages),
        )

    def other_cores(self, later: "Usage") -> float:
        """Cores that processes other than the server and this one used until ``later``."""
        busy = later.machine_s - self.machine_s
        own = later.server_s - self.server_s + later.client_s - self.client_s
        return max(0.0, busy - own) / (later.at_s - self.at_s)

    def _costs_until(self, later: "Usage", messages: int) -> Costs | None:
        if self.costs is None or later.costs is None:
            return None
        before = self.costs
        return {
            function: (cost - before.get(function, 0.0)) / messages
            for function, cost in later.costs.items()
            if cost > before.get(function, 0.0)
        }


def cpu_s(pid: Pids) -> float:
    """User and system time of a process, all threads; the kernel counts in steps of 10 ms."""
    if isinstance(pid, Profiled):
        return cpu_s(pid.pid)
    if not isinstance(pid, int):
        return sum(map(cpu_s, pid))
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_bytes(pid: Pids) -> int:
    """Resident memory of a process."""
    if isinstance(pid, Profiled):
        return rss_bytes(pid.pid)
    if not isinstance(pid, int):
        return sum(map(rss_bytes, pid))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def folder_bytes(folder: Path) -> int:
    """Return the size on disk of the files below ``folder``, some of which may disappear."""
    blocks = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            blocks += path.stat().st_blocks
    return blocks * 512


def _machine_s() -> float:
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    idle_and_iowait = fields[3] + fields[4]
    return (sum(fields) - idle_and_iowait) / _TICKS_PER_S


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process for as long as the context lasts; its stderr goes to ``log``."""
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
    try:
        yield process
    finally:
        end(process)


def ready_line(process: subprocess.Popen[bytes]) -> bytes:
    """The first line of its output; nothing when it ended or the time is over before."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    return process.stdout.readline() if readable else b""


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop in good order, or by force after a while; a process that has ended is left alone."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, pause_s: float = 0.002) -> None:
    """Look again until ``condition`` holds; BenchError when it takes too long."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} took more than {_START_TIMEOUT_S:.0f} s")
        time.sleep(pause_s)


def listens(port: int) -> bool:
    """Whether something accepts connections on ``port``."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
