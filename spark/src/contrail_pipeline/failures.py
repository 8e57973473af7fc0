"""Errors of the data source and of lakes, as commands report them."""

from collections.abc import Iterator
from contextlib import contextmanager

from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.bounds import in_flags
from contrail_spark.errors import ContrailSparkError, OptionError


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise Misuse for a wrong option, and Failed for other errors of the data source."""
    try:
        yield
    except OptionError as error:
        raise Misuse(in_flags(str(error).removeprefix("option "))) from error
    except ContrailSparkError as error:
        raise Failed(str(error)) from error
