"""``python -m contrail_spark.flights``: the main job of the repository, see ``--help``."""

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from pyspark.errors import PySparkException
from rich.console import Console

from contrail_client import ContrailError
from contrail_spark.flights.checks import DisagreementError
from contrail_spark.flights.dataset import DatasetError
from contrail_spark.flights.job import Settings, run
from contrail_spark.flights.route import RouteError
from contrail_spark.flights.server import ServerError
from contrail_spark.flights.stream import ForeignStreamError
from contrail_spark.session import JavaNotFoundError

DEFAULT_PORT: Final = 7420
DEFAULT_DATA_DIR: Final = Path("contrail-data")
PORT_MAX: Final = 65_535
INTERRUPTED: Final = 130
TERMINATED: Final = 143

EXPECTED: Final = (
    ContrailError,
    DatasetError,
    DisagreementError,
    ForeignStreamError,
    JavaNotFoundError,
    OSError,
    PySparkException,
    RouteError,
    ServerError,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; 0 when everything agreed, 1 with a message otherwise."""
    settings = _settings(arguments)
    console = Console(highlight=False)
    # Py4J logs the traceback of every call that Ctrl-C cuts short.
    logging.getLogger().addHandler(logging.NullHandler())
    # A plain kill has to stop the server as well.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(settings, console)
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return INTERRUPTED
    except EXPECTED as error:
        Console(stderr=True, highlight=False).print(
            f"Failed: {error}", markup=False, soft_wrap=True, style="red"
        )
        return 1
    return 0


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _settings(arguments: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m contrail_spark.flights",
        description="Publish a year of real flights, consume a route, report with Spark.",
    )
    parser.add_argument("--once", action="store_true", help="end after the report")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="default: %(default)s")
    parser.add_argument(
        "--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="default: ./%(default)s"
    )
    parser.add_argument("--limit", type=_positive, help="only the first flights of the year")
    parser.add_argument(
        "--fresh", action="store_true", help="delete stream FLIGHTS first, whatever it holds"
    )
    return Settings(**vars(parser.parse_args(arguments)))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"a port is 0 (any free one) to {PORT_MAX}")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 is expected")
    return number


if __name__ == "__main__":
    sys.exit(main())
