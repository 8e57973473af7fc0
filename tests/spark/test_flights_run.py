"""``python -m contrail_flights`` as a user runs it: processes, Spark, signals and all."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_flights import job
from contrail_flights.__main__ import main
from contrail_flights.suggestions import suggestions

pytestmark = pytest.mark.spark

LIMIT = 3_000
TIMEOUT_S = 900


def arguments(data_dir: Path) -> list[str]:
    """A run on a free port with the first flights of the year."""
    return ["--port", "0", "--data-dir", str(data_dir), "--limit", str(LIMIT)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all runs of this module share, from the first to the last."""
    return tmp_path_factory.mktemp("flights")


RECEIVED = [
    "pulled on JFK-LAX",
    "left of the flights pulled on JFK-LAX",
    "pushed on LGA-ATL",
    "left of the flights pushed on LGA-ATL",
]


@pytest.fixture(scope="module")
def running(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The first run, which stays up after its report, and what it has printed so far."""
    command = [sys.executable, "-m", "contrail_flights", *arguments(data_dir)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if "keeps running" in line:
                break
        yield process, printed
        process.kill()


def test_the_first_run_publishes_delivers_reads_and_agrees(
    running: tuple[subprocess.Popen[str], str], data_dir: Path
) -> None:
    _, printed = running
    agreed = re.findall(r"^ok +(.*): ", printed, re.MULTILINE)
    assert agreed == ["published", *RECEIVED, "read by Spark"]
    assert "WRONG" not in printed
    names = {file.name for file in (data_dir / "report").iterdir()}
    tables = {"carriers.csv", "airports.csv", "destinations.csv", "routes.csv"}
    assert names == {"report.md", "delays.png", *tables}


def test_every_command_it_suggests_works_as_printed(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    _, printed = running
    found = re.search(r"server (http://\S+),", printed)
    assert found is not None
    for suggestion in suggestions(found[1]):
        assert suggestion.command in printed
        failing = suggestion.command.replace("curl ", "curl --fail --max-time 30 ")
        answer = subprocess.run(
            ["sh", "-c", failing], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        assert answer.stdout.strip(), suggestion.purpose


def test_ctrl_c_ends_it_cleanly(running: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = running
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0
    assert process.stdout is not None
    rest = process.stdout.read()
    assert "Stopping the server" in rest
    assert "Traceback" not in rest


def test_a_second_run_keeps_the_stream_and_doubles_nothing(
    running: tuple[subprocess.Popen[str], str],
    data_dir: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    process, _ = running
    process.send_signal(signal.SIGINT)
    process.wait(TIMEOUT_S)
    # The first run has shown that it starts and ends Spark; this one takes what is up already.
    monkeypatch.setattr(job, "local_session", lambda *_, **__: spark)
    monkeypatch.setattr(job, "shut_down", lambda _: None)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        status = main([*arguments(data_dir), "--once"])
    finally:
        signal.signal(signal.SIGTERM, terminate)
    again = capfd.readouterr()
    assert status == 0, again.err
    assert f"still has the {LIMIT:,} flights of an earlier run" in again.out
    agreed = re.findall(r"^ok +(.*): ", again.out, re.MULTILINE)
    assert agreed == [*RECEIVED, "read by Spark"]
