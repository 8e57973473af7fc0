"""How a command ends: its exit status, and one line on stderr that says what went wrong.

Status: 0 done, 1 failed or refused, 2 misused, 3 not found, 130 interrupted.
"""

import contextlib
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import msgspec

from contrail_client.cli import show
from contrail_client.cli.settings import did_you_mean
from contrail_client.configs import ConsumerConfig, StreamConfig
from contrail_client.errors import ApiProblem, ContrailError, FieldError, NotFound, Unreachable

DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
NOT_FOUND: Final = 3
INTERRUPTED: Final = 130

_FIELDS: Final = frozenset(StreamConfig.__annotations__) | frozenset(ConsumerConfig.__annotations__)
_UNKNOWN_FIELD: Final = "unknown field"
"""What the server says of a field that does not exist."""
_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Misuse(Exception):
    """The command line is not valid or not complete; nothing was done. Status 2."""


class Failed(Exception):
    """The command failed for a reason other than the server's answer or a missing answer."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong: with `--json` it is printed as it is, otherwise as one line.

    `error` is the name of the server's error, or a kind of ours: `misused`, `unreachable`,
    `outcome_unknown`, `failed` and so on, after the classes in `contrail_client.errors`.
    """

    error: str
    message: str
    exit_status: int
    status: int = 0
    code: int = 0
    errors: tuple[FieldError, ...] = ()
    hint: str = ""
    request_id: str = ""

    def line(self) -> str:
        """All of it on one line."""
        rest = (each for each in self.errors if each.message not in self.message)
        fields = _listed(rest)
        text = f"{self.message} ({fields})" if fields else self.message
        if self.hint:
            text += f"{'' if text.endswith(('?', '.')) else '.'} {self.hint}"
        return " ".join(text.split())


def carry_out(command: Callable[[], int | None], *, as_json: bool) -> int:
    """Run a command and return its exit status; an exception becomes a line on stderr."""
    try:
        status = command() or DONE
        sys.stdout.flush()  # here: while Python ends, a failure could not be reported any more
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:  # of Typer and Rich, which do so when a pipe breaks
        _discard_output()
        return ended.code if isinstance(ended.code, int) else FAILED
    except BrokenPipeError:
        _discard_output()  # the reader has closed the pipe, as `| head` does: not worth a message
        return FAILED
    except Exception as error:
        # Writing to stdout has failed. Python would try again when it ends, and print a traceback.
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined] # Typer's: its message is the help
            return MISUSED
        failure = failure_of(error)
        report(failure, as_json=as_json)
        return failure.exit_status
    return status


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """End the command when its output is closed, even while it has nothing to write.

    Otherwise `contrail sub S | head -1` would run, and hold messages, until the next one came.
    """
    try:
        output = sys.stdout.fileno()
    except OSError:  # output that is kept in memory, as in tests
        yield
        return
    before = signal.signal(signal.SIGPIPE, _end_quietly)
    stopped, stop = os.pipe()
    watching = threading.Thread(target=_watch, args=(output, stopped), daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(stop)
        watching.join()
        os.close(stopped)
        signal.signal(signal.SIGPIPE, before)


def _watch(output: int, stopped: int) -> None:
    """Interrupt the main thread when `output` loses its reader; return if `stopped` is closed."""
    poll = select.poll()
    for each in (output, stopped):
        poll.register(each, 0)  # poll always reports a hang-up
    gone = {number for number, _ in poll.poll()}
    if stopped not in gone:
        # Only a real signal wakes a thread that waits for a lock or a socket.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPIPE)


def _end_quietly(*_: object) -> NoReturn:
    raise SystemExit(FAILED)  # the client would take an OSError for a lost connection


def report(failure: Failure, *, as_json: bool) -> None:
    """Print what went wrong: a line, or a JSON object on a line."""
    with contextlib.suppress(OSError):  # there is nowhere left to say it
        if as_json:
            show.failure(msgspec.json.encode(failure).decode())
        else:
            show.failure(f"contrail: {failure.line()}")


def failure_of(error: Exception) -> Failure:
    """Convert an exception into a failure that the user understands."""
    match error:
        case ApiProblem():
            fields = tuple(map(_with_suggestion, error.errors))
            return Failure(
                error=error.name or "error",
                message=f"{_detail(error, fields)} ({error.status})",
                exit_status=NOT_FOUND if isinstance(error, NotFound) else FAILED,
                status=error.status,
                code=error.code,
                errors=fields,
                hint=_hint(error),
                request_id=error.request_id,
            )
        case ContrailError():
            return Failure(
                error=_kind(error), message=str(error), exit_status=FAILED, hint=_hint(error)
            )
        case Misuse() | ValueError():
            return Failure(error="misused", message=str(error), exit_status=MISUSED)
        case OSError():
            where = error.filename or "standard output"
            reason = error.strerror or str(error)
            return Failure(error="failed", message=f"{where}: {reason}", exit_status=FAILED)
        case Failed():
            return Failure(error="failed", message=str(error), exit_status=FAILED)
    if hasattr(error, "format_message"):  # a usage error of Typer
        return _usage(error)
    if type(error).__name__ == "Abort":
        return Failure(error="aborted", message="nothing was changed", exit_status=FAILED)
    return _bug(error)


def _detail(error: ApiProblem, fields: tuple[FieldError, ...]) -> str:
    """The problem's detail; if it is only about the first field, all fields with suggestions."""
    repeated = fields and error.errors[0].message in error.detail
    return _listed(fields) if repeated else error.detail or error.name


def _listed(fields: Iterable[FieldError]) -> str:
    return "; ".join(_sentence(each.pointer.lstrip("/"), each.message) for each in fields)


def _sentence(field: str, message: str) -> str:
    """The difference of a configuration continues the field's name: "max_msgs is -1, not 2"."""
    return f"{field} {message}" if message.startswith("is ") else f"{field}: {message}"


def _with_suggestion(field: FieldError) -> FieldError:
    name = field.pointer.rpartition("/")[2]
    if name in _FIELDS or _UNKNOWN_FIELD not in field.message:
        return field
    return FieldError(field.pointer, field.message + did_you_mean(name, _FIELDS))


def _hint(error: ContrailError) -> str:
    notes = getattr(error, "__notes__", ())
    if notes:
        return str(notes[-1])
    if isinstance(error, Unreachable):
        return "Is a server running there? Start one with `contrail serve`."
    return ""


def _kind(error: Exception) -> str:
    return _CAPITAL.sub("_", type(error).__name__).lower()


def _usage(error: Any) -> Failure:
    context = getattr(error, "ctx", None)
    hint = f"See `{context.command_path} --help`." if context is not None else ""
    message = str(error.format_message()).rstrip(".")
    return Failure(error="misused", message=message, exit_status=error.exit_code, hint=hint)


def _bug(error: Exception) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    message = f"unexpected {type(error).__name__}{where}: {error}"
    return Failure(error="bug", message=message, exit_status=FAILED)


def _discard_output() -> None:
    """Drop buffered output: writing it would only fail again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
