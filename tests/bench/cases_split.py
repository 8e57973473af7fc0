"""The split form: cases of one process, run with storage, an api and a gateway as processes."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

from tests.bench.figures import Bench, Measured
from tests.bench.processes import HOST, Pids
from tests.bench.server import Server, process_of
from tests.support.ports import free_port

Edge = Literal["api", "gateway"]


@dataclass(frozen=True, slots=True)
class SplitServer(Server):
    """Three processes. Clients use one of them; the CPU and memory of all are counted."""

    pids: tuple[int, ...] = ()

    @property
    def pid(self) -> Pids:
        """The process ids."""
        return self.pids


@contextlib.contextmanager
def split(asked: Edge, data_dir: Path) -> Iterator[Server]:
    """Storage, an api and a gateway on ``data_dir``; clients use the one in ``asked``."""
    link_port = free_port()
    ports: dict[Edge, int] = {"api": free_port(), "gateway": free_port()}
    peers = {"api": {"gateways": ports["gateway"]}, "gateway": {"apis": ports["api"]}}
    shared = {"cluster_secret": secrets.token_hex(16)}
    storage = {"data_dir": data_dir, "link_port": link_port, **shared}
    begun = perf_counter()
    with contextlib.ExitStack() as stack:

        def start(service: str, **settings: object) -> int:
            log = data_dir.with_suffix(f".{service}.log")
            process, _ = stack.enter_context(process_of(service, log, **settings))
            processes[service] = process
            return process.pid

        processes = {}
        pids = [start("storage", **storage)]
        for edge, port in ports.items():
            others = {name: f"{HOST}:{other}" for name, other in peers[edge].items()}
            link = f"{HOST}:{link_port}"
            pids.append(start(edge, port=port, storage=link, **others, **shared))
        took_s = perf_counter() - begun
        yield SplitServer(processes[asked], ports[asked], took_s, tuple(pids))


@dataclass(frozen=True, slots=True)
class Split:
    """A case of one process, with clients that use an ``edge`` of the split form."""

    measure: Callable[[Bench], Measured | None]
    edge: Edge = "api"

    def __call__(self, bench: Bench) -> Measured | None:
        """The measurement of the case."""
        return self.measure(replace(bench, started=partial(split, self.edge)))
