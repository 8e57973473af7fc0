"""Real servers for tests: in one process or in several, on free loopback ports."""

import contextlib
import itertools
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import httpx

from tests.support.forked import Forked
from tests.support.ports import HOST, free_port

START_S = 120.0
STOP_S = 120.0
TIMEOUT_S = 90.0
"""More than the minute that a request may ask the server to wait."""
SECRET: Final = "the cluster secret of a test"
PLAIN: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""An empty context for clients, which use plain HTTP. Without it each would spend 30 ms on reading
the certificates of the machine."""


class Process:
    """A server command as a process. Killed and started again, it listens where it did before."""

    program: ClassVar[Sequence[str]] = ()
    """The command line, for a server that is no fork: it needs an interpreter of its own."""
    module: ClassVar[str] = "contrail_serve"
    """What a fork runs."""

    def __init__(self, service: str, log: Path, **settings: Any) -> None:
        self.service = service
        self.log = log
        self.settings = {"host": HOST, "port": free_port(), **settings}
        self.url = ""
        self.process: subprocess.Popen[str] | Forked | None = None

    def start(self) -> Self:
        """Start the process and wait until it serves; raises with its log if it does not."""
        self.spawn()
        return self.wait_until_serving()

    def spawn(self) -> None:
        """Start the process without waiting."""
        arguments = [self.service, *(f"{name}={value}" for name, value in self.settings.items())]
        if not self.program:
            self.process = Forked(arguments, self.log, self.module)
            return
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*self.program, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait_until_serving(self) -> Self:
        """Read the ready line."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(STOP_S)
            raise AssertionError(f"no server (status {status}):\n{self.log.read_text()}")
        self.url = json.loads(line)["url"]
        return self

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        if self.process is not None and self.alive:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_S)
        self._close()

    def stop(self) -> int:
        """End the process cleanly; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process ends by itself; returns its exit status."""
        assert self.process is not None
        status = self.process.wait(STOP_S)
        self._close()
        return status

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    def rss_bytes(self) -> int:
        """Resident memory of the server."""
        fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client for the server."""
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, verify=PLAIN, **options)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class ServerProcess(Process):
    """``contrail serve`` over ``data_dir``."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        log = data_dir.parent / f"{data_dir.name}.log"
        super().__init__("serve", log, data_dir=data_dir, **settings)
        self.data_dir = data_dir


class SplitServers:
    """One or more storage nodes, two apis and two gateways; requests go to the edges in turn."""

    def __init__(self, folder: Path, nodes: int = 1, **settings: Any) -> None:
        common = {"cluster_secret": SECRET, **settings}
        links = [free_port() for _ in range(nodes)]
        ports = {"api": (free_port(), free_port()), "gateway": (free_port(), free_port())}
        edge = {**common, "storage": _joined(links)}
        peers = {"apis": _joined(ports["api"]), "gateways": _joined(ports["gateway"])}
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"n{number}" for number in range(1, nodes + 1)]
        among = {"peers": ",".join(f"{name}={HOST}:{free_port()}" for name in names)}
        self.storages = [
            Process(
                "storage",
                folder / f"{name}.log",
                data_dir=folder / name,
                link_port=link_port,
                node=name,
                **(among if nodes > 1 else {}),
                **common,
            )
            for name, link_port in zip(names, links, strict=True)
        ]
        self.apis = [
            Process("api", folder / f"api{port}.log", port=port, gateways=peers["gateways"], **edge)
            for port in ports["api"]
        ]
        self.gateways = [
            Process("gateway", folder / f"gateway{port}.log", port=port, apis=peers["apis"], **edge)
            for port in ports["gateway"]
        ]
        self._turns = itertools.cycle(range(4))

    @property
    def storage(self) -> Process:
        """The storage node, or the first."""
        return self.storages[0]

    @property
    def edges(self) -> list[Process]:
        """The processes with the public interface: api and gateway alternate."""
        pairs = zip(self.apis, self.gateways, strict=True)
        return [edge for pair in pairs for edge in pair]

    @property
    def processes(self) -> list[Process]:
        return [*self.storages, *self.edges]

    @property
    def url(self) -> str:
        """The address of the next edge; another one each time."""
        return self.edges[next(self._turns)].url

    def start(self) -> Self:
        """Start all processes that do not run, concurrently; wait until the edges reach storage."""
        missing = [process for process in self.processes if not process.alive]
        for process in missing:
            process.spawn()
        for process in missing:
            process.wait_until_serving()
        self.wait_until_ready(self.edges)
        return self

    @staticmethod
    def wait_until_ready(edges: Iterable[Process]) -> None:
        """Wait until each of `edges` reports that it is ready."""
        deadline = time.monotonic() + START_S
        for edge in edges:
            with edge.client() as client:
                while client.get("/readyz").status_code != httpx.codes.OK:
                    assert time.monotonic() < deadline, edge.log.read_text()
                    time.sleep(0.01)

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client that sends each request to the next process."""
        transport = _InTurn([edge.url for edge in self.edges])
        return httpx.Client(
            base_url=self.edges[0].url, timeout=TIMEOUT_S, transport=transport, **options
        )

    def rss_bytes(self) -> int:
        """Resident memory of all processes."""
        return sum(process.rss_bytes() for process in self.processes)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class _InTurn(httpx.BaseTransport):
    """Sends each request to the next of several origins."""

    def __init__(self, urls: list[str]) -> None:
        self._origins = itertools.cycle([httpx.URL(url) for url in urls])
        self._inner = httpx.HTTPTransport(verify=PLAIN)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        origin = next(self._origins)
        if request.headers["host"] == request.url.netloc.decode():
            request.headers["host"] = origin.netloc.decode()
        request.url = request.url.copy_with(host=origin.host, port=origin.port)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def _joined(ports: Iterable[int]) -> str:
    return ",".join(f"{HOST}:{port}" for port in ports)


class WholeServers(SplitServers):
    """Three nodes, each of which serves everything; requests go to them in turn."""

    def __init__(self, folder: Path, nodes: int = 3, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"n{number}" for number in range(1, nodes + 1)]
        peers = ",".join(f"{name}={HOST}:{free_port()}" for name in names)
        common = {"cluster_secret": SECRET, "peers": peers, **settings}
        self.storages = [
            Process("serve", folder / f"{name}.log", data_dir=folder / name, node=name, **common)
            for name in names
        ]
        self._turns = itertools.cycle(range(nodes))

    @property
    def edges(self) -> list[Process]:
        return self.storages

    @property
    def processes(self) -> list[Process]:
        return self.storages
