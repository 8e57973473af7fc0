"""`contrail pipeline iceberg`: the options of the job."""

from pathlib import Path
from typing import Annotated

import typer

from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.job import Job


def iceberg(
    job: Job,
    lake: Annotated[
        Path, typer.Argument(help="Folder of the lake, under the path that readers see.")
    ],
    *,
    table: Annotated[
        str, typer.Option(metavar="NAMESPACE.TABLE", help="The table; created if missing.")
    ],
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Catalog in the configuration of PyIceberg.",
            show_default="its default catalog",
        ),
    ] = None,
    property_: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            metavar="KEY=VALUE",
            help="Property of the catalog, such as uri=sqlite:////data/c.db; may be repeated.",
        ),
    ] = None,
) -> None:
    """Make an Iceberg table show the files of a lake. If interrupted, run it again."""
    if not all(part.strip() for part in table.split(".")) or "." not in table:
        raise Misuse(f"--table must be such as namespace.table, not {table!r}")
    properties = dict(parse_property(each) for each in property_ or ())
    # Arrow and PyIceberg take a while to import, and `--help` must not wait for them.
    try:
        from contrail_pipeline.iceberg.steps import Publisher  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyiceberg":
            raise
        raise Failed("this job needs PyIceberg: install contrail-spark[iceberg] as well") from None
    Publisher(job, lake, table, catalog, properties).run()


def parse_property(text: str) -> tuple[str, str]:
    """The key and the value of a property; Misuse if not valid."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise Misuse(f"--property must be such as warehouse=/data/warehouse, not {text!r}")
    return key, value
