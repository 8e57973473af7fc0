"""Fixtures of the tests of jobs: those of the Spark tests, and a client of the module's server.

A job that runs in the process of a test borrows the session ``spark``, and starts no JVM.
"""

from collections.abc import Iterator

import pytest

from contrail_client import Contrail
from tests.spark.conftest import python_of_spark, running, server, spark
from tests.support.servers import ServerProcess

__all__ = ["client", "python_of_spark", "running", "server", "spark"]


@pytest.fixture(scope="module")
def client(running: ServerProcess) -> Iterator[Contrail]:
    with Contrail(running.url) as client:
        yield client
