"""Numbered batches: none of their messages is stored twice, however late a producer repeats it."""

from itertools import count, islice
from typing import Annotated

import msgspec

from contrail_api.publishing.candidates import Admitted
from contrail_common.model import Numbered
from contrail_common.names import name_problem
from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field

_Producer = Annotated[
    str, msgspec.Meta(description="Name of a producer that numbers its batches (255 bytes).")
]
_Number = Annotated[
    int,
    msgspec.Meta(
        ge=1,
        le=INT64_MAX,
        description="Number of the producer's batch to which the messages belong. Numbers go up.",
    ),
]


class NumberedQuery(msgspec.Struct):
    """Parameters of a numbered batch: both or neither."""

    producer: _Producer | msgspec.UnsetType = msgspec.UNSET
    number: _Number | msgspec.UnsetType = msgspec.UNSET

    def numbered(self) -> Numbered | None:
        """Return the producer and the number, or None if there are none (INVALID_FIELD)."""
        if self.producer is msgspec.UNSET and self.number is msgspec.UNSET:
            return None
        if self.producer is msgspec.UNSET:
            raise invalid_field("producer", "must be given together with number")
        if self.number is msgspec.UNSET:
            raise invalid_field("number", "must be given together with producer")
        problem = name_problem(self.producer)
        if problem is not None:
            raise invalid_field("producer", problem)
        return Numbered(self.producer, self.number)


def set_number(asked: Admitted, numbered: Numbered | None) -> None:
    """Give the batch its number, if any; each message must have an id then (INVALID_FIELD)."""
    if numbered is None:
        return
    batch = asked.batch
    lengths = [0] * batch.count if batch.ids is None else batch.ids.lengths().tolist()
    if 0 in lengths:
        valid = (at for at in count() if at not in asked.refused)
        at = next(islice(valid, lengths.index(0), None))
        raise invalid_field(f"/messages/{at}", "a message of a numbered batch needs a message id")
    batch.numbered = numbered
