"""Why Spark failed, in a sentence, and whether another attempt may help. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from contrail_spark import errors

_PASSING: Final = {errors.UnavailableError.__name__, errors.ProtocolError.__name__}
_OWN: Final = {
    name
    for name, one in vars(errors).items()
    if isinstance(one, type) and issubclass(one, errors.ContrailSparkError)
}
_NAMED: Final = re.compile(rf"\b({'|'.join(sorted(_OWN))}): ([^\n]+)")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] (.+?)(?=\[[A-Z][A-Z0-9_.]+\] |\n|$)")
_JVM_ERROR: Final = re.compile(r"^: [\w.$]+: (.+)$", re.MULTILINE)
_SQLSTATE: Final = re.compile(r"SQLSTATE: (\w{2})\w{3}")
_USERS_FAULTS: Final = {"0A", "21", "22", "23", "42", "P0"}
"""Classes of SQLSTATE for which the query or its data are to blame: unsupported features,
cardinality, data, constraints, syntax or access rules, and errors that the query raises."""
_WRAPPERS: Final = {"STREAM_FAILED", "PYTHON_DATA_SOURCE_ERROR", "FAILED_EXECUTE_UDF"}
_OUTPUT_MODE: Final = "STREAMING_OUTPUT_MODE"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. If it is ``passing``, another one may succeed."""

    sentence: str
    passing: bool


def failure_of(error: BaseException) -> Failure:
    """What an exception of Spark says: its own words are long, and begin with its own frames."""
    text = str(error)
    if own := _NAMED.search(text):
        return Failure(_whole(own[2]), own[1] in _PASSING)
    states = {found[1] for found in _SQLSTATE.finditer(text)}
    conditions = [one for one in _CONDITION.finditer(text) if one[1] not in _WRAPPERS]
    sentence = _whole(conditions[-1][2] if conditions else _first_line(text))
    if any(one[1].startswith(_OUTPUT_MODE) for one in conditions):
        return Failure(
            f"{sentence}. A message cannot be changed later: an aggregation needs a window of time "
            "and a watermark",
            passing=False,
        )
    return Failure(sentence, passing=not states & _USERS_FAULTS)


def _first_line(text: str) -> str:
    if jvm := _JVM_ERROR.search(text):
        return jvm[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "Spark gave no reason"


def _whole(sentence: str) -> str:
    return sentence.split(" SQLSTATE:", maxsplit=1)[0].strip().rstrip(".;")
