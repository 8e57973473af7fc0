"""Answers to callers when the disk fails a read, or does not finish a write.

A disk that hangs reports no error, so a caller would wait for the log for as long as it hangs.
After ``publish_timeout`` the caller gets an unknown outcome. The accepted request is not withdrawn:
it is stored or carried out when the disk continues.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import msgspec
import structlog

from contrail_common import errors
from contrail_common.errors import ApiError, from_code
from contrail_common.timeunits import NS_PER_S, format_duration
from contrail_link.contract.publish import PublishAck, PublishOutcome
from contrail_storage.replica.entries import Outcome
from contrail_storage.store.rocks_store import StoreFailedError

P = ParamSpec("P")
T = TypeVar("T")
Done = Callable[[PublishOutcome], None]
_AS_A_WHOLE: Final = frozenset((errors.OUTCOME_UNKNOWN.code, errors.NOT_LEADER.code))
"""If every message of a request has the same of these outcomes, the request has it."""
_code_of: Final = attrgetter("code")
_log: Final = structlog.get_logger("contrail.answers")


class Answer(msgspec.Struct, eq=False):
    """The answer to one publish. The caller gets the first outcome; a later one is dropped."""

    done: Done | None
    """Called with the outcome; None once the caller has one."""
    stream: str
    """Name of the stream."""
    durability: str
    """The guarantee of its acks."""
    open_answers: "dict[Answer, None]"
    """Those of the `AnswerDeadline`."""
    due_s: float = 0.0
    """When the caller gets an unknown outcome (loop time)."""

    def __repr__(self) -> str:
        """Without all other open answers, which logged errors would show as well."""
        return f"Answer(stream={self.stream!r}, due_s={self.due_s})"

    def __call__(self, outcome: Outcome) -> None:
        """Pass an outcome to the caller: see `contrail_storage.replica.entries.Done`."""
        done, self.done = self.done, None
        if done is None:
            return
        self.open_answers.pop(self, None)
        if isinstance(outcome, ApiError):
            done(outcome)
        elif outcome and outcome[0].code in _AS_A_WHOLE and len(set(map(_code_of, outcome))) == 1:
            # It fails as one, so that clients, and routers to other nodes, send it again as one.
            done(from_code(outcome[0].code, outcome[0].detail))
        else:
            done(PublishAck(self.stream, outcome, self.durability))


class AnswerDeadline:
    """Ends waits for the log after ``timeout_s``; used on one event loop."""

    def __init__(self, timeout_s: float, progress: Callable[[], Hashable]) -> None:
        """``progress`` changes whenever the log applies anything."""
        self._timeout_s = timeout_s
        self._progress = progress
        self.open_answers: dict[Answer, None] = {}
        """Publishes without an outcome, in the order in which they become overdue."""
        # Due when the first of `_waiting` is overdue, or earlier; None while none waits.
        self._timer: asyncio.TimerHandle | None = None
        self._going_on: set[asyncio.Task[Any]] = set()
        """Changes whose caller has left. Without a reference, their tasks could be collected."""

    @property
    def waiting(self) -> int:
        """Publishes without an outcome, and changes that continue without a caller."""
        return len(self.open_answers) + len(self._going_on)

    def limit(self, answer: Answer) -> None:
        """Give ``answer`` an unknown outcome unless it gets another one in time."""
        loop = asyncio.get_running_loop()
        answer.due_s = loop.time() + self._timeout_s
        self.open_answers[answer] = None
        if self._timer is None:
            self._timer = loop.call_at(answer.due_s, self._overdue)

    def _overdue(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for one in list(self.open_answers):
            # In the order of their deadlines: all later ones are not due either.
            if one.due_s > now_s:
                self._timer = loop.call_at(one.due_s, self._overdue)
                return
            one(self._unknown())

    def _unknown(self) -> ApiError:
        waited = format_duration(round(self._timeout_s * NS_PER_S))
        return ApiError(
            errors.OUTCOME_UNKNOWN,
            f"the disk has not confirmed the write within {waited}; it may still be stored",
        )

    async def change(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; OUTCOME_UNKNOWN if the log stops for the timeout.

        A change of many steps takes as long as it needs while the log makes progress.
        """
        task = asyncio.ensure_future(work)
        try:
            seen: Hashable = None
            # Every timeout, look whether the log has moved since the last look. Only a log that
            # stands still ends the wait.
            while seen != (seen := self._progress()):
                await asyncio.wait([task], timeout=self._timeout_s)
                if task.done():
                    return task.result()
        except asyncio.CancelledError:
            task.cancel()
            raise
        # Not cancelled: its commands may be in the log, and the steps after them must follow.
        self._going_on.add(task)
        task.add_done_callback(self._ended)
        raise self._unknown()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._going_on.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("late_change_failed", error=str(task.exception()))

    async def wait(self, work: Awaitable[T], wait_ns: int = 0) -> T:
        """Return the result of work that changes nothing but may wait for the log.

        Raises STORAGE_FAILED after the timeout plus ``wait_ns``, which the caller allows.
        """
        try:
            async with asyncio.timeout(self._timeout_s + wait_ns / NS_PER_S):
                return await work
        except TimeoutError as error:
            detail = "the disk has not confirmed a record that must be written first"
            raise ApiError(errors.STORAGE_FAILED, detail, retry_after_s=1) from error


class Searching(Protocol):
    """An object with methods that look something up."""

    async def confirm_absent(self, error: ApiError) -> None:
        """Raise NOT_LEADER if another node may have what this one does not find: ``error``."""


class Answering(Searching, Protocol):
    """An object with methods that change something."""

    @property
    def deadline(self) -> AnswerDeadline:
        """The time limit of their callers."""
        ...


S = TypeVar("S", bound=Searching)
A = TypeVar("A", bound=Answering)


def reads(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a failed read in ``method`` a STORAGE_READ_FAILED for the caller.

    That something is not there is only an answer once it is confirmed: see `Searching`.
    """

    @wraps(method)
    async def answered(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(self, *args, **kwargs)
        except StoreFailedError as error:
            raise read_failed(error) from error
        except ApiError as error:
            await self.confirm_absent(error)
            raise

    return answered


def changes(
    method: Callable[Concatenate[A, P], Awaitable[T]],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """As :func:`reads`, for methods that change something: see :meth:`AnswerDeadline.change`."""
    answered = reads(method)

    @wraps(method)
    async def in_time(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.deadline.change(answered(self, *args, **kwargs))

    return in_time


def read_failed(error: StoreFailedError) -> ApiError:
    """Return the caller's error for a failed read; the log names the file."""
    _log.warning("read_failed", error=str(error))
    reason = str(error).rpartition(": ")[2]
    return ApiError(errors.STORAGE_READ_FAILED, f"the disk failed to read: {reason}")


def removed_too_quickly() -> ApiError:
    """Return the caller's error for a read whose blocks were replaced or removed each time."""
    return ApiError(
        errors.OVERLOADED,
        "messages in the range are being removed too quickly to read it",
        retry_after_s=1,
    )
