"""The columns of a written frame: what is taken, and the sentence for each mistake."""

import pytest
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
)

from contrail_spark.errors import OptionError, SchemaError
from contrail_spark.layout import IdSource, Layout, parse_layout
from contrail_spark.options import DEFAULT_URL, WriteOptions, parse_write_options
from contrail_spark.schema import spark_schema
from contrail_spark.source import ContrailDataSource
from tests.support.each import each

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "map": MapType(StringType(), StringType()),
    "map-of-lists": MapType(StringType(), ArrayType(StringType())),
    "map-without-nulls": MapType(StringType(), StringType(), valueContainsNull=False),
    "map-of-numbers": MapType(StringType(), IntegerType()),
}


def schema(columns: str) -> StructType:
    """A schema of columns such as ``subject string, data binary``; only Spark's JVM reads DDL."""
    fields = [column.split() for column in columns.split(", ")]
    return StructType([StructField(name, _TYPES[kind]) for name, kind in fields])


def layout(columns: str, **options: str) -> Layout:
    return parse_layout(schema(columns), parse_write_options({"stream": "S", **options}))


def test_stream_alone_takes_every_default() -> None:
    assert parse_write_options({"stream": "S"}) == WriteOptions(
        url=DEFAULT_URL, stream="S", retries=10
    )


def test_options_of_the_query_are_none_of_the_write() -> None:
    given = {"STREAM": "S", "checkpointLocation": "/tmp/c", "queryname": "q", "subject": "a.b"}
    assert parse_write_options(given).subject == "a.b"


def test_ids_come_from_the_first_source_that_the_frame_has() -> None:
    rows = layout("subject string, data binary")
    assert rows == Layout(IdSource.ROW, None, None)
    own = layout("data string, msg_id string, shard int, seq bigint", subject="a")
    assert own == Layout(IdSource.COLUMN, "a", None)
    source = layout("subject string, data binary, stream string, shard int, seq bigint")
    assert source == Layout(IdSource.SOURCE, None, None)


def test_frame_that_was_read_is_taken_with_the_name_of_its_stream() -> None:
    options = parse_write_options({"stream": "COPY", "sourceStream": "S"})
    assert parse_layout(spark_schema(), options) == Layout(IdSource.SOURCE, None, "S")


def test_headers_are_texts_or_lists_of_texts() -> None:
    for kind in ("map", "map-of-lists", "map-without-nulls"):
        layout(f"subject string, data binary, headers {kind}")


@each(
    ("columns", "options", "sentence"),
    [
        ("subject string, data binary, colour int", {}, "no column colour, only subject, data, he"),
        ("subject string, data int", {}, "column data has type int, but must have binary or strin"),
        ("subject string, data binary, headers map-of-numbers", {}, "column headers has type map"),
        ("subject string", {}, "the frame has no column data"),
        ("data binary", {}, "the frame has no column subject; add it, or use the option subject"),
        ("subject string, data binary", {"subject": "a"}, "drop it, or the option subject"),
        ("subject string, data binary, data binary", {}, "has a column twice: subject, data, data"),
        ("subject string, data binary, shard int, seq bigint", {}, "use the option sourceStream"),
        ("subject string, data binary, seq bigint", {}, "use the option sourceStream"),
        ("subject string, data binary", {"sourceStream": "S"}, "needs the columns shard and seq"),
        (
            "subject string, data binary, shard int, seq bigint, stream string",
            {"sourceStream": "S"},
            "drop it, or the option sourceStream",
        ),
    ],
)
def test_wrong_column_is_named(columns: str, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(SchemaError) as refused:
        layout(columns, **options)
    assert sentence in str(refused.value)


@each(
    ("given", "sentence"),
    [
        ({}, "option stream is missing"),
        ({"stream": "S", "splits": "3"}, "unknown option splits; known: url, stream, subject, so"),
        ({"stream": "S", "publishRetrys": "3"}, "did you mean publishRetries?"),
        ({"stream": "S", "subject": "a.>"}, "option subject: a subject must not contain the wild"),
        ({"stream": "S", "subject": ""}, "option subject: a subject must not be empty"),
        ({"stream": "S", "sourceStream": "a.b"}, "option sourceStream: a name must not contain ."),
        ({"stream": "S", "publishRetries": "-1"}, "option publishRetries: must be an integer from"),
        ({"stream": "S", "token": "a", "tokenFile": "b"}, "token and tokenFile cannot be used tog"),
    ],
)
def test_wrong_option_is_named(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_write_options(given)
    assert sentence in str(refused.value)


def test_overwriting_is_refused() -> None:
    source = ContrailDataSource({"stream": "S"})
    columns = schema("subject string, data binary")
    for writer in (source.writer, source.streamWriter):
        with pytest.raises(OptionError, match="messages cannot be overwritten: use mode append"):
            writer(schema=columns, overwrite=True)
