"""Options of the data source: what is accepted, and the sentence for each mistake."""

from pathlib import Path

import pytest

from contrail_spark.errors import OptionError
from contrail_spark.options import (
    DEFAULT_SPLITS,
    DEFAULT_URL,
    SUBJECT_CHARS_MAX,
    ReplayOptions,
    parse_options,
)
from tests.support.each import each


def test_only_the_stream_given_takes_every_default() -> None:
    assert parse_options({"stream": "FLIGHTS"}) == ReplayOptions(url=DEFAULT_URL, stream="FLIGHTS")


def test_names_in_any_case_are_the_same_option() -> None:
    options = parse_options({"STREAM": "S", "startingsequence": "3", "EndingSequence": "9"})
    assert (options.from_seq, options.to_seq) == (3, 9)


def test_every_option_given_is_taken() -> None:
    options = parse_options(
        {
            "url": "https://events.example:8443/",
            "stream": "S",
            "subject": "flights.JFK.*.>",
            "startingTimestamp": "1357034400000",
            "endingTimestamp": "2013-01-01T12:00:00.5+02:00",
            "minPartitions": "3",
            "columns": "seq, data",
            "failOnDataLoss": "FALSE",
            "fetchRetries": "0",
            "requestTimeoutMs": "1500",
            "token": "secret",
        }
    )
    assert options == ReplayOptions(
        url="https://events.example:8443",
        stream="S",
        subjects=("flights.JFK.*.>",),
        start_time="2013-01-01T10:00:00.000000000Z",
        end_time="2013-01-01T10:00:00.500000000Z",
        splits=3,
        columns=("seq", "data"),
        fail_on_data_loss=False,
        retries=0,
        timeout_s=1.5,
        token="secret",
    )


@each(
    ("given", "sentence"),
    [
        ({}, "option stream is missing"),
        ({"stream": "a.b"}, "option stream: a name must not contain ."),
        ({"startingSequnce": "1"}, "unknown option startingSequnce; did you mean startingSeq"),
        ({"zz": "red"}, "unknown option zz; known: url, stream"),
        ({"url": "ftp://host"}, "option url: must be an http"),
        ({"url": "http://host/base"}, "option url: must consist of scheme, host and port"),
        ({"url": "http://user:pw@host"}, "option url: credentials do not belong"),
        ({"url": "http://host:99999"}, "option url: Port out of range"),
        ({"url": "http://a b"}, "option url: must not contain spaces"),
        ({"url": "http://a\x7f"}, "option url: must not contain spaces or control characters"),
        ({"url": "http://a..b"}, "option url: has no valid host name: 'a..b'"),
        ({"url": f"http://{'a' * 64}"}, "option url: has no valid host name"),
        ({"url": ""}, "option url: must not be empty"),
        ({"subject": "a..b"}, "option subject: 'a..b': a subject filter must not contain an empty"),
        ({"subject": "a.b c.>.d"}, "option subject: 'c.>.d': the wildcard > must be the last"),
        ({"subject": " "}, "option subject: must not be empty"),
        ({"subject": "a " * 257}, "option subject: must not have more than 256 filters"),
        ({"startingSequence": "0"}, "option startingSequence: must be an integer from 1"),
        ({"startingSequence": "x"}, "option startingSequence: must be an integer from 1"),
        ({"endingSequence": "9" * 30}, "option endingSequence: must be an integer from 1"),
        ({"splits": "1025"}, "option splits: must be an integer from 1 to 1024"),
        (
            {"startingTimestamp": "yesterday"},
            "option startingTimestamp: must be milliseconds since",
        ),
        ({"endingTimestamp": "2013-01-01T10:00:00"}, "RFC 3339 with an offset"),
        ({"endingTimestamp": "9999-12-31T23:59:59Z"}, "from 1970 to 2262, not '9999-"),
        ({"consistency": "all"}, "option consistency: must be leader or any"),
        ({"failOnDataLoss": "yes"}, "option failOnDataLoss: must be true or false"),
        ({"columns": "seq,,data"}, "option columns: must be a comma-separated list"),
        ({"columns": "seq,seq"}, "option columns: must not name a column twice"),
        ({"token": "two words"}, "option token: must be printable ASCII"),
        ({"startingSequence": "9", "endingSequence": "3"}, "startingSequence 9 is above"),
        ({"startingTimestamp": "9", "endingTimestamp": "3"}, "is after endingTimestamp"),
        ({"startingSequence": "9", "startingTimestamp": "3"}, "cannot be used together"),
        ({"splits": "2", "minPartitions": "3"}, "cannot be used together"),
        ({"subject": "a" * 4096 + " *" * 2560}, "must not have more than 256 filters"),
        ({"subject": " ".join(["a" * 3583] * 4) + " b"}, "must not be longer than 14336 char"),
        ({"splits": "2", "maxBytesPerPartition": "3"}, "cannot be used together"),
        ({"maxBytesPerPartition": "0"}, "option maxBytesPerPartition: must be a size in bytes"),
        ({"maxBytesPerPartition": "1.5m"}, "option maxBytesPerPartition: must be a size in bytes"),
        ({"maxBytesPerPartition": "9223372036854775808"}, "must be a size in bytes"),
        ({"maxBytesPerPartition": "8589934592g"}, "must be a size in bytes"),
        ({"startingPosition": "0"}, "option startingPosition: must be earliest or latest"),
        ({"maxMessagesPerTrigger": "0"}, "option maxMessagesPerTrigger: must be an integer from 1"),
        ({"maxMessagesPerTrigger": "1", "maxOffsetsPerTrigger": "1"}, "cannot be used together"),
        ({"startingPosition": "latest", "startingSequence": "1"}, "cannot be used together"),
        ({"startingPosition": "latest", "startingTimestamp": "1"}, "cannot be used together"),
        ({"token": "a", "tokenFile": "b"}, "options token and tokenFile cannot be used together"),
    ],
)
def test_a_mistake_is_named_in_one_sentence(given: dict[str, str], sentence: str) -> None:
    options = {"stream": "FLIGHTS", **given} if given else {}
    with pytest.raises(OptionError) as refused:
        parse_options(options)
    assert sentence in str(refused.value)


def test_a_bad_token_is_not_repeated_in_the_error() -> None:
    with pytest.raises(OptionError) as refused:
        parse_options({"stream": "S", "token": "very secret"})
    assert "very" not in str(refused.value)


def test_the_token_is_no_part_of_the_options_text() -> None:
    assert "hidden" not in repr(parse_options({"stream": "S", "token": "hidden"}))


def test_a_token_file_is_read_again_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    options = parse_options({"stream": "S", "tokenFile": str(file)})
    assert options.bearer() == "first"
    file.write_text("second")
    assert options.bearer() == "second"


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe"])
def test_a_useless_token_file_is_an_option_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match="option tokenFile"):
        parse_options({"stream": "S", "tokenFile": str(file)}).bearer()


def test_default_number_of_splits_is_asked_for() -> None:
    assert parse_options({"stream": "S"}).splits == DEFAULT_SPLITS


@each(
    ("text", "size"),
    [
        ("1", 1),
        ("4k", 4 << 10),
        (" 128M ", 128 << 20),
        ("2gb", 2 << 30),
        ("9223372036854775807", (1 << 63) - 1),
        ("8589934591g", 8_589_934_591 << 30),
    ],
)
def test_a_size_is_a_number_of_bytes_with_or_without_a_unit(text: str, size: int) -> None:
    options = parse_options({"stream": "S", "maxBytesPerPartition": text})
    assert (options.split_bytes, options.splits) == (size, DEFAULT_SPLITS)


def test_a_given_number_of_splits_is_not_raised_for_their_size() -> None:
    assert parse_options({"stream": "S", "splits": "3"}).split_bytes is None


def test_filters_up_to_the_limit_are_taken() -> None:
    filters = tuple(f"a.{number}" for number in range(256))
    assert parse_options({"stream": "S", "subject": "\n".join(filters)}).subjects == filters
    longest = " ".join(["a" * 3583] * 4)
    assert len(longest) == SUBJECT_CHARS_MAX - 1
    assert len(parse_options({"stream": "S", "subject": f"{longest}a"}).subjects) == 4
