"""What Spark, the data source and lakes report, as sentences for the user."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from contrail_client.cli.ending import Failed, Misuse
from contrail_pipeline.bounds import in_flags
from contrail_spark import errors

_OWN: Final = "|".join(
    sorted(
        name
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.ContrailSparkError)
    )
)
_OWN_ERROR: Final = re.compile(rf"\b({_OWN}): (.+)")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] (.+?)(?=\[[A-Z][A-Z0-9_.]+\] |\n|$)")
_WRAPPERS: Final = {"STREAM_FAILED", "PYTHON_DATA_SOURCE_ERROR", "FAILED_EXECUTE_UDF"}
_JVM_ERROR: Final = re.compile(r"^: [\w.$]+: (.+)$", re.MULTILINE)
_ERROR: Final = re.compile(r"^\w[\w.]*(?:Error|Exception): .+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why Spark failed: ``error`` is the error of the data source, if it was one.

    ``conditions`` are Spark's own names of what was wrong, the last one closest to the cause.
    """

    sentence: str
    error: str | None = None
    conditions: tuple[str, ...] = ()


def reason_of(text: str) -> Reason:
    """The one sentence that says why, of all that Spark says about a failure."""
    if own := _OWN_ERROR.findall(text):
        error, sentence = own[-1]
        return Reason(_whole(sentence), error)
    conditions = [one for one in _CONDITION.findall(text) if one[0] not in _WRAPPERS]
    if conditions:
        return Reason(_whole(conditions[-1][1]), None, tuple(name for name, _ in conditions))
    lines = _JVM_ERROR.findall(text)[:1] or _ERROR.findall(text)[-1:] or text.strip().splitlines()
    return Reason(_whole(lines[0]) if lines else "Spark gave no reason")


def _whole(sentence: str) -> str:
    return sentence.split(" SQLSTATE:", maxsplit=1)[0].strip().rstrip(".;")


def unwritable(root: str, error: Exception) -> str:
    """Why a file cannot be written to the lake in ``root``; Arrow says it in many words."""
    why = str(error)
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        why = f"{where}{os.strerror(error.errno)}"
    return f"cannot write to the lake in {root}: {why}"


def ending(error: Exception) -> Failed | Misuse:
    """How a job ends that Spark has failed: Misuse if the data source refuses an option."""
    reason = reason_of(str(error))
    if reason.error == errors.OptionError.__name__:
        return Misuse(in_flags(reason.sentence))
    return Failed(reason.sentence)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raise Misuse for a wrong option, and Failed for other errors of the data source."""
    try:
        yield
    except errors.OptionError as error:
        raise Misuse(in_flags(str(error))) from error
    except errors.ContrailSparkError as error:
        raise Failed(str(error)) from error
