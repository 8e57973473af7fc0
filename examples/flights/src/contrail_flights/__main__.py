"""``python -m contrail_flights``: the main job of the repository, see ``--help``."""

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
from contrail_flights.checks import DisagreementError
from contrail_flights.dataset import DatasetError
from contrail_flights.job import Settings, run
from contrail_flights.route import RouteError
from contrail_flights.server import ServerError
from contrail_flights.stream import ForeignStreamError
from contrail_spark.options import parse_url
from contrail_spark.session import JavaNotFoundError, MasterError, parse_master

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
    MasterError,
    OSError,
    PySparkException,
    RouteError,
    ServerError,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; returns 0 if all checks agree, otherwise 1 with a message."""
    settings = parse_settings(arguments)
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


def parse_settings(arguments: list[str] | None) -> Settings:
    """Parse the command line; ends the process with a message if it is not valid."""
    parser = argparse.ArgumentParser(
        prog="python -m contrail_flights",
        description="Publish a year of real flights, consume a route, report with Spark.",
    )
    parser.add_argument("--once", action="store_true", help="exit after the report")
    parser.add_argument("--port", type=_port, help=f"default: {DEFAULT_PORT}")
    parser.add_argument("--data-dir", type=Path, help=f"default: ./{DEFAULT_DATA_DIR}")
    parser.add_argument(
        "--url",
        type=_url,
        help="use this running server instead of starting one; write the report to ./reports "
        "and exit",
    )
    parser.add_argument(
        "--token-file",
        type=lambda text: Path(text).resolve(),
        help="file that contains the token of that server; executors on other machines read it "
        "from the same path",
    )
    parser.add_argument(
        "--spark-master",
        type=_master,
        help="run the report on this cluster (spark://host:port) instead of in this process",
    )
    parser.add_argument("--limit", type=_positive, help="use only the first flights of the year")
    parser.add_argument(
        "--fresh", action="store_true", help="delete stream FLIGHTS first, whatever it contains"
    )
    given = parser.parse_args(arguments)
    if given.url is None and given.token_file is not None:
        parser.error("--token-file requires --url")
    if given.url is not None and (given.port is not None or given.data_dir is not None):
        parser.error(
            "--port and --data-dir cannot be used with --url, which names a running server"
        )
    given.port = DEFAULT_PORT if given.port is None else given.port
    given.data_dir = given.data_dir or DEFAULT_DATA_DIR
    return Settings(**vars(given))


def _url(text: str) -> str:
    try:
        return parse_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _master(text: str) -> str:
    try:
        parse_master(text)
    except MasterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"a port must be between 0 (any free port) and {PORT_MAX}")
    return port


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
