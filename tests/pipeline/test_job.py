"""The reason of a failed job, in one line. No JVM."""

import pytest

from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.failures import ending, reason_of

OWN = "contrail_spark.errors.ServerRefusedError: read stream S: 404 stream_not_found"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"An exception was thrown from the Python worker:\n{OWN}\n",
            "read stream S: 404 stream_not_found",
        ),
        (
            "[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: "
            f"{OWN}\n SQLSTATE: 38000",
            "read stream S: 404 stream_not_found",
        ),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "job.py", line 7, in boom\n    raise ValueError("bad")\nValueError: bad\nmore',
            "ValueError: bad",
        ),
        (
            "[UNRESOLVED_COLUMN] There is no column x.\n  at line 1",
            "There is no column x",
        ),
        (
            "[STREAM_FAILED] Query [id = 3a7] terminated with exception: Task failed\nTraceback "
            '(most recent call last):\n  File "job.py", line 7, in boom\nValueError: bad\n',
            "ValueError: bad",
        ),
        (
            "Traceback (most recent call last):\ncontrail_spark.errors.UnavailableError: x: reset\n"
            "\nDuring handling of the above exception, another exception occurred:\n\n"
            "contrail_spark.errors.LakeError: the lake in x is damaged\n",
            "the lake in x is damaged",
        ),
        (
            "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collect.\n"
            ": org.apache.spark.SparkException: Job aborted: Python worker exited unexpectedly\n"
            "\tat org.apache.spark.api.python.PythonRunner.read(PythonRunner.scala:1647)\n",
            "Job aborted: Python worker exited unexpectedly",
        ),
        ("", "Spark gave no reason"),
    ],
)
def test_one_line_says_why_a_job_failed(text: str, said: str) -> None:
    assert reason_of(text).sentence == said


def test_an_option_that_the_data_source_refuses_is_a_mistake_of_the_user() -> None:
    refused = "contrail_spark.errors.OptionError: option startingSequence: 3 shards are read"
    found = ending(RuntimeError(f"[PYTHON_DATA_SOURCE_ERROR] Failed: {refused}\n SQLSTATE: 38000"))
    assert (type(found), str(found)) == (Misuse, "--from-seq: 3 shards are read")
    assert type(ending(RuntimeError(f"Failed: {OWN}"))) is Failed
