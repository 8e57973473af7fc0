"""Errors of the data source and of lakes, as commands report them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from contrail_client.cli.ending import Failed, Misuse
from contrail_spark.errors import ContrailSparkError, OptionError


@contextmanager
def in_one_line(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise Misuse for a wrong option, and Failed for other errors of the data source.

    ``options`` has the options of the command for those of the data source.
    """
    try:
        yield
    except OptionError as error:
        text = str(error).removeprefix("option ")
        for name, own in (options or {}).items():
            text = text.replace(name, own)
        raise Misuse(text) from error
    except ContrailSparkError as error:
        raise Failed(str(error)) from error
