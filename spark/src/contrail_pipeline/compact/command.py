"""`contrail pipeline compact`: the options of the job."""

from pathlib import Path
from typing import Annotated

import typer

from contrail_client.cli.ending import Misuse
from contrail_common.timeunits import NS_PER_US, parse_duration
from contrail_pipeline.archive.command import file_size_of
from contrail_pipeline.job import Job
from contrail_spark.lake.manifest import REMOVED_KEPT_US


def compact(
    job: Job,
    lake: Annotated[Path, typer.Argument(help="Folder of the lake.")],
    *,
    file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Messages of a file, before compression.")
    ] = "128m",
    keep: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long replaced files are kept for readers."),
    ] = "1h",
) -> None:
    """Merge small files of a lake, and delete files that were replaced some time ago."""
    file_bytes, keep_us = file_size_of(file_size), keep_of(keep)
    # Arrow and Spark take a while to import, and `--help` must not wait for them.
    from contrail_pipeline.compact.rounds import Compactor, Wishes  # noqa: PLC0415

    Compactor(job, lake, Wishes(file_bytes, keep_us)).run()


def keep_of(text: str) -> int:
    """Microseconds from a text such as ``1h``; Misuse if they are not within the limits."""
    try:
        found = parse_duration(text)
    except ValueError as error:
        raise Misuse(f"--keep {text!r}: {error}") from None
    if not 0 <= found <= REMOVED_KEPT_US * NS_PER_US:
        raise Misuse(f"--keep must be from 0 to 7d, not {text}")
    return found // NS_PER_US
