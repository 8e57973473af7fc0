"""What all jobs have in common: where they run, dry runs, progress, and the source of messages."""

import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec

import typer
from rich.progress import Progress

from contrail_client.blocking.client import Contrail
from contrail_client.cli import show
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.failures import ending

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")

_NAME: Final = "contrail-pipeline"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Spark master such as spark://host:7077.",
        show_default="a Spark in this process, on all cores",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what the job would do, and change nothing.")
]


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a job: the server it works with, its Spark, and the form of its output.

    With ``dry_run`` it must change nothing, neither in streams nor in files.
    """

    session: Session
    master: str | None
    dry_run: bool

    @property
    def client(self) -> Contrail:
        """A client of the server."""
        return self.session.client

    @property
    def as_json(self) -> bool:
        """True if the output is for machines: one JSON value a line."""
        return self.session.as_json

    def server_options(self, stream: str) -> dict[str, str]:
        """The options of the data source for a stream of the server."""
        context = self.session.context
        options = {"url": context.url, "stream": stream}
        return options | ({"token": context.token} if context.token else {})

    @contextmanager
    def spark(self) -> Iterator["SparkSession"]:
        """Start Spark, and end it with the job; a program that runs Spark already keeps its own.

        Raises Failed if it cannot be started, and Failed or Misuse for errors in the block.
        """
        # Importing Spark takes a while, and `--help` or a wrong option must not wait for it.
        from pyspark.errors import PySparkException  # noqa: PLC0415

        from contrail_pipeline.startup import start  # noqa: PLC0415
        from contrail_spark import session as sessions  # noqa: PLC0415

        borrowed = sessions.is_running()
        # Py4J logs the traceback of every call that Ctrl-C cuts short.
        logging.getLogger().addHandler(logging.NullHandler())
        try:
            spark = self._session() if borrowed else start(self._session)
        except (sessions.JavaNotFoundError, sessions.MasterError) as error:
            raise Failed(str(error)) from error
        if not borrowed:
            # The error of a failed task ends the job; Spark would also log it, with its stack.
            spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        except KeyboardInterrupt:
            # An interrupted call has closed its connection, and Spark warns about that.
            warnings.simplefilter("ignore", RuntimeWarning)
            raise
        except Exception as error:
            # That a worker of an RDD has died is an error of Py4J, which only Spark depends on.
            if isinstance(error, PySparkException) or type(error).__module__ == "py4j.protocol":
                raise ending(error) from error
            raise
        finally:
            if not borrowed:
                sessions.shut_down(spark)

    def _session(self) -> "SparkSession":
        from contrail_spark import session as sessions  # noqa: PLC0415

        if sessions.is_running() or sessions.is_submitted():
            return sessions.present_session(_NAME)
        if self.master is None:
            return sessions.local_session(_NAME, cores=os.cpu_count() or 1)
        return sessions.cluster_session(_NAME, self.master)

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A progress bar on a terminal; the function that it yields takes what is done in all."""
        with show.progress(what, total, shown=not self.as_json) as bar:
            yield lambda done: _advance(bar, done)

    def done(self, text: str, result: Any) -> None:
        """Print the result of the job: a sentence for people, ``result`` as JSON for machines."""
        show.done(text, result, as_json=self.as_json)


def _advance(bar: Progress, done: int) -> None:
    bar.update(bar.task_ids[0], completed=done)


def folder_of(path: Path, option: str) -> Path:
    """The absolute path of a folder for data; Misuse for a URL, which would be a path as well."""
    if _URL.match(str(path)):
        raise Misuse(f"{option} must be a folder of a file system, not a URL such as {path}")
    return path.absolute()


Work = Callable[Concatenate[Job, P], None]


def job_command(app: typer.Typer, name: str, *, spark: bool = True) -> Callable[[Work[P]], Work[P]]:
    """Register a command that gets a `Job`, with the options that all jobs have.

    A job without ``spark`` has no option for its master.
    """

    def register(work: Work[P]) -> Work[P]:
        def run(
            session: Session, /, *, master: Master = None, dry_run: DryRun = False, **own: Any
        ) -> None:
            work(Job(session, master, dry_run), **own)  # type: ignore[call-arg]

        # The client makes its options of the parameters in the signature.
        first, *shared = (
            each
            for each in inspect.signature(run).parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD and (spark or each.name != "master")
        )
        _, *own = inspect.signature(work).parameters.values()
        parameters = [
            first,
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
            *shared,
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__doc__ = work.__doc__
        client_command(app, name)(run)
        return work

    return register
