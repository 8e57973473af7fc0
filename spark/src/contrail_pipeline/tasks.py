"""Many tasks on the workers of Spark, with the progress of the whole."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import uuid4

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_POLL_S: Final = 0.2


def run_tasks(
    spark: "SparkSession",
    tasks: Sequence[T],
    work: Callable[[T], R],
    finished: Callable[[int], None],
) -> list[R]:
    """Run ``work`` on each of ``tasks`` in Spark's workers, and return the results in their order.

    ``work`` is a function of a module, and may be called more than once for a task, because Spark
    repeats tasks that fail. ``finished`` gets the number of finished tasks now and then. A task
    that fails for good ends the job with its error.
    """
    context = spark.sparkContext

    def collect() -> list[R]:
        return context.parallelize(tasks, max(1, len(tasks))).map(work).collect()

    return watched(spark, collect, finished)


def watched(spark: "SparkSession", action: Callable[[], R], finished: Callable[[int], None]) -> R:
    """Run an action on Spark; ``finished`` gets the number of its finished tasks now and then."""
    context = spark.sparkContext
    group = f"contrail-{uuid4()}"

    def run() -> R:
        context.setJobGroup(group, "contrail pipeline", interruptOnCancel=True)
        return action()

    with ThreadPoolExecutor(1, "spark-job") as thread:
        result = thread.submit(run)
        try:
            while True:
                try:
                    found = result.result(_POLL_S)
                except TimeoutError:
                    finished(_finished(context, group))
                else:
                    finished(_finished(context, group))
                    return found
        except BaseException:
            context.cancelJobGroup(group)
            raise


def _finished(context: "SparkContext", group: str) -> int:
    status = context.statusTracker()
    jobs = (status.getJobInfo(job) for job in status.getJobIdsForGroup(group))
    stages = (status.getStageInfo(stage) for job in jobs if job for stage in job.stageIds)
    return sum(stage.numCompletedTasks for stage in stages if stage)
