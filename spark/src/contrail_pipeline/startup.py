"""Starts Spark so that Ctrl-C ends it quietly, at any moment."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from pyspark import SparkContext
from pyspark.sql import SparkSession


def start(build: Callable[[], SparkSession]) -> SparkSession:
    """The session that ``build`` starts.

    It runs in another thread: an interrupted call to the JVM would leave a session that is only
    half there, and outside of the main thread Spark does not replace the handler of Ctrl-C.
    """
    started: Future[SparkSession] = Future()

    def run() -> None:
        if not started.set_running_or_notify_cancel():
            return
        try:
            started.set_result(build())
        except BaseException as error:
            started.set_exception(error)

    try:
        # The thread can be under way before this returns, so it may be interrupted in here as well.
        threading.Thread(target=run, name="spark-start", daemon=True).start()
        session = started.result()
    except KeyboardInterrupt:
        if not started.cancel():
            _give_up(started)
        raise
    # A session is active in the thread that built it, and only there does Spark find data sources
    # in Python when it starts a streaming query.
    SparkSession._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)
    return session


def _give_up(started: Future[SparkSession]) -> None:
    """End the JVM. Left alone, it would print a stack trace when it finds its driver gone."""
    # Its process is only known when it answers, a second after its start.
    while not started.done() and SparkContext._gateway is None:
        wait((started,), 0.05)
    gateway = SparkContext._gateway
    if gateway is not None and gateway.proc is not None:  # otherwise, spark-submit ends it
        gateway.proc.kill()
        wait((started,))
