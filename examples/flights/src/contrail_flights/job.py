"""The walk through the demonstration, step by step."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from rich.console import Console

from contrail_client import Consumer, Contrail
from contrail_common.subjects import matches
from contrail_flights.checks import Check, Received, check_all, raise_disagreements
from contrail_flights.dataset import Dataset, load_dataset
from contrail_flights.pages import save
from contrail_flights.report import Report, make_report, read_stream
from contrail_flights.route import PULLED, PUSHED, PulledRoute, PushedRoute, new_consumer
from contrail_flights.screen import note, progress, show_report, show_suggestions, step
from contrail_flights.server import Server, connected, serving
from contrail_flights.stream import (
    STREAM,
    ForeignStreamError,
    Found,
    Published,
    create,
    judge,
    publish_all,
    stream_info,
)
from contrail_flights.tally import Tally, tally_of
from contrail_spark.session import cluster_session, find_java, local_session, shut_down

CORES_MIN: Final = 2
CORES_MAX: Final = 4
REPORTS: Final = Path("reports")
"""The folder of the report if the data folder belongs to another server."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from the command line."""

    port: int
    data_dir: Path
    limit: int | None
    once: bool
    fresh: bool
    url: str | None = None
    token_file: Path | None = None
    spark_master: str | None = None

    @property
    def report_dir(self) -> Path:
        """The folder for page, tables and plot."""
        return (REPORTS if self.url else self.data_dir / "report").resolve()

    @property
    def spark_log(self) -> Path:
        """The log file of Spark."""
        return (REPORTS if self.url else self.data_dir).resolve() / "spark.log"


def run(settings: Settings, console: Console) -> None:
    """Serve, publish, consume, report and check; then keep the server up unless ``once``.

    Ctrl-C stops it. With a ``url``, that server is used, and this returns after the checks.
    Raises errors of this package, the client or Spark, each with a sentence for the user.
    """
    java = find_java()
    with step(console, "Reading the flights"):
        dataset = load_dataset(settings.limit)
    note(console, f"{len(dataset.flights):,} flights in time order; Java from {java.origin}")
    if settings.url is not None:
        with connected(settings.url, settings.token_file) as client:
            note(console, f"server {settings.url}, already running")
            _Demonstration(settings, console, dataset, client, settings.url).run()
        return
    with serving(settings.port, settings.data_dir) as server, Contrail(server.url) as client:
        note(console, f"server {server.url}, data in {settings.data_dir}, log in {server.log}")
        try:
            _Demonstration(settings, console, dataset, client, server.url).run()
        except Exception as error:
            if ended := server.ended():
                raise ended from error
            raise
        if not settings.once:
            _stay(console, server)


def _stay(console: Console, server: Server) -> None:
    """Keep the server up until Ctrl-C; raises if it ends on its own."""
    show_suggestions(console, server.url)
    try:
        ended = server.wait()
    except KeyboardInterrupt:
        console.print("\nStopping the server.")
    else:
        raise ended


@dataclass(slots=True)
class _Demonstration:
    """One run against a server that is up."""

    settings: Settings
    console: Console
    dataset: Dataset
    client: Contrail
    url: str
    whole: Tally = field(init=False)
    pulled: Tally = field(init=False)
    pushed: Tally = field(init=False)

    def __post_init__(self) -> None:
        flights = [(flight.subject, flight.payload) for flight in self.dataset.flights]
        self.whole = tally_of(flights)
        self.pulled, self.pushed = (
            tally_of(flight for flight in flights if matches(route.subjects, flight[0]))
            for route in (PULLED, PUSHED)
        )

    def run(self) -> None:
        kept = self._keep_or_create()
        pulling, pushing = (new_consumer(self.client, route) for route in (PULLED, PUSHED))
        published, pulled, pushed = self._stream(kept, pulling, pushing)
        report = self._report()
        received = [
            Received(f"pulled on {PULLED.name}", self.pulled, pulled, pulling.info()),
            Received(f"pushed on {PUSHED.name}", self.pushed, pushed, pushing.info()),
        ]
        tally = published.tally if published else None
        checks = check_all(self.whole, tally, received, report.tally)
        page = save(report, _facts(published, checks), self.settings.report_dir)
        show_report(self.console, report, checks, page)
        raise_disagreements(checks)

    def _stream(
        self, kept: bool, pulling: Consumer, pushing: Consumer
    ) -> tuple[Published | None, Tally, Tally]:
        """Publish unless an earlier run did, while one route is pulled and another one pushed."""
        with progress(self.console) as bars:

            def counter(what: str, total: int, *, visible: bool = True) -> Callable[[int], None]:
                bar = bars.add_task(what, total=total, visible=visible)
                return lambda count: bars.advance(bar, count)

            stored = counter(f"Publishing {STREAM}", self.whole.count, visible=not kept)
            with (
                PulledRoute(
                    pulling,
                    self.pulled.count,
                    counter(f"Pulling {PULLED.name}", self.pulled.count),
                ) as pulled,
                PushedRoute(
                    self.client,
                    pushing,
                    self.pushed.count,
                    counter(f"Pushing {PUSHED.name}", self.pushed.count),
                ) as pushed,
            ):
                published = None if kept else publish_all(self.client, self.dataset.flights, stored)
                return published, pulled.finish(), pushed.finish()

    def _keep_or_create(self) -> bool:
        """Prepare the stream for a run; True if an earlier run has completed it."""
        info = stream_info(self.client)
        found = Found.INCOMPLETE if self.settings.fresh and info else judge(info, self.whole)
        if found is Found.FOREIGN:
            where = self.settings.url or self.settings.data_dir
            other = "--url" if self.settings.url else "--data-dir"
            raise ForeignStreamError(
                f"stream {STREAM} in {where} contains messages that this job did not publish, "
                f"so it was not changed. Choose another {other}, or delete the stream with "
                "--fresh"
            )
        if found is Found.COMPLETE:
            note(
                self.console,
                f"stream {STREAM} still has the {self.whole.count:,} flights of an earlier "
                "run: they are not published again (use --fresh for that), and the route is "
                "delivered once more",
            )
            return True
        if found is Found.INCOMPLETE:
            note(self.console, f"stream {STREAM} of an earlier run is deleted and re-created")
            self.client.delete_stream(STREAM)
        create(self.client, self.whole)
        return False

    def _report(self) -> Report:
        with step(self.console, "Starting Spark, which takes a few seconds"):
            interrupt = signal.getsignal(signal.SIGINT)
            # The JVM writes its warnings to stderr, in the middle of the progress.
            with _stderr_into(self.settings.spark_log):
                spark = self._session()
            # The handler of Spark would cancel the jobs of the session, which is stopped anyway.
            signal.signal(signal.SIGINT, interrupt)
        try:
            with step(self.console, f"Reading {STREAM} back with Spark and summing up the year"):
                return make_report(
                    read_stream(spark, self.url, STREAM, self.settings.token_file),
                    self.dataset.airlines,
                    self.dataset.airports,
                )
        finally:
            shut_down(spark)

    def _session(self) -> SparkSession:
        if self.settings.spark_master is not None:
            return cluster_session("flights", self.settings.spark_master, partitions=CORES_MAX)
        cores = max(CORES_MIN, min(CORES_MAX, os.cpu_count() or 1))
        return local_session("flights", cores=cores)


@contextlib.contextmanager
def _stderr_into(file: Path) -> Iterator[None]:
    """Use ``file`` as the stderr of processes that start in this context, such as the JVM."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = os.dup(sys.stderr.fileno())
    try:
        with file.open("wb") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        yield
    finally:
        os.dup2(own, sys.stderr.fileno())
        os.close(own)


def _facts(published: Published | None, checks: list[Check]) -> list[str]:
    """The head of the report: the checks against the CSV, and the publish rate."""
    facts = [f"{check} ({'as' if check.agrees else 'not as'} in the CSV)" for check in checks]
    if published is not None:
        facts.append(
            f"publishing took {published.seconds:.1f} s: {published.rate:,.0f} messages per "
            "second, each acknowledged as stored"
        )
    return facts
