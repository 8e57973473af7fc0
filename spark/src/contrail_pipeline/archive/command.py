"""`contrail pipeline archive`: the options of the job."""

from pathlib import Path
from typing import Annotated, Final

import typer

from contrail_client.cli import units
from contrail_client.cli.arguments import StreamName
from contrail_client.cli.ending import Misuse
from contrail_pipeline.job import Job, folder_of
from contrail_spark.options import parse_size

FILE_SIZE_MIN: Final = 1 << 20
FILE_SIZE_MAX: Final = 16 << 30
TOKENS_MAX: Final = 64


def archive(
    job: Job,
    stream: StreamName,
    lake: Annotated[
        Path, typer.Argument(help="Folder of the lake, which all workers see under this path.")
    ],
    *,
    subject_token: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=TOKENS_MAX,
            help="Partition by this token of the subject as well as by day; the first is 1.",
        ),
    ] = None,
    file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Messages of a file, before compression.")
    ] = "128m",
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            help="Fail if messages were removed before they were archived; otherwise record "
            "which, and go on."
        ),
    ] = True,
) -> None:
    """Archive a stream to a lake of Parquet files: everything that is not in the lake yet."""
    root, file_bytes = folder_of(lake, "LAKE"), file_size_of(file_size)
    # Arrow and Spark take a while to import, and `--help` must not wait for them.
    from contrail_pipeline.archive.rounds import Archiver, Wishes  # noqa: PLC0415

    wishes = Wishes(subject_token, file_bytes, fail_on_data_loss)
    Archiver(job, stream, root, wishes).run()


def file_size_of(text: str) -> int:
    """Bytes from a text such as ``128m``; Misuse if they are not within the limits."""
    try:
        found = parse_size(text)
    except ValueError as error:
        raise Misuse(f"--file-size {error}") from None
    if not FILE_SIZE_MIN <= found <= FILE_SIZE_MAX:
        limits = f"{units.size(FILE_SIZE_MIN)} to {units.size(FILE_SIZE_MAX)}"
        raise Misuse(f"--file-size must be from {limits}, not {text}")
    return found
