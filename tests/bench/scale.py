"""One node with much of everything: made, used, restarted and deleted.

Each step has its time, the CPU that the server used, the memory that it kept, and the longest stall
of its event loop. Stalls are read from the server's log, which has those of more than 20 ms.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench import load as load_generator
from tests.bench.figures import BenchError
from tests.bench.http_scripts import DistinctSubjects
from tests.bench.load import Load
from tests.bench.processes import Usage, rss_bytes
from tests.bench.report import number
from tests.bench.scale_scripts import (
    Held,
    Many,
    PullEach,
    delete_consumer,
    delete_stream,
    hold_sockets,
    publish_to,
    put_consumer,
    put_stream,
)
from tests.bench.server import FILL_BATCH, FILL_CONNECTIONS, Server, process_of

MIB: Final = 1 << 20
_BIG: Final = "BIG"
_PREFIX: Final = "big"
_PART: Final = 500_000
"""Subjects that are filled in one go: fewer than the patience with a load suffices for."""

_IDLE_S: Final = 10.0
_SOCKETS_S: Final = 30.0
"""Two rounds of pings."""
_WATCHED_S: Final = 0.2
_PAGES: Final = 10
_LEAST: Final = 100
_LEAST_SUBJECTS: Final = 20 * FILL_BATCH
"""With less, a load would end before it is measured."""

Scripts = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many there are; the large stream is one of ``streams``."""

    streams: int = 10_000
    consumers: int = 20_000
    subjects: int = 10_000_000
    sockets: int = 5_000

    def __post_init__(self) -> None:
        if self.subjects < _LEAST_SUBJECTS or self.subjects % (self.parts * FILL_BATCH):
            raise BenchError(f"the subjects are no parts of {FILL_BATCH:,} each")
        if min(self.streams, self.consumers, self.sockets) < _LEAST:
            raise BenchError(f"at least {_LEAST} streams, consumers and sockets are needed")

    @property
    def parts(self) -> int:
        """In how many goes the large stream is filled."""
        return max(1, self.subjects // _PART)

    @property
    def small_streams(self) -> int:
        """The streams beside the large one."""
        return self.streams - 1


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds of CPU that one step held the event loop, and the innermost known call."""

    seconds: float
    doing: str


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took; ``grown_bytes`` None where memory says nothing."""

    title: str
    count: int
    seconds: float
    server_s: float
    grown_bytes: int | None
    stall: Stall | None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The step as a row of the table."""
        rate = f", {number(self.count / self.seconds)}/s" if self.count > 1 else ""
        each = self.server_s / self.count
        cpu = f"{number(each * 1e6)} µs each" if self.count > 1 else f"{number(each)} s"
        memory = "" if self.grown_bytes is None else f"{self.grown_bytes / self.count:,.0f} B each"
        stall = "under 20 ms"
        if self.stall is not None:
            doing = f", `{self.stall.doing}`" if self.stall.doing else ""
            stall = f"{self.stall.seconds * 1e3:,.0f} ms{doing}"
        spent = f"{number(self.seconds)} s{rate}"
        return self.title, f"{self.count:,}", spent, cpu, memory, stall, self.note


HEADINGS: Final = ("Step", "Number", "Time", "CPU", "Memory", "Longest stall", "Note")


@dataclass(slots=True)
class ScaleRun:
    """One run: the server of the moment, and the steps so far."""

    folder: Path
    worker: ProcessPoolExecutor
    sizes: Sizes
    steps: list[Step] = field(default_factory=list)

    def run(self) -> None:
        """Carry out all steps."""
        with self._started("start without data") as server:
            self._make(server)
            self._use(server, 1)
            self._sockets(server)
            server.kill()
        with self._started("restart after kill -9") as server:
            self._idle(server, "idle after the restart")
            self._use(server, 2)
            self._delete(server)

    @contextlib.contextmanager
    def _started(self, title: str) -> Iterator[Server]:
        begun = time.perf_counter()
        settings = {"data_dir": self.folder / "data", "log_level": "debug"}
        with process_of("serve", self._log, **settings) as (process, port):
            server = Server(process, port, time.perf_counter() - begun)
            # The loop is watched from the ready line on.
            cpu = Usage.now(server.pid).server_s
            rss = f"RSS {rss_bytes(server.pid) / MIB:,.0f} MiB"
            self._done(Step(title, 1, server.start_s, cpu, None, None, rss))
            # The server imports the routes of management after the ready line.
            server.call("GET", "/v1/streams?limit=1")
            wait_for(_WATCHED_S)
            yield server

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    # The steps -----------------------------------------------------------------------------------

    def _make(self, server: Server) -> None:
        sizes, streams = self.sizes, self.sizes.small_streams
        self._many(server, "create streams", put_stream, streams)
        self._many(server, "create consumers", partial(put_consumer, streams), sizes.consumers)
        self._idle(server, "idle, with streams and consumers")

        def fill() -> None:
            server.create_stream(_BIG, _PREFIX)
            batches = sizes.subjects // FILL_BATCH // sizes.parts
            for part in range(sizes.parts):
                prefix = f"{_PREFIX}.{part}"
                self._drive(server, DistinctSubjects(_BIG, prefix, batches, FILL_CONNECTIONS))
            server.check_stored(_BIG, sizes.subjects)

        self._step(server, "publish a message to each of many subjects", sizes.subjects, fill)
        self._idle(server, "idle, with everything")

    def _use(self, server: Server, purged: int) -> None:
        """Use everything once; ``purged`` chooses the subjects that are purged."""
        streams, consumers = self.sizes.small_streams, self.sizes.consumers
        self._many(server, "publish one message to each stream", publish_to, streams)
        self._each_part(
            server,
            "pull and acknowledge one message of each consumer",
            consumers,
            lambda numbers: PullEach(streams, numbers),
        )
        path = f"/v1/streams/{_BIG}"
        pattern = f"{_PREFIX}.*.*.7"  # one in a thousand
        asked = {
            "pages of the subjects of a wildcard": f"{path}/subjects?filter={pattern}&limit=100",
            "pages of the last messages of a wildcard": f"{path}/last?subject={pattern}&limit=100",
        }
        for title, url in asked.items():
            self._step(server, title, _PAGES, partial(self._pages, server, url))
        self._step(
            server,
            "create a consumer with a wildcard, pull once, and delete it",
            1,
            partial(self._filtered, server, path, pattern),
        )
        purge = partial(
            server.call, "POST", f"{path}/purge", {"subject": f"{_PREFIX}.*.*.{purged}"}
        )
        self._step(server, "purge a wildcard", 1, purge)

    def _sockets(self, server: Server) -> None:
        held: list[Held] = []
        count = self.sizes.sockets

        def hold() -> None:
            asked = server.port, server.pid, count, _SOCKETS_S
            held.append(self.worker.submit(hold_sockets, *asked).result())

        step = self._measured(server, "open and hold idle WebSockets", count, hold)
        [cost] = held
        self._done(
            Step(
                step.title,
                count,
                cost.opened_s,
                cost.opened_cpu_s,
                cost.bytes_all if cost.bytes_all > 0 else None,
                step.stall,
                f"idle: {cost.idle_cores:.3f} cores",
            )
        )

    def _delete(self, server: Server) -> None:
        streams = self.sizes.small_streams
        delete = partial(server.call, "DELETE", f"/v1/streams/{_BIG}")
        self._step(server, "delete the stream of many subjects", 1, delete)
        consumers = partial(delete_consumer, streams)
        self._many(server, "delete consumers", consumers, self.sizes.consumers)
        self._many(server, "delete streams", delete_stream, streams)
        self._idle(server, "idle, with nothing left")

    # Carrying them out ---------------------------------------------------------------------------

    def _many(self, server: Server, title: str, call: Callable[[int], bytes], count: int) -> None:
        self._each_part(server, title, count, partial(Many, call))

    def _each_part(
        self, server: Server, title: str, count: int, scripts: Callable[[range], Scripts]
    ) -> None:
        """Drive a script for all numbers, in parts that take less than the patience with a load."""

        def drive() -> None:
            for first in range(0, count, FILL_BATCH):
                numbers = range(first, min(count, first + FILL_BATCH))
                driven = self._drive(server, scripts(numbers))
                if driven != len(numbers):
                    raise BenchError(f"{title}: {driven} of {len(numbers)} were answered")

        self._step(server, title, count, drive)

    def _drive(self, server: Server, scripts: Scripts) -> int:
        load = Load(server.port, server.pid, scripts)
        return self.worker.submit(load_generator.drive, load).result().messages

    def _pages(self, server: Server, url: str) -> None:
        token = ""
        for _ in range(_PAGES):
            page = server.call("GET", url + (f"&page_token={token}" if token else ""))
            token = page.get("next_page_token") or ""

    def _filtered(self, server: Server, path: str, pattern: str) -> None:
        consumer = f"{path}/consumers/filtered"
        server.call("PUT", consumer, {"filter_subjects": [pattern]})
        pulled = server.call("POST", f"{consumer}/next", {"batch": 10, "no_wait": True})
        if not pulled or not pulled["messages"]:
            raise BenchError(f"a consumer of {pattern} got nothing")
        server.call("DELETE", consumer)

    def _idle(self, server: Server, title: str) -> None:
        step = self._measured(server, title, 1, partial(wait_for, _IDLE_S))
        cores = f"{step.server_s / step.seconds:.3f} cores"
        rss = f"RSS {rss_bytes(server.pid) / MIB:,.0f} MiB"
        self._done(Step(title, 1, step.seconds, step.server_s, None, step.stall, f"{cores}, {rss}"))

    def _step(self, server: Server, title: str, count: int, do: Callable[[], object]) -> None:
        self._done(self._measured(server, title, count, do))

    def _measured(self, server: Server, title: str, count: int, do: Callable[[], object]) -> Step:
        before, kept, logged = (
            Usage.now(server.pid),
            rss_bytes(server.pid),
            self._log.stat().st_size,
        )
        do()
        after, grown = Usage.now(server.pid), rss_bytes(server.pid) - kept
        wait_for(_WATCHED_S)  # the last stall is logged at the next check of the loop
        return Step(
            title,
            count,
            after.at_s - before.at_s,
            after.server_s - before.server_s,
            grown if count > _PAGES and grown > 0 else None,
            longest_stall(self._log, logged),
        )

    def _done(self, step: Step) -> None:
        self.steps.append(step)
        print("  ".join(filter(None, step.cells())), flush=True)

    def table(self) -> str:
        """The steps as a table of a document."""
        rows = [HEADINGS, ("---",) * len(HEADINGS), *(step.cells() for step in self.steps)]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def wait_for(seconds: float) -> None:
    """Let time pass while nothing is asked."""
    time.sleep(seconds)


def longest_stall(log: Path, start: int) -> Stall | None:
    """The longest stall in a log from the byte ``start`` on; None if there is none."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [json.loads(line) for line in file if line.startswith(b"{")]
    stalls = [line for line in lines if line["event"] == "loop_stalled"]
    if not stalls:
        return None
    longest = max(stalls, key=lambda line: float(line["seconds"]))
    return Stall(longest["seconds"], _named(longest["doing"]))


def _named(calls: list[str]) -> str:
    """The innermost call of Contrail's own code, as module and function.

    Nothing if that is the call of the event loop: many short steps in one turn.
    """
    for call in calls:
        module, function, _ = call.rsplit(":", 2)
        if module.startswith("contrail_") and module != "contrail_serve.main":
            return f"{module.rpartition('.')[2]}.{function}"
    return ""
