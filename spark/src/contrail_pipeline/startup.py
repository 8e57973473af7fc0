"""Starts Spark so that Ctrl-C ends it at once and quietly, at any moment."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from subprocess import Popen
from typing import Any, Final

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from contrail_spark.session import shut_down

_POLL_S: Final = 0.05
_PATIENCE_S: Final = 10.0


def start(build: Callable[[], SparkSession]) -> SparkSession:
    """The session that ``build`` starts.

    It runs in another thread: an interrupted call to the JVM would leave a session that is only
    half there, and outside of the main thread Spark does not replace the handler of Ctrl-C.
    """
    started: Future[SparkSession] = Future()

    def run() -> None:
        try:
            started.set_result(build())
        except BaseException as error:
            started.set_exception(error)

    thread = threading.Thread(target=run, name="spark-start", daemon=True)
    thread.start()
    try:
        return started.result()
    except KeyboardInterrupt:
        _give_up(thread, started)
        raise


def _give_up(thread: threading.Thread, started: Future[SparkSession]) -> None:
    """End the JVM. Left alone, it would print a stack trace when it finds its driver gone."""
    for _ in range(round(_PATIENCE_S / _POLL_S)):
        if (jvm := _jvm_of(thread)) is not None:
            jvm.kill()
        if wait((started,), _POLL_S).done:
            break
    if started.done() and started.exception() is None:
        shut_down(started.result())


def _jvm_of(thread: threading.Thread) -> Popen[bytes] | None:
    if SparkContext._gateway is not None:
        return SparkContext._gateway.proc  # type: ignore[no-any-return]
    # Until the JVM answers, only the function that waits for it knows its process.
    frame: Any = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not launch_gateway.__code__:
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("proc")
    return found if isinstance(found, Popen) else None
