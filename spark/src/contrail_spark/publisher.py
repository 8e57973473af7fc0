"""Publishes the requests of one numbered batch, and checks what became of each message."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from contrail_spark.bodies import Body, Rows
from contrail_spark.errors import ProtocolError, ServerRefusedError
from contrail_spark.options import WriteOptions
from contrail_spark.transport import RETRYABLE, InterruptionError, KeptConnection, Retries

MSGPACK: Final = "application/vnd.msgpack"
FORGOTTEN: Final = "number_forgotten"


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch of a producer: the server stores none of its messages twice.

    ``title`` names it in errors, and ``forgotten`` says what to do if the server no longer knows
    which of its messages it has. With ``repeats`` the producer may begin again with batches that
    are complete.
    """

    producer: str
    number: int
    title: str
    forgotten: str
    repeats: bool = False


class _Problem(msgspec.Struct):
    status: int
    name: str
    code: int
    detail: str = ""
    retryable: bool = False


class _Run(msgspec.Struct):
    """The outcome of ``count`` consecutive messages."""

    count: int
    first_seq: int = 0
    duplicate: bool = False
    problem: _Problem | None = None


class _Runs(msgspec.Struct):
    runs: list[_Run]


_decoder: Final = msgspec.msgpack.Decoder(_Runs)


class Publisher:
    """Publishes messages of ``batch`` over one connection, one request after another.

    The messages of a request are stored before the next one is sent, so they keep their order.
    """

    def __init__(
        self,
        options: WriteOptions,
        batch: NumberedBatch,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._batch = batch
        self._sleep = sleep
        self._connection = KeptConnection(options)
        self._what = f"write {batch.title} to stream {options.stream}"
        query = urlencode({"producer": batch.producer, "number": batch.number})
        self._target = f"/v1/streams/{quote(options.stream, safe='')}/messages?{query}"

    def publish(self, body: Body, rows: Rows) -> int:
        """Publish the messages of a body, and return how many of them were duplicates.

        ``rows`` has their rows, for errors. A request whose outcome is unknown is
        repeated: the ids of its messages make that safe. Raises OptionError if the token file
        cannot be read, ServerRefusedError for a refusal of the request or of a message,
        UnavailableError after the last retry, and ProtocolError for an invalid answer.
        """
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                return self._duplicates(self._attempt(body.packed), body, rows)
            except InterruptionError as interruption:
                retries.pause_after(interruption)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _attempt(self, body: bytes) -> list[_Run]:
        try:
            answer = self._connection.post(self._target, body, MSGPACK, self._what)
        except ServerRefusedError as refused:
            if refused.name == FORGOTTEN:
                raise self._forgotten(refused.status) from refused
            raise
        try:
            return _decoder.decode(answer).runs
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._what}: the answer cannot be read: {error}") from error

    def _duplicates(self, runs: list[_Run], body: Body, rows: Rows) -> int:
        results = sum(run.count for run in runs)
        if results != body.rows:
            raise ProtocolError(f"{self._what}: {results} results for {body.rows} messages")
        duplicates, at = 0, body.start
        again: InterruptionError | None = None
        for run in runs:
            if run.problem is not None:
                again = self._interruption(run.problem, rows.name(at))
            elif run.duplicate:
                self._check_number(run)
                duplicates += run.count
            at += run.count
        if again is not None:
            raise again
        return duplicates

    def _interruption(self, problem: _Problem, name: str) -> InterruptionError:
        """The reason to repeat a request; ServerRefusedError if that would not help."""
        if problem.name == FORGOTTEN:
            raise self._forgotten(problem.status)
        text = f"{self._what}: {name}: {problem.code} {problem.name}: {problem.detail}"
        if problem.status in RETRYABLE and problem.retryable:
            return InterruptionError(text, name=problem.name)
        raise ServerRefusedError(text, problem.status, problem.name)

    def _check_number(self, run: _Run) -> None:
        # The server does not look at the ids of earlier batches, so these messages may be new.
        if run.first_seq == 0 and not self._batch.repeats:
            raise ServerRefusedError(
                f"{self._what}: the stream has a later batch already. The checkpoint is older "
                "than the last run of the query: start it from its newest checkpoint, or from a "
                "new one",
                409,
                "earlier_batch",
            )

    def _forgotten(self, status: int) -> ServerRefusedError:
        text = (
            f"{self._what}: the stream no longer knows which messages of it are stored, because "
            f"too many others were stored since it began. {self._batch.forgotten}"
        )
        return ServerRefusedError(text, status, FORGOTTEN)
