"""Ctrl-C while Spark starts. The JVM is a program that says when its driver has gone."""

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
import signal, subprocess, sys
from types import SimpleNamespace
from pyspark import SparkContext
from contrail_pipeline.startup import start

# Ctrl-C is ignored in what a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

def build():
    jvm = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)
    SparkContext._gateway = SimpleNamespace(proc=jvm)
    jvm.wait()
    raise ConnectionError

start(build)
"""


def test_an_interrupted_start_ends_the_jvm_quietly(tmp_path: Path) -> None:
    jvm, started = tmp_path / "jvm", tmp_path / "started"
    os.mkfifo(started)
    jvm.write_text(JVM)
    jvm.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", START, str(jvm)],
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
