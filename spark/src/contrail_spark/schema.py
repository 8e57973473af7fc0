"""The columns of a stream: Spark types, Arrow types on the wire, and projections of them."""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
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


COLUMNS: Final[dict[str, Column]] = {
    "shard": Column(IntegerType(), pa.int32()),
    "seq": Column(LongType(), pa.int64()),
    "time": Column(TimestampType(), pa.timestamp("us", tz="UTC")),
    "subject": Column(StringType(), pa.string()),
    "headers": Column(
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
    """Select the columns of ``schema`` from a batch of the server, without a copy.

    Spark compares schemas including nullability, which the server need not send the same.
    """
    arrays = [batch.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _known(name: str) -> Column:
    column = COLUMNS.get(name)
    if column is None:
        raise SchemaError(f"unknown column {name}; a stream has: {', '.join(COLUMNS)}")
    return column
