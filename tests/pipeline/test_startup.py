"""Ctrl-C while Spark starts. The JVM is a program that never answers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

JVM = """#!/bin/sh
echo started > "$(dirname "$0")/started"
read -r line
echo at java.base
"""
START = """
from pyspark.java_gateway import launch_gateway
from contrail_pipeline.startup import start
start(launch_gateway)
"""


def test_an_interrupted_start_ends_the_jvm_quietly(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    jvm, started = binaries / "spark-submit", binaries / "started"
    os.mkfifo(started)
    jvm.write_text(JVM)
    jvm.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", START],
        env=os.environ | {"SPARK_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert started.read_text()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    # The JVM has the output too: it would have kept it open.
    assert "java" not in output
