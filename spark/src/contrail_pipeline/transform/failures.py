"""Whether another attempt may help after Spark has failed. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from pyspark.errors import AnalysisException

from contrail_pipeline.failures import reason_of
from contrail_spark import errors

_PASSING: Final = {errors.UnavailableError.__name__, errors.ProtocolError.__name__}
_SQLSTATE: Final = re.compile(r"SQLSTATE: (\w{2})\w{3}")
_USERS_FAULTS: Final = {"0A", "21", "22", "23", "42", "P0"}
"""Classes of SQLSTATE for which the query or its data are to blame: unsupported features,
cardinality, data, constraints, syntax or access rules, and errors that the query raises."""
_ADVICE: Final = {
    ', or go on without what is lost: .option("failOnDataLoss", "false")': "",
    'use .option("failOnDataLoss", "false")': "use another --checkpoint",
    "a new checkpointLocation": "another --checkpoint",
}
"""What the data source advises its users, and what the users of the command can do."""
_OUTPUT_MODE: Final = "STREAMING_OUTPUT_MODE"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. If it is ``passing``, another one may succeed."""

    sentence: str
    passing: bool


def failure_of(error: BaseException) -> Failure:
    """Why a query has failed, by what an exception of Spark says."""
    text = str(error)
    found = reason_of(text)
    if found.error is not None:
        sentence = found.sentence
        for advice, instead in _ADVICE.items():
            sentence = sentence.replace(advice, instead)
        return Failure(sentence, found.error in _PASSING)
    if any(name.startswith(_OUTPUT_MODE) for name in found.conditions):
        return Failure(
            f"{found.sentence}. A message cannot be changed later: an aggregation needs a window "
            "of time and a watermark",
            passing=False,
        )
    # Spark's checks of streaming queries have no SQLSTATE.
    analysed = isinstance(error, AnalysisException)
    states = set(_SQLSTATE.findall(text))
    return Failure(found.sentence, passing=not (analysed or states & _USERS_FAULTS))
