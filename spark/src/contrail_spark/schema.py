"""The columns of a stream: Spark types, Arrow types on the wire, and projections of them."""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from contrail_spark.errors import ProtocolError, SchemaError


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``arrow`` is its type in a replay with ``schema=spark``."""

    spark: DataType
    arrow: pa.DataType
    nullable: bool = False


HEADERS: Final = "headers"

COLUMNS: Final[dict[str, Column]] = {
    "shard": Column(IntegerType(), pa.int32()),
    "seq": Column(LongType(), pa.int64()),
    "time": Column(TimestampType(), pa.timestamp("us", tz="UTC")),
    "subject": Column(StringType(), pa.string()),
    HEADERS: Column(
        MapType(StringType(), ArrayType(StringType())),
        pa.map_(pa.string(), pa.list_(pa.string())),
        nullable=True,
    ),
    "data": Column(BinaryType(), pa.binary(), nullable=True),
}
"""All columns, in their default order."""


def spark_schema(columns: tuple[str, ...] | None = None) -> StructType:
    """The Spark schema of ``columns``, or of all of them; SchemaError for an unknown one."""
    return StructType(
        [
            StructField(name, _known(name).spark, _known(name).nullable)
            for name in columns or COLUMNS
        ]
    )


def checked_projection(schema: StructType, columns: tuple[str, ...] | None) -> StructType:
    """Check that a user's ``.schema(...)`` selects known columns with their types; return it.

    ``columns`` is the option of that name: if both are given, they must name the same columns.
    Raises SchemaError, which names the wrong column.
    """
    names = schema.fieldNames()
    if not names:
        raise SchemaError(f"the schema selects no column; available are: {', '.join(COLUMNS)}")
    if len(set(names)) < len(names):
        raise SchemaError(f"the schema names a column twice: {', '.join(names)}")
    for field in schema.fields:
        own = _known(field.name).spark
        if field.dataType != own:
            raise SchemaError(
                f"column {field.name} has type {own.simpleString()}, not "
                f"{field.dataType.simpleString()}; select it unchanged and cast it in the "
                "query"
            )
    if columns is not None and set(columns) != set(names):
        raise SchemaError(
            f"option columns ({', '.join(columns)}) and the schema ({', '.join(names)}) "
            "name different columns; give one of them"
        )
    return schema


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema with which Spark compares record batches: names, order, types, nullability."""
    return pa.schema(
        [pa.field(field.name, COLUMNS[field.name].arrow, field.nullable) for field in schema.fields]
    )


def check_wire(schema: pa.Schema, columns: tuple[str, ...]) -> None:
    """Raise ProtocolError unless the server's answer has all ``columns`` with their types."""
    for name in columns:
        position = schema.get_field_index(name)
        if position < 0:
            raise ProtocolError(f"the server's answer has no column {name}: {schema.names}")
        if schema.field(position).type != COLUMNS[name].arrow:
            raise ProtocolError(
                f"the server sent column {name} as {schema.field(position).type}, but "
                f"{COLUMNS[name].arrow} is expected"
            )


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Select the columns of ``schema`` from a batch of a stream or lake, without a copy.

    A message without headers has NULL, whether the batch has NULL or an empty map. Spark compares
    schemas including nullability, which the server need not send the same.
    """
    arrays = [
        _null_if_empty(batch.column(name)) if name == HEADERS else batch.column(name)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _null_if_empty(maps: pa.MapArray) -> pa.MapArray:
    """The same maps, but NULL for each empty one, on which Spark spends less time."""
    # Nothing here goes through NumPy: Arrow would import pandas, which takes a worker a second.
    bounds = maps.offsets
    empty = pc.equal(bounds.slice(0, len(maps)), bounds.slice(1))
    if maps.null_count:
        empty = pc.or_(empty, maps.is_null())
    if empty.true_count == maps.null_count:
        return maps
    # Arrow refuses a mask if the offsets are a slice, so copy them. Keys and items are never cut.
    bounds = pa.concat_arrays([bounds])
    return pa.MapArray.from_arrays(bounds, maps.keys, maps.items, mask=empty)


def _known(name: str) -> Column:
    column = COLUMNS.get(name)
    if column is None:
        raise SchemaError(f"unknown column {name}; a stream has: {', '.join(COLUMNS)}")
    return column
