"""Fixtures of the tests of jobs: those of the Spark tests."""

from tests.spark.conftest import running, server, spark

__all__ = ["running", "server", "spark"]
