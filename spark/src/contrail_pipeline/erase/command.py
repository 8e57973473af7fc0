"""`contrail pipeline erase`: the options of the job."""

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from contrail_client.cli.arguments import Yes, confirm
from contrail_client.cli.ending import Failed, Misuse
from contrail_common.subjects import filter_problem
from contrail_pipeline.job import Job

_DIGITS_MAX: Final = 18


def erase(
    job: Job,
    lake: Annotated[Path, typer.Argument(help="Folder of the lake.")],
    *,
    subject: Annotated[
        list[str] | None,
        typer.Option(metavar="SUBJECT", help="Erase these subjects; may be repeated."),
    ] = None,
    seq: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARD:FIRST-LAST",
            help="Erase these sequences, such as 17, 17-20 or 3:17-20; may be repeated.",
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="First erase them in the stream, and wait for that.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="With --stream: how long to wait.")
    ] = 600.0,
    receipt: Annotated[
        Path | None, typer.Option(help="Also write the receipt to this file, outside of the lake.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Remove messages from all files of a lake, and prove it. If interrupted, run it again."""
    for each in subject or ():
        if problem := filter_problem(each):
            raise Misuse(f"--subject {each!r}: {problem}")
    ranges = [parse_range(each) for each in seq or ()]
    if not (subject or ranges):
        raise Misuse("nothing to erase: give --subject or --seq")
    if receipt is not None:
        check_receipt(receipt, lake)
    if not job.dry_run:
        confirm(f"Erase messages of the lake in {lake}? This cannot be undone.", yes)
    # Arrow and Spark take a while to import, and `--help` must not wait for them.
    from contrail_pipeline.erase.steps import Eraser, Wishes  # noqa: PLC0415

    Eraser(job, lake, Wishes(tuple(subject or ()), tuple(ranges), stream, wait, receipt)).run()


def check_receipt(receipt: Path, lake: Path) -> None:
    """Refuse a receipt that could not be kept, before anything is erased."""
    if receipt.resolve().is_relative_to(lake.resolve()):
        raise Misuse("--receipt must be outside of the lake, because it names what was erased")
    if receipt.is_dir():
        raise Misuse(f"--receipt: {receipt} is a folder; give the name of a file in it")
    if not receipt.parent.is_dir():
        raise Misuse(f"--receipt: there is no folder {receipt.parent}")
    if not os.access(receipt if receipt.exists() else receipt.parent, os.W_OK):
        raise Failed(f"the receipt {receipt.absolute()} is not writable")


def parse_range(text: str) -> tuple[int | None, int, int]:
    """The shard, which may be left out, and the first and last sequence; Misuse if not valid."""
    shard, colon, seqs = text.rpartition(":")
    first, dash, last = seqs.partition("-")
    numbers = [*([shard] if colon else []), first, *([last] if dash else [])]
    if not all(each.isascii() and each.isdigit() and len(each) <= _DIGITS_MAX for each in numbers):
        raise Misuse(f"--seq must be such as 17, 17-20 or 3:17-20, not {text!r}")
    low, high = int(first), int(last) if dash else int(first)
    if not 1 <= low <= high:
        raise Misuse(f"--seq {text}: the range is empty; sequences begin with 1")
    return int(shard) if colon else None, low, high
