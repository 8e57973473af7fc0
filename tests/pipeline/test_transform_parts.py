"""What a transformation says of failures, keeps beside its checkpoint, and does after a failure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException

from contrail_client.cli.ending import Failed
from contrail_pipeline.transform.checkpoint import FILE, Made, check, note
from contrail_pipeline.transform.failures import failure_of
from contrail_pipeline.transform.supervision import Progress, Supervisor, progress_of
from contrail_spark.stream import GO_ON, NEW_CHECKPOINT
from tests.pipeline.jobs import no_space

MADE = Made(sql="select *\nfrom messages", source="S", target="T")


# Failures ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "sentence", "passing"),
    [
        (
            "[STREAM_FAILED] Query [id = 3a7, runId = 3ed] terminated with exception: "
            "[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n\tat org.apache.spark",
            "Division by zero",
            False,
        ),
        (
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `subjet` cannot be resolved. "
            "Did you mean one of the following? [`subject`, `seq`]. SQLSTATE: 42703; line 1 pos 7;",
            "A column with name `subjet` cannot be resolved. Did you mean one of the following? "
            "[`subject`, `seq`]",
            False,
        ),
        (
            "[STREAM_FAILED] Job aborted: org.apache.spark.SparkException: Task failed\n"
            "UnavailableError: read stream S shard 0 sequences 1..5 at http://x: connection "
            "refused (6 attempts)\n\tat org",
            "read stream S shard 0 sequences 1..5 at http://x: connection refused (6 attempts)",
            True,
        ),
        (
            "Traceback\nDataLossError: stream S shard 0: sequences 1..4 were removed before they "
            "were read\n",
            "stream S shard 0: sequences 1..4 were removed before they were read",
            False,
        ),
        (
            "[STREAM_FAILED] Job aborted: [USER_RAISED_EXCEPTION] '(seq < 3)' is not true! "
            "SQLSTATE: P0001",
            "'(seq < 3)' is not true!",
            False,
        ),
        (
            "An error occurred while calling o32.start.\n: java.io.IOException: Mkdirs failed to "
            "create file:/x/_spark_metadata\n\tat org.apache",
            "Mkdirs failed to create file:/x/_spark_metadata",
            True,
        ),
        (
            f"CheckpointError: stream X was re-created. {NEW_CHECKPOINT}, {GO_ON}\n",
            "stream X was re-created. Use another --checkpoint",
            False,
        ),
        (
            'DataLossError: 1..4 are gone. To read what is left, use .option("failOnDataLoss", '
            '"false")\n',
            "1..4 are gone. To read what is left, use another --checkpoint",
            False,
        ),
        ("ServerRefusedError: batch 0: row 1: refused", "batch 0: row 1: refused", False),
        ("Python worker exited unexpectedly (crashed)\n\tat x",
         "Python worker exited unexpectedly (crashed)", True),
        ("", "Spark gave no reason", True),
        (
            "[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid streaming output mode: append. "
            "SQLSTATE: 42KDE",
            "Invalid streaming output mode: append. A message cannot be changed later: an "
            "aggregation needs a window of time and a watermark",
            False,
        ),
    ],
)  # fmt: skip
def test_failure_is_one_sentence(text: str, sentence: str, passing: bool) -> None:
    found = failure_of(RuntimeError(text))
    assert (found.sentence, found.passing) == (sentence, passing)


def test_what_spark_finds_in_the_query_itself_is_for_good() -> None:
    sorting = "Sorting is not supported on streaming DataFrames/Datasets"
    found = failure_of(AnalysisException(sorting))
    assert (found.sentence, found.passing) == (sorting, False)
    away = "Failed: contrail_spark.errors.UnavailableError: read S: connection refused"
    assert failure_of(AnalysisException(away)).passing


# The checkpoint ----------------------------------------------------------------------------------
def test_new_checkpoint_is_taken_and_known_again(tmp_path: Path) -> None:
    check(tmp_path / "new", MADE, accept=False)
    note(tmp_path / "new", MADE)
    check(tmp_path / "new", MADE, accept=False)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]


def test_changed_sql_is_refused_unless_accepted(tmp_path: Path) -> None:
    note(tmp_path, MADE)
    changed = Made(sql="select *\nfrom messages where seq > 1", source="S", target="T")
    with pytest.raises(Failed, match=r"SQL was changed .* line 2"):
        check(tmp_path, changed, accept=False)
    check(tmp_path, changed, accept=True)
    note(tmp_path, changed)
    check(tmp_path, changed, accept=False)


@pytest.mark.parametrize("accept", [False, True])
def test_other_streams_are_always_refused(tmp_path: Path, accept: bool) -> None:
    note(tmp_path, MADE)
    with pytest.raises(Failed, match="from S to T"):
        check(tmp_path, Made(sql=MADE.sql, source="S", target="U"), accept=accept)


def test_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    with pytest.raises(Failed, match="not made by this job"):
        check(tmp_path, MADE, accept=False)
    check(tmp_path, MADE, accept=True)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with no_space(), pytest.raises(Failed, match=f"checkpoint {tmp_path}: File too large"):
        note(tmp_path, MADE)


def test_damaged_note_and_a_file_instead_of_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"{")
    with pytest.raises(Failed, match="is damaged"):
        check(tmp_path, MADE, accept=True)
    with pytest.raises(Failed, match="is no folder"):
        check(tmp_path / FILE, MADE, accept=True)


# Supervision -------------------------------------------------------------------------------------
def batch(number: int, end: int = 10, newest: int = 25) -> dict[str, Any]:
    offset = '{{"incarnation": "x", "shards": {{"0": {}, "1": 5}}}}'.format
    return {
        "batchId": number,
        "numInputRows": 10,
        "processedRowsPerSecond": 4.5,
        "durationMs": {"addBatch": 3},
        "sources": [{"endOffset": offset(end), "latestOffset": offset(newest)}],
    }


class ScriptedQuery:
    """A query that has done ``batches``, and then ends with ``error``, if there is one."""

    def __init__(self, batches: list[dict[str, Any]], error: Exception | None = None) -> None:
        self.recentProgress = batches
        self.status = {"isTriggerActive": False}
        self.stopped = False
        self.asked: Callable[[], None] = lambda: None
        self._error = error
        self._ends = True

    def running(self, asked: Callable[[], None]) -> "ScriptedQuery":
        self._ends, self.asked = False, asked
        return self

    def awaitTermination(self, timeout: Any = None) -> bool:  # noqa: N802 Spark's name
        self.asked()
        if self._error is not None:
            raise self._error
        return self._ends

    def stop(self) -> None:
        self.stopped = True


class Rig:
    """A supervisor of scripted queries, and what it has said. It pauses by ``waited``."""

    def __init__(self, *queries: ScriptedQuery, retries: int = 3) -> None:
        self.queries = list(queries)
        self.told: list[Progress] = []
        self.pauses: list[float] = []
        self.supervisor = Supervisor(
            start=lambda: self.queries.pop(0),
            told=self.told.append,
            failed=lambda _, pause_s: self.pauses.append(pause_s),
            retries=retries,
        )
        self.supervisor.stopping.wait = lambda timeout=None: False  # type: ignore[method-assign]


PASSING = PySparkException("UnavailableError: connection refused")


def test_lag_is_what_the_stream_has_after_the_batch() -> None:
    found = progress_of(batch(3), "why")
    assert found == Progress(3, 10, 4.5, 15, "why")
    assert found.line() == "batch 3: 10 rows read, 4 rows/s, lag 15 messages, last error: why"
    assert progress_of(batch(3, end=25), None).line().endswith("no lag")


@pytest.mark.parametrize("unknown", [None, "null"])
def test_newest_offset_may_be_unknown_after_a_start(unknown: str | None) -> None:
    found = batch(3)
    found["sources"][0]["latestOffset"] = unknown
    assert progress_of(found, None).lag == 0


def test_errors_of_our_own_are_not_tried_again() -> None:
    rig = Rig(ScriptedQuery([], ValueError("a mistake")))
    with pytest.raises(ValueError, match="a mistake"):
        rig.supervisor.run()
    rig = Rig(ScriptedQuery([], ConnectionRefusedError()))
    with pytest.raises(Failed, match="Spark has ended"):
        rig.supervisor.run()


def test_passing_failures_are_retried_with_growing_pauses() -> None:
    rig = Rig(*(ScriptedQuery([], PASSING) for _ in range(3)), ScriptedQuery([batch(0)]))
    rig.supervisor.run()
    assert rig.pauses == [1, 2, 4]
    assert [one.error for one in rig.told] == ["connection refused"]
    assert (rig.supervisor.rows, rig.supervisor.batches) == (10, 1)


def test_attempts_without_a_batch_are_bounded() -> None:
    rig = Rig(*(ScriptedQuery([], PASSING) for _ in range(4)))
    with pytest.raises(Failed, match=r"connection refused \(after 4 attempts\)"):
        rig.supervisor.run()
    assert rig.queries == []


def test_a_finished_batch_begins_to_count_again() -> None:
    queries = (ScriptedQuery([batch(number)], PASSING) for number in range(9))
    rig = Rig(*queries, ScriptedQuery([]), retries=1)
    rig.supervisor.run()
    assert rig.pauses == [1] * 9


def test_pauses_have_a_longest() -> None:
    rig = Rig(*(ScriptedQuery([], PASSING) for _ in range(8)), ScriptedQuery([]), retries=8)
    rig.supervisor.run()
    assert rig.pauses[-2:] == [60, 60]


def test_failures_for_good_end_at_once() -> None:
    rig = Rig(ScriptedQuery([batch(0)], PySparkException("DataLossError: sequences 1..4 are gone")))
    with pytest.raises(Failed, match=r"sequences 1\.\.4 are gone"):
        rig.supervisor.run()
    assert (rig.pauses, len(rig.told)) == ([], 1)


def test_batch_is_told_once_and_idle_reports_are_not() -> None:
    idle = {**batch(1), "durationMs": {"triggerExecution": 1}}
    rig = Rig(ScriptedQuery([batch(0), batch(0), idle, batch(2)]))
    rig.supervisor.run()
    assert [one.batch for one in rig.told] == [0, 2]


def test_stop_waits_for_the_end_of_the_batch() -> None:
    query = ScriptedQuery([])
    query.status["isTriggerActive"] = True
    rounds: list[bool] = []

    def asked() -> None:
        rounds.append(query.stopped)
        rig.supervisor.stopping.set()
        if len(rounds) == 3:
            query.recentProgress = [batch(0)]

    rig = Rig(query.running(asked))
    rig.supervisor.run()
    assert (rounds, query.stopped) == ([False] * 3, True)
    assert rig.supervisor.batches == 1
