"""Fixtures of the Spark tests: a replay server on loopback, the flights, one Spark session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_flights.dataset import Dataset, load_dataset
from contrail_spark.session import JavaNotFoundError, local_session
from tests.spark.replay_server import ReplayServer
from tests.support.servers import ServerProcess

STARTED = str(Path(__file__).with_name("started"))
"""What makes each Python process of Spark start sooner, as an entry of PYTHONPATH."""


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    """Stream FLIGHTS with 100 messages in one shard, in record batches of 10."""
    server = ReplayServer(rows_per_shard=100)
    yield server
    server.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A whole server."""
    with ServerProcess(tmp_path_factory.mktemp("server") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """The whole year of flights, as the package holds it."""
    return load_dataset()


@pytest.fixture(scope="session", autouse=True)
def python_of_spark() -> Iterator[None]:
    """Sessions and jobs of this process import PySpark as ``started/sitecustomize.py`` says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", STARTED, prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def spark(
    python_of_spark: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """One ``local[2]`` session with the quick profile, shared by all tests."""
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    try:
        session = local_session("tests", settings={"spark.sql.warehouse.dir": warehouse})
    except JavaNotFoundError as error:
        pytest.skip(str(error))
    yield session
    session.stop()
