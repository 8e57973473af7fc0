"""How the columns of a frame become messages: checked in the driver, before any task starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
)

from contrail_spark.errors import SchemaError
from contrail_spark.options import WriteOptions

_TEXTS: Final = ArrayType(StringType())
_TYPES: Final[Mapping[str, tuple[DataType, ...]]] = {
    "subject": (StringType(),),
    "data": (BinaryType(), StringType()),
    "headers": (MapType(StringType(), _TEXTS), MapType(StringType(), StringType())),
    "msg_id": (StringType(),),
    "stream": (StringType(),),
    "shard": (IntegerType(), LongType()),
    "seq": (LongType(), IntegerType()),
    "time": (),
}
"""The columns of a written frame and their types. Any type will do for ``time``, which is left out.
"""


class IdSource(Enum):
    """The origin of the id of each message."""

    COLUMN = "msg_id"
    """The column ``msg_id``."""
    SOURCE = "source"
    """The message from which a row is: ``<stream>:<shard>:<seq>``."""
    ROW = "row"
    """The number of the row: ``<batch>:<partition>:<row>``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The subject and the ids of the messages of a frame.

    ``subject`` is that of all messages, and ``source_stream`` the name of the stream in all ids; if
    they are None, the columns ``subject`` and ``stream`` have them.
    """

    ids: IdSource
    subject: str | None
    source_stream: str | None


def parse_layout(schema: StructType, options: WriteOptions) -> Layout:
    """Check the columns of a frame; SchemaError names the one that is wrong or missing."""
    names = schema.fieldNames()
    if len(set(names)) < len(names):
        raise SchemaError(f"the frame has a column twice: {', '.join(names)}")
    for field in schema.fields:
        types = _TYPES.get(field.name)
        if types is None:
            raise SchemaError(
                f"a message has no column {field.name}, only {', '.join(_TYPES)}; rename or drop it"
            )
        if types and not any(_same(field.dataType, one) for one in types):
            known = " or ".join(one.simpleString() for one in types)
            raise SchemaError(
                f"column {field.name} has type {field.dataType.simpleString()}, but must have "
                f"{known}; cast it"
            )
    if "data" not in names:
        raise SchemaError("the frame has no column data, which has the payload of each message")
    if options.subject is None and "subject" not in names:
        raise SchemaError("the frame has no column subject; add it, or use the option subject")
    if options.subject is not None and "subject" in names:
        raise SchemaError("the frame has a column subject; drop it, or the option subject")
    return Layout(_id_source(names, options), options.subject, options.source_stream)


def _same(given: DataType, known: DataType) -> bool:
    """Whether the types are equal, whatever may be null in maps and arrays."""
    return given.simpleString() == known.simpleString()


def _id_source(names: list[str], options: WriteOptions) -> IdSource:
    if options.source_stream is not None and "stream" in names:
        raise SchemaError("the frame has a column stream; drop it, or the option sourceStream")
    named = options.source_stream is not None or "stream" in names
    if "msg_id" in names:
        return IdSource.COLUMN
    if "shard" in names and "seq" in names and named:
        return IdSource.SOURCE
    if named:
        raise SchemaError(
            "the source stream is known, but not the message: the frame needs the columns shard "
            "and seq"
        )
    if "seq" in names:
        raise SchemaError(
            "the frame has a column seq, but not the name of its stream: use the option "
            "sourceStream, so that each message gets the id <stream>:<shard>:<seq>, or drop the "
            "column"
        )
    return IdSource.ROW
