"""`contrail pipeline restore`: the options of the job."""

from pathlib import Path
from typing import Annotated

import typer

from contrail_client.cli.arguments import EndTime, StartTime, StreamName
from contrail_client.cli.ending import Misuse
from contrail_common.subjects import filter_problem, subject_problem
from contrail_pipeline.bounds import Bounds
from contrail_pipeline.job import Job


def restore(  # noqa: PLR0913 one for each option
    job: Job,
    lake: Annotated[Path, typer.Argument(help="Folder of the lake.")],
    stream: StreamName,
    *,
    subject: Annotated[
        list[str] | None,
        typer.Option(metavar="SUBJECT", help="Only messages of these subjects; may be repeated."),
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option(metavar="SEQ", help="First sequence (lakes of one shard).")
    ] = None,
    to_seq: Annotated[
        int | None, typer.Option(metavar="SEQ", help="Last sequence (lakes of one shard).")
    ] = None,
    start_time: StartTime = None,
    end_time: EndTime = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the stream if it does not exist.")
    ] = False,
    capture: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBJECT",
            help="With --create: a subject to capture; may be repeated.",
            show_default="the first tokens in the lake",
        ),
    ] = None,
    subject_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Put this before each subject, such as `old.`.")
    ] = "",
    origin: Annotated[
        bool,
        typer.Option("--origin", help="Add headers that say where and when a message was stored."),
    ] = False,
    name: Annotated[
        str,
        typer.Option(help="Another name restores messages again that the stream had before."),
    ] = "",
) -> None:
    """Replay a lake into a stream, each message once. If interrupted, run it again."""
    if capture and not create:
        raise Misuse("--capture needs --create")
    bounds = Bounds(tuple(subject or ()), from_seq, to_seq, start_time, end_time)
    bounds.check()
    for each in capture or ():
        if problem := filter_problem(each):
            raise Misuse(f"--capture {each!r}: {problem}")
    if problem := subject_problem(f"{subject_prefix}x"):
        raise Misuse(f"--subject-prefix {subject_prefix!r}: {problem}")
    # Arrow and Spark take a while to import, and `--help` must not wait for them.
    from contrail_pipeline.restore.parts import Restorer, Wishes  # noqa: PLC0415

    wishes = Wishes(
        bounds=bounds,
        create=create,
        capture=tuple(capture or ()),
        prefix=subject_prefix,
        origin=origin,
        name=name,
    )
    Restorer(job, lake, stream, wishes).run()
