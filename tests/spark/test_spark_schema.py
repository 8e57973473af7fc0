"""Columns, projections, and the record batches made of them."""

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from contrail_spark.errors import ProtocolError, SchemaError
from contrail_spark.schema import (
    COLUMNS,
    arrow_schema,
    check_wire,
    checked_projection,
    conform,
    spark_schema,
)


def test_all_columns_have_the_names_and_types_of_the_api() -> None:
    assert spark_schema().simpleString() == (
        "struct<shard:int,seq:bigint,time:timestamp,subject:string,"
        "headers:map<string,array<string>>,data:binary>"
    )


def test_arrow_types_are_those_spark_compares_with() -> None:
    schema = spark_schema()
    assert arrow_schema(schema).equals(to_arrow_schema(schema, timezone="UTC"))


def test_columns_option_selects_in_its_own_order() -> None:
    assert spark_schema(("data", "seq")).fieldNames() == ["data", "seq"]


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SchemaError, match="unknown column payload; a stream has: shard, seq, time"):
        spark_schema(("payload",))


def test_a_schema_with_another_type_is_refused() -> None:
    schema = StructType([StructField("data", StringType())])
    with pytest.raises(SchemaError, match="column data has type binary, not string"):
        checked_projection(schema, None)


def test_a_timestamp_without_zone_is_refused() -> None:
    schema = StructType([StructField("time", TimestampNTZType())])
    with pytest.raises(SchemaError, match="column time has type timestamp, not timestamp_ntz"):
        checked_projection(schema, None)


def test_a_schema_naming_a_column_twice_is_refused() -> None:
    twice = StructType([StructField("seq", LongType()), StructField("seq", LongType())])
    with pytest.raises(SchemaError, match="twice"):
        checked_projection(twice, None)


def test_an_empty_schema_is_refused() -> None:
    with pytest.raises(SchemaError, match="selects no column"):
        checked_projection(StructType([]), None)


def test_schema_and_columns_that_differ_are_refused() -> None:
    schema = StructType([StructField("seq", LongType())])
    assert checked_projection(schema, ("seq",)) is schema
    with pytest.raises(SchemaError, match="name different columns"):
        checked_projection(schema, ("data",))


def test_wire_columns_of_the_right_types_pass() -> None:
    check_wire(arrow_schema(spark_schema()), tuple(COLUMNS))


def test_a_wire_column_missing_or_of_another_type_is_a_protocol_error() -> None:
    nanoseconds = pa.schema([pa.field("time", pa.timestamp("ns", tz="UTC"))])
    with pytest.raises(ProtocolError, match=r"column time as timestamp\[ns"):
        check_wire(nanoseconds, ("time",))
    with pytest.raises(ProtocolError, match="has no column seq"):
        check_wire(nanoseconds, ("seq",))


def test_a_wire_batch_is_cut_to_the_projection_without_a_copy() -> None:
    wire = pa.record_batch({"seq": pa.array([1, 2]), "data": pa.array([b"a", None])})
    schema = StructType([StructField("data", BinaryType(), True)])
    batch = conform(wire, arrow_schema(schema))
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    assert batch.to_pydict() == {"data": [b"a", None]}
    assert batch.column(0).buffers()[2].address == wire.column("data").buffers()[2].address


SOME = [("Leg", ["1", "2"]), ("Empty", [""])]


@pytest.mark.parametrize("start", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "headers",
    [
        [[], SOME, [], [], SOME, [("A", None)]],
        [SOME, [], None, SOME, None, []],
        [SOME] * 6,
        [[]] * 6,
        [None] * 6,
        [[], None] * 3,
    ],
)
def test_a_message_without_headers_has_null(headers: list[Any], start: int) -> None:
    schema = arrow_schema(spark_schema(("headers",)))
    column = pa.array(headers, COLUMNS["headers"].arrow)
    for stop in (start, start + 1, 6):
        wire = pa.record_batch({"seq": range(6), "headers": column}).slice(start, stop - start)
        batch = conform(wire, schema)
        batch.validate(full=True)
        assert batch.schema.equals(schema, check_metadata=True)
        assert batch["headers"].to_pylist() == [each or None for each in headers[start:stop]]
        assert conform(batch, schema).equals(batch)


def test_a_null_with_entries_below_it_stays_null() -> None:
    mask = pa.array([False, True, False])
    texts = pa.array([["x"], ["y"], ["z"]])
    column = pa.MapArray.from_arrays([0, 1, 2, 2], pa.array(["A", "B"]), texts[:2], mask=mask)
    batch = conform(pa.record_batch({"headers": column}), arrow_schema(spark_schema(("headers",))))
    assert batch["headers"].to_pylist() == [[("A", ["x"])], None, None]


@pytest.mark.parametrize("none", [[], None])
def test_headers_of_other_messages_are_not_copied(none: list[Any] | None) -> None:
    wire = pa.record_batch({"headers": pa.array([SOME, none, SOME], COLUMNS["headers"].arrow)})
    batch = conform(wire, arrow_schema(spark_schema(("headers",))))
    assert batch["headers"].keys.buffers()[2].address == wire["headers"].keys.buffers()[2].address
