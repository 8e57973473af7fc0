"""``python -m contrail_spark.standalone master|worker``: Spark's daemons, in the foreground.

The package index has Spark without the scripts that start a standalone cluster. This starts the
same classes with the Java and the Python that :mod:`contrail_spark.session` would choose, and
becomes that process: signals, exit status and log are Spark's own.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

import pyspark

from contrail_spark.session import (
    LOOPBACK,
    JavaNotFoundError,
    MasterError,
    parse_master,
    prepare_environment,
)

MASTER_PORT: Final = 7077
MASTER_WEB_PORT: Final = 8080
WORKER_WEB_PORT: Final = 8081
_CLASSES: Final = {
    "master": "org.apache.spark.deploy.master.Master",
    "worker": "org.apache.spark.deploy.worker.Worker",
}
_MASTER_OPTIONS: Final = "-Dspark.master.rest.enabled=false"
"""Otherwise Spark also accepts jobs on port 6066, on every address and from anybody."""
_WORKER_OPTIONS: Final = "-Dspark.worker.cleanup.enabled=true"
"""Keep the files of applications for a week; by default Spark keeps them forever."""


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the daemon; returns 1 if it cannot be started."""
    options = _options(arguments)
    try:
        if options.daemon == "worker":
            parse_master(options.master)
        prepare_environment(options.host)
    except (JavaNotFoundError, MasterError) as error:
        print(f"Failed: {error}", file=sys.stderr)
        return 1
    home = Path(pyspark.__file__).parent
    os.environ["SPARK_HOME"] = str(home)
    os.environ.setdefault("SPARK_MASTER_OPTS", _MASTER_OPTIONS)
    os.environ.setdefault("SPARK_WORKER_OPTS", _WORKER_OPTIONS)
    command = [str(home / "bin" / "spark-class"), *spark_arguments(options)]
    sys.stdout.flush()
    return os.execv(command[0], command)


def spark_arguments(options: argparse.Namespace) -> list[str]:
    """The class and its arguments, as for spark-class."""
    given = ["--host", options.host, "--port", options.port, "--webui-port", options.web_port]
    if options.daemon == "worker":
        given += ["--memory", options.memory, "--work-dir", options.work_dir]
        if options.cores is not None:
            given += ["--cores", options.cores]
        given.append(options.master)
    return [_CLASSES[options.daemon], *map(str, given)]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m contrail_spark.standalone",
        description="Start a daemon of a standalone Spark cluster in the foreground.",
    )
    daemons = parser.add_subparsers(dest="daemon", required=True)
    master = daemons.add_parser(
        "master", help="run the master, which assigns the workers' cores to jobs"
    )
    _add_addresses(master, MASTER_PORT, MASTER_WEB_PORT)
    worker = daemons.add_parser("worker", help="run a worker, which runs the executors of jobs")
    worker.add_argument("master", help="spark://host:port, as logged by the master")
    _add_addresses(worker, 0, WORKER_WEB_PORT)
    worker.add_argument("--cores", type=int, help="default: all cores of the machine")
    worker.add_argument("--memory", default="1g", help="memory for executors; default: %(default)s")
    worker.add_argument(
        "--work-dir",
        type=Path,
        default=Path("spark-work"),
        help="folder for logs and files of jobs; default: ./%(default)s",
    )
    return parser.parse_args(arguments)


def _add_addresses(parser: argparse.ArgumentParser, port: int, web_port: int) -> None:
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help="name or address to bind, under which other machines reach this one. Spark does "
        "not authenticate anyone, so anything but loopback requires a private network; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--port", type=int, default=port, help="port; 0 picks a free one; default: %(default)s"
    )
    parser.add_argument(
        "--web-port", type=int, default=web_port, help="port of the web page; default: %(default)s"
    )


if __name__ == "__main__":
    sys.exit(main())
