"""The service as a child process on data of its own, and the calls that prepare a measurement."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

from tests.bench import load as load_generator
from tests.bench.figures import Bench, BenchError
from tests.bench.http_scripts import PAYLOAD_BYTES, Batches
from tests.bench.load import Driven, Load, Script
from tests.bench.processes import HOST, Pids, Profiled, ready_line, running

_CALL_TIMEOUT_S: Final = 60.0
FILL_CONNECTIONS: Final = 4
FILL_BATCH: Final = 1_000


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up; ``start_s`` is the time from its start to its ready line."""

    process: subprocess.Popen[bytes]
    port: int
    start_s: float

    @property
    def pid(self) -> Pids:
        """Its process id."""
        return self.process.pid

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON answer of a call; BenchError unless its status is in the 200s."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_CALL_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", "Accept": "application/json"},
            )
            response = connection.getresponse()
            answer = response.read()
        if response.status // 100 != 2:
            raise BenchError(f"{method} {path}: {response.status} {answer[:400]!r}")
        return json.loads(answer) if answer else None

    def create_stream(self, stream: str, prefix: str, **settings: Any) -> None:
        """A stream on ``prefix.>``, with default settings where ``settings`` has no others."""
        self.call("PUT", f"/v1/streams/{stream}", {"subjects": [f"{prefix}.>"], **settings})

    def check_stored(self, stream: str, messages: int) -> None:
        """BenchError unless the stream holds exactly the messages that were acknowledged."""
        stored = self.call("GET", f"/v1/streams/{stream}")["state"]["messages"]
        if stored != messages:
            raise BenchError(f"{messages} messages were acknowledged, {stored} are stored")

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(data_dir: Path) -> Iterator[Server]:
    """A server on ``data_dir`` while the context lasts; BenchError if it does not start."""
    begun = perf_counter()
    with process_of("serve", data_dir.with_suffix(".log"), data_dir=data_dir) as (process, port):
        yield Server(process, port, perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class ProfiledServer(Server):
    """A server with a profiler, which writes the costs of its functions into ``costs``."""

    costs: Path = Path()

    @property
    def pid(self) -> Pids:
        """Its process, which can be asked for its costs."""
        return Profiled(self.process.pid, self.costs)


@contextlib.contextmanager
def profiled(kind: str, data_dir: Path) -> Iterator[Server]:
    """A server on ``data_dir`` that counts its ``calls``, or its ``cpu``, by function."""
    begun, log, costs = perf_counter(), data_dir.with_suffix(".log"), data_dir.with_suffix(".costs")
    module = ("tests.bench.profiler", kind, str(costs))
    with process_of("serve", log, module, data_dir=data_dir) as (process, port):
        yield ProfiledServer(process, port, perf_counter() - begun, costs)


@contextlib.contextmanager
def process_of(
    service: str, log: Path, module: Sequence[str] = ("contrail_serve",), **settings: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process, and the port on which it answers HTTP; BenchError if it does not start.

    ``module`` runs the service: its name, and arguments before those of the service.
    """
    settings = {"host": HOST, "port": 0, "log_level": "warning", **settings}
    command = [sys.executable, "-m", *module, service]
    command += [f"{name}={value}" for name, value in settings.items()]
    with running(command, log, service_environment()) as process:
        line = ready_line(process)
        if not line:
            raise BenchError(f"the {service} process did not start:\n{log.read_text()[-2_000:]}")
        port = urlsplit(json.loads(line)["url"]).port
        assert port is not None
        yield process, port


def service_environment() -> dict[str, str]:
    """The environment of a server: as an installed one has it, without settings."""
    environment = {
        # The arguments decide: settings of another server must not.
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CONTRAIL_")
    }
    # What is installed is compiled; a server that compiles its modules again starts in twice the
    # time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


@contextlib.contextmanager
def data_folder(bench: Bench) -> Iterator[Path]:
    """An empty folder on the measured disk, removed afterwards."""
    parent = Path(tempfile.mkdtemp(dir=bench.folder))
    try:
        yield parent / "data"
    finally:
        shutil.rmtree(parent)


@contextlib.contextmanager
def fresh_server(bench: Bench) -> Iterator[Server]:
    """A server without data."""
    start = bench.started or started
    with data_folder(bench) as folder, start(folder) as server:
        yield server


def drive(bench: Bench, load: Load) -> Driven:
    """Carry ``load`` out in the process of the load generator."""
    return bench.worker.submit(load_generator.drive, load).result()


def fill(bench: Bench, server: Server, stream: str, prefix: str) -> Driven:
    """Make a stream and publish as many messages as the scale says, in batches of 1,000."""
    server.create_stream(stream, prefix)
    driven = publish_batches(bench, server, stream, prefix, bench.scale.messages)
    server.check_stored(stream, driven.messages)
    return driven


def publish_batches(
    bench: Bench,
    server: Server,
    stream: str,
    prefix: str,
    messages: int,
    payload_bytes: int = PAYLOAD_BYTES,
) -> Driven:
    """Publish ``messages`` messages in batches of 1,000; all of them must be acknowledged."""
    batches = Batches(
        stream,
        prefix,
        FILL_BATCH,
        FILL_CONNECTIONS,
        count=messages // FILL_BATCH,
        payload_bytes=payload_bytes,
    )
    return publish_all(bench, server, batches, messages)


def publish_all(
    bench: Bench, server: Server, scripts: Callable[[], Sequence[Script]], messages: int
) -> Driven:
    """Publish what the scripts say; BenchError unless that makes ``messages``."""
    driven = drive(bench, Load(server.port, server.pid, scripts))
    if driven.messages != messages:
        raise BenchError(f"{driven.messages} of {messages} were published")
    return driven
