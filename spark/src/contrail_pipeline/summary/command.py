"""`contrail pipeline summary`."""

import os
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from contrail_client.cli import show, units
from contrail_client.cli.arguments import EndTime, FromSeq, StartTime, StreamName, ToSeq
from contrail_client.cli.ending import Failed, Misuse
from contrail_client.models import StreamInfo
from contrail_client.operations import replaying
from contrail_pipeline.bounds import Bounds
from contrail_pipeline.job import Job
from contrail_pipeline.summary.backlog import consumers_of
from contrail_pipeline.summary.figures import Content, Summary
from contrail_pipeline.tasks import watched

TOP_MAX: Final = 1_000
Out = Annotated[Path | None, typer.Option("--out", "-o", help="HTML file to write the report to.")]
Subjects = Annotated[
    list[str] | None,
    typer.Option(
        "--subject", metavar="SUBJECT", help="Only messages of these subjects; may be repeated."
    ),
]
Top = Annotated[
    int, typer.Option(min=1, max=TOP_MAX, help="Number of subjects and of consumers to list.")
]


def summary(  # noqa: PLR0913, PLR0917 - one argument for each option
    job: Job,
    stream: StreamName,
    out: Out = None,
    subjects: Subjects = None,
    from_seq: FromSeq = None,
    to_seq: ToSeq = None,
    start_time: StartTime = None,
    end_time: EndTime = None,
    top: Top = 20,
) -> None:
    """Summarise the messages of a stream in tables, plots and an HTML report."""
    bounds = Bounds(tuple(subjects or ()), from_seq, to_seq, start_time, end_time)
    options = _options(job, stream, bounds)
    if out is not None:
        _check_writable(out)
    info = job.client.get_stream(stream)
    if job.dry_run:
        _announce(job, stream, bounds, out)
        return
    made_us = time.time_ns() // 1_000
    consumers, consumer_count = consumers_of(job.client, stream, top, made_us)
    content = _content(job, options, top)
    summary = Summary(
        stream=stream,
        made_us=made_us,
        bounds=bounds,
        config=dict(info.config),
        state=_state(info),
        content=content,
        consumers=consumers,
        consumer_count=consumer_count,
    )
    if out is not None:
        from contrail_pipeline.summary.page import page  # noqa: PLC0415 - only for a report

        try:
            _write(out, page(summary))
        except OSError as error:
            # What was found took a while, and need not be lost.
            _print(job, summary, None)
            raise Failed(f"the report {out} cannot be written: {error.strerror}") from error
    _print(job, summary, out)


def _print(job: Job, summary: Summary, out: Path | None) -> None:
    if job.as_json:
        document = msgspec.to_builtins(summary)
        show.json_line(document | ({} if out is None else {"report": str(out)}))
        return
    from contrail_pipeline.summary.tables import print_tables  # noqa: PLC0415

    print_tables(summary)
    if out is not None:
        job.done(f"report written to {out}", {})


def _state(info: StreamInfo) -> dict[str, Any]:
    return {"created": info.created, **msgspec.to_builtins(info.state)}


def _options(job: Job, stream: str, bounds: Bounds) -> dict[str, str]:
    """The options of the data source; Misuse if they are not valid."""
    from contrail_pipeline.failures import in_one_line  # noqa: PLC0415
    from contrail_spark.options import parse_options  # noqa: PLC0415

    bounds.check()
    options = job.server_options(stream) | bounds.options()
    with in_one_line():
        parse_options(options)
    return options


def _announce(job: Job, stream: str, bounds: Bounds, out: Path | None) -> None:
    asked = replaying.Bounds(
        from_seq=bounds.from_seq,
        to_seq=bounds.to_seq,
        start_time=bounds.start_time,
        end_time=bounds.end_time,
        subject=" ".join(bounds.subjects) or None,
    )
    splits = job.client.replay_plan(stream, asked).splits
    messages = sum(split.messages for split in splits)
    then = "print tables" if out is None else f"print tables and write {out}"
    job.done(
        f"would read about {units.counted(messages, 'message')} of {stream}, and {then}",
        {
            "dry_run": True,
            "messages": messages,
            "bytes": sum(split.bytes for split in splits),
            "report": None if out is None else str(out),
        },
    )


def _content(job: Job, options: dict[str, str], top: int) -> Content:
    with job.spark() as spark:
        from contrail_pipeline.summary import measure  # noqa: PLC0415 - it imports Spark

        facts = measure.read(spark, options)
        with job.progress("Reading", facts.rdd.getNumPartitions()) as advance:
            totals = watched(spark, lambda: measure.totals_of(facts), advance)
        with job.progress("Computing", measure.STEPS) as advance:
            done = count(1)

            def step() -> None:
                advance(next(done))

            return measure.content_of(facts, totals, top, step)


def _check_writable(out: Path) -> None:
    """Fail before the work if the report could not be written after it."""
    if out.is_dir():
        raise Misuse(f"--out: {out} is a folder; give the name of a file in it")
    # Replacing /dev/null would take it from all other programs.
    if out.exists() and not out.is_file():
        raise Misuse(f"--out: {out} is not a regular file, and would be replaced by one")
    if not out.parent.is_dir():
        raise Misuse(f"--out: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise Failed(f"the folder {out.parent.absolute()} is not writable")


def _write(out: Path, text: str) -> None:
    """Write the report; an older one stays until the new one is complete."""
    with tempfile.NamedTemporaryFile(
        "w", dir=out.parent, prefix=".report-", encoding="utf-8", delete=False
    ) as draft:
        try:
            draft.write(text)
            draft.close()
            os.chmod(draft.name, 0o644)
            os.replace(draft.name, out)
        except BaseException:
            Path(draft.name).unlink(missing_ok=True)
            raise
