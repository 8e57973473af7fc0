"""Ctrl-C while Spark starts. The JVM is a program that says when its driver has gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JVM = """#!/bin/sh
echo started > "$(dirname "$0")/started"
read -r line
echo at java.base
"""
START = """
import signal, subprocess, sys, threading
from types import SimpleNamespace
from pyspark import SparkContext
from contrail_pipeline.startup import start

# Ctrl-C is ignored in what a shell runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

def build():
    jvm = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)
    SparkContext._gateway = SimpleNamespace(proc=jvm)
    built.set()
    jvm.wait()
    raise ConnectionError

class Thread(threading.Thread):
    def start(self):
        if "before" in sys.argv:
            raise KeyboardInterrupt
        super().start()
        if "after" in sys.argv:
            built.wait()
            raise KeyboardInterrupt

built = threading.Event()
threading.Thread = Thread
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


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_start_may_be_interrupted_while_its_thread_begins(tmp_path: Path, moment: str) -> None:
    jvm = tmp_path / "jvm"
    jvm.write_text(JVM)
    jvm.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "-c", START, str(jvm), moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines()[-1] == "KeyboardInterrupt"
    assert "java" not in ended.stdout
