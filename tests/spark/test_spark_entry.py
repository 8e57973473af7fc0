"""The examples of docs/spark.md as a user's own programs, where Spark would find another Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from contrail_client import Contrail, Message
from contrail_spark.options import NAMES, WRITE_NAMES
from contrail_spark.session import JavaNotFoundError, Profile, find_java
from tests.checks.repository import ROOT
from tests.spark.conftest import STARTED
from tests.spark.replay_server import ReplayServer
from tests.spark.stored import texts
from tests.support.servers import ServerProcess

PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
LOCAL, ELSEWHERE, CONNECT, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
READ = LOCAL[LOCAL.index("flights = (") :]
CONNECTED = """
options = {"url": "http://127.0.0.1:7420"}
reader = spark.read.format("contrail").options(stream="A", **options)
frame = reader.load()
before = frame.count()
row = frame.selectExpr("subject", "concat('again ', string(data)) as data")
row.write.format("contrail").options(stream="A", **options).mode("append").save()
print("counted", before, frame.count(), reader.load().count())
query = (
    spark.readStream.format("contrail")
    .options(stream="A", startingPosition="earliest", maxMessagesPerTrigger=6, **options)
    .load()
    .selectExpr("'b' as subject", "* except (subject)")
    .writeStream.format("contrail")
    .options(stream="B", sourceStream="A", checkpointLocation="checkpoint", **options)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
"""
IDS = {"msg_id"}
"""The table of ids begins with a column."""
TIMEOUT_S = 900.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell in which nothing was activated, and whose ``python3`` knows nothing of Contrail."""
    try:
        java = find_java()
    except JavaNotFoundError as error:
        pytest.skip(str(error))
    binaries = tmp_path / "bin"
    binaries.mkdir()
    stranger = binaries / "python3"
    stranger.write_text("#!/bin/sh\necho 'this Python has no Contrail' >&2\nexit 1\n")
    stranger.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_")}
    kept.pop("PYTHONPATH", None)
    path = f"{binaries}{os.pathsep}{os.defpath}"
    return {**kept, "PATH": path, "JAVA_HOME": str(java.home), "SPARK_LOCAL_IP": "127.0.0.1"}


def run(
    command: list[str], program: str, folder: Path, environment: dict[str, str], url: str
) -> str:
    """What ``program`` prints on standard output, with the server at ``url``."""
    script = folder / "job.py"
    script.write_text(program.replace("http://127.0.0.1:7420", url))
    done = subprocess.run(
        [*command, str(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.spark
def test_a_script_reads_a_stream_with_the_python_that_runs_it(
    server: ReplayServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    shown = run([sys.executable], LOCAL, tmp_path, environment, server.url)
    assert re.search(r"flights\.JFK\.LAX\.AA\|\s*\d+\|", shown), shown


@pytest.mark.spark
def test_a_job_under_spark_submit_reads_a_stream_and_shows_errors_by_their_message(
    server: ReplayServer, tmp_path: Path, environment: dict[str, str]
) -> None:
    misspelt = 'spark.read.format("contrail").option("strem", "FLIGHTS").load()'
    program = (
        f"{ELSEWHERE}\n{READ}\ntry:\n    {misspelt}\nexcept Exception as error:\n    print(error)\n"
    )
    submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]"]
    _, flags = Profile.QUICK.value
    submit += ["--driver-java-options", flags, "--conf", "spark.ui.enabled=false"]
    submit += ["--conf", "spark.sql.shuffle.partitions=1"]
    # This driver has the package; the JVM that started it would ask the first `python3`.
    named = {**environment, "PYTHONPATH": STARTED, "PYSPARK_DRIVER_PYTHON": sys.executable}
    shown = run(submit, program, tmp_path, named, server.url)
    assert re.search(r"flights\.JFK\.LAX\.AA\|\s*\d+\|", shown), shown
    [refusal] = [line for line in shown.splitlines() if "PYTHON_DATA_SOURCE_ERROR" in line]
    assert refusal.endswith("OptionError: unknown option strem; did you mean stream?")
    assert "Traceback" not in shown


@pytest.mark.spark
def test_spark_connect_reads_follows_and_writes(
    running: ServerProcess, tmp_path: Path, environment: dict[str, str]
) -> None:
    with Contrail(running.url) as client:
        client.ensure_stream("A", {"subjects": ["a.*"]})
        client.ensure_stream("B", {"subjects": ["b"]})
        messages = [Message(f"a.{at}", str(at)) for at in range(5)]
        client.publish_batch("A", messages).raise_refused()
    _, flags = Profile.QUICK.value
    testing = {**environment, "PYTHONPATH": STARTED, "SPARK_SUBMIT_OPTS": flags}
    # Spark then takes a free port instead of 15002.
    testing["SPARK_TESTING"] = "1"
    shown = run([sys.executable], CONNECT + CONNECTED, tmp_path, testing, running.url)
    assert "counted 5 5 10" in shown
    assert sorted(texts(running.url, "B")) == sorted(texts(running.url, "A"))
    assert len(texts(running.url, "B")) == 10


def test_the_manual_lists_every_option() -> None:
    listed = {
        name
        for line in PAGE[PAGE.index("## Options") :].splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed == {*NAMES, *WRITE_NAMES, *IDS}
