"""The options of ``format("contrail")``, to read and to write: names, defaults, error messages."""

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote_plus, urlsplit

from contrail_common.config_rules import SUBJECTS_MAX
from contrail_common.names import name_problem
from contrail_common.subjects import filter_problem, subject_problem
from contrail_common.timeunits import NS_PER_MS, format_time, parse_time
from contrail_spark.errors import OptionError

DEFAULT_URL: Final = "http://127.0.0.1:7420"
DEFAULT_SPLITS: Final = 8
SPLITS_MAX: Final = 1_024
DEFAULT_SPLIT_BYTES: Final = 128 << 20
SUBJECT_CHARS_MAX: Final = 14 << 10
"""Filters in a URL. The server takes 16 KiB, and the rest of a request has less than 2 KiB."""
DEFAULT_RETRIES: Final = 10
"""About 20 seconds, so that a job outlives the restart of a server."""
RETRIES_MAX: Final = 100
DEFAULT_TIMEOUT_MS: Final = 30_000
TIMEOUT_MS_MAX: Final = 3_600_000
SEQ_MAX: Final = (1 << 63) - 1

NAMES: Final = (
    "url",
    "stream",
    "subject",
    "startingSequence",
    "endingSequence",
    "startingTimestamp",
    "endingTimestamp",
    "splits",
    "minPartitions",
    "maxBytesPerPartition",
    "columns",
    "failOnDataLoss",
    "consistency",
    "fetchRetries",
    "requestTimeoutMs",
    "token",
    "tokenFile",
    "startingPosition",
    "maxMessagesPerTrigger",
    "maxOffsetsPerTrigger",
    "lake",
    "lakeOnly",
)
WRITE_NAMES: Final = (
    "url",
    "stream",
    "subject",
    "sourceStream",
    "publishRetries",
    "requestTimeoutMs",
    "token",
    "tokenFile",
)
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a streaming query, which Spark passes on to the data source."""
BATCH_ONLY: Final = (
    "endingSequence",
    "endingTimestamp",
    "splits",
    "maxBytesPerPartition",
    "lakeOnly",
)
STREAM_ONLY: Final = ("startingPosition", "maxMessagesPerTrigger", "maxOffsetsPerTrigger")
_EXCLUSIVE: Final = (
    ("startingSequence", "startingTimestamp"),
    ("startingPosition", "startingSequence"),
    ("startingPosition", "startingTimestamp"),
    ("maxMessagesPerTrigger", "maxOffsetsPerTrigger"),
    ("endingSequence", "endingTimestamp"),
    ("splits", "minPartitions"),
    ("splits", "maxBytesPerPartition"),
    ("token", "tokenFile"),
)
_SIZE: Final = re.compile(r"(\d{1,19})([kmg]?)b?", re.IGNORECASE | re.ASCII)
_SIZE_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30}
_BOOLEANS: Final = {"true": True, "false": False}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The stream, and how to reach its server.

    ``token`` is kept out of ``repr``, so that it cannot reach a log line or an error.
    """

    url: str
    stream: str
    retries: int = DEFAULT_RETRIES
    timeout_s: float = DEFAULT_TIMEOUT_MS / 1_000
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    def bearer(self) -> str | None:
        """The token to send. A token file is read each time, so a renewed token is picked up."""
        if self.token_file is None:
            return self.token
        try:
            token = Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"option tokenFile: cannot read {self.token_file}: {error}") from None
        if not _sendable(token):
            raise OptionError(f"option tokenFile: {self.token_file} contains no token")
        return token


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(ServerOptions):
    """Checked options. Times are RFC 3339; None means no limit, and no ``subjects`` mean all.

    The range is cut into about ``splits`` parts, or into more of at most about ``split_bytes``.
    ``lake`` is the folder of the stream's lake, and with ``lake_only`` the server is not asked.
    ``replica`` is the node whose copy is read, which needs the consistency ``any``. It is no option
    of the data source.
    """

    subjects: tuple[str, ...] = ()
    from_seq: int | None = None
    to_seq: int | None = None
    start_time: str | None = None
    end_time: str | None = None
    splits: int = DEFAULT_SPLITS
    split_bytes: int | None = DEFAULT_SPLIT_BYTES
    columns: tuple[str, ...] | None = None
    fail_on_data_loss: bool = True
    consistency: str | None = None
    starting_position: str | None = None
    max_per_trigger: int | None = None
    lake: str | None = None
    lake_only: bool = False
    replica: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(ServerOptions):
    """Checked options of a write.

    ``subject`` is that of all messages, and ``source_stream`` the stream from which ``shard`` and
    ``seq`` of all rows are; None if the rows say it themselves.
    """

    subject: str | None = None
    source_stream: str | None = None


def parse_options(given: Mapping[str, str]) -> ReplayOptions:
    """Check the user's ``.option(...)`` values; the case of names does not matter.

    Raises OptionError for an unknown name, a bad value, or two options that exclude each other.
    """
    options = _by_canonical_name(given, NAMES)
    read = _Given(options).read
    parsed = ReplayOptions(
        url=read("url", parse_url) or DEFAULT_URL,
        stream=read("stream", _stream) or "",
        subjects=read("subject", _subjects) or (),
        from_seq=read("startingSequence", _sequence),
        to_seq=read("endingSequence", _sequence),
        start_time=read("startingTimestamp", _time),
        end_time=read("endingTimestamp", _time),
        splits=read("splits", _splits) or read("minPartitions", _splits) or DEFAULT_SPLITS,
        split_bytes=None
        if "splits" in options
        else _or(read("maxBytesPerPartition", parse_size), DEFAULT_SPLIT_BYTES),
        columns=read("columns", _columns),
        fail_on_data_loss=read("failOnDataLoss", _boolean) is not False,
        consistency=read("consistency", _consistency),
        retries=_or(read("fetchRetries", _retries), DEFAULT_RETRIES),
        timeout_s=_or(read("requestTimeoutMs", _timeout_ms), DEFAULT_TIMEOUT_MS) / 1_000,
        token=read("token", _token),
        token_file=read("tokenFile", _not_empty),
        starting_position=read("startingPosition", _position),
        max_per_trigger=read("maxMessagesPerTrigger", _sequence)
        or read("maxOffsetsPerTrigger", _sequence),
        lake=read("lake", _folder),
        lake_only=read("lakeOnly", _boolean) is True,
    )
    if parsed.lake_only and parsed.lake is None:
        raise OptionError("option lakeOnly needs the option lake, which names the folder")
    _check_order(parsed)
    return parsed


def parse_write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the user's ``.option(...)`` values of a write; otherwise as :func:`parse_options`."""
    given = {name: value for name, value in given.items() if name.lower() not in _OF_SPARK}
    read = _Given(_by_canonical_name(given, WRITE_NAMES)).read
    return WriteOptions(
        url=read("url", parse_url) or DEFAULT_URL,
        stream=read("stream", _stream) or "",
        subject=read("subject", _subject),
        source_stream=read("sourceStream", _stream),
        retries=_or(read("publishRetries", _retries), DEFAULT_RETRIES),
        timeout_s=_or(read("requestTimeoutMs", _timeout_ms), DEFAULT_TIMEOUT_MS) / 1_000,
        token=read("token", _token),
        token_file=read("tokenFile", _not_empty),
    )


class _Given:
    """The given options, by their canonical names."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def read(self, name: str, convert: Callable[[str], _T]) -> _T | None:
        """The value of an option; None if it is not given."""
        try:
            return convert(self._options[name]) if name in self._options else None
        except ValueError as error:
            raise OptionError(f"option {name}: {error}") from None


def refuse(given: Mapping[str, str], names: tuple[str, ...], use: str) -> None:
    """Raise OptionError if one of ``names`` was given, which has no meaning for ``use``."""
    present = {name.lower() for name in given}
    for name in names:
        if name.lower() in present:
            raise OptionError(f"option {name} has no meaning for {use}")


def _by_canonical_name(given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    known = {name.lower(): name for name in names}
    options = {}
    for name, value in given.items():
        canonical = known.get(name.lower())
        if canonical is None:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {known[near[0]]}?" if near else f"known: {', '.join(names)}"
            raise OptionError(f"unknown option {name}; {hint}")
        options[canonical] = value
    for left, right in _EXCLUSIVE:
        if left in options and right in options:
            raise OptionError(f"options {left} and {right} cannot be used together")
    if "stream" not in options:
        raise OptionError('option stream is missing: .option("stream", "NAME")')
    return options


def _check_order(options: ReplayOptions) -> None:
    first, last = options.from_seq, options.to_seq
    if first is not None and last is not None and first > last:
        raise OptionError(f"startingSequence {first} is above endingSequence {last}")
    start, end = options.start_time, options.end_time
    if start is not None and end is not None and start > end:
        raise OptionError(f"startingTimestamp {start} is after endingTimestamp {end}")


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text.strip()


def _folder(text: str) -> str:
    # Workers run in other folders.
    return os.path.abspath(_not_empty(text))


def parse_url(text: str) -> str:
    """The address of a server without a slash at its end; ValueError if it is not valid."""
    url = _not_empty(text).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"must be an http:// or https:// origin such as {DEFAULT_URL}")
    # They would be shown in plans and errors.
    if parts.username or parts.password:
        raise ValueError("credentials do not belong in a URL; use token or tokenFile")
    if parts.path or parts.query or parts.fragment:
        raise ValueError("must consist of scheme, host and port, without a path or query")
    if parts.port == 0:
        raise ValueError("must not have port 0")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError(f"has no valid host name: {parts.hostname!r}") from None
    if " " in parts.netloc or not parts.netloc.isprintable():
        raise ValueError("must not contain spaces or control characters")
    return url


def _stream(text: str) -> str:
    if problem := name_problem(text):
        raise ValueError(problem)
    return text


def _subject(text: str) -> str:
    if problem := subject_problem(text):
        raise ValueError(problem)
    return text


def _subjects(text: str) -> tuple[str, ...]:
    # No subject has a space in it, but commas are allowed.
    filters = tuple(_not_empty(text).split())
    if len(filters) > SUBJECTS_MAX:
        raise ValueError(f"must not have more than {SUBJECTS_MAX} filters")
    for one in filters:
        if problem := filter_problem(one):
            raise ValueError(f"{one!r}: {problem}")
    if len(quote_plus(" ".join(filters))) > SUBJECT_CHARS_MAX:
        raise ValueError(f"must not be longer than {SUBJECT_CHARS_MAX} characters in a URL")
    return filters


def _integer(text: str, least: int, most: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(SEQ_MAX))):
        raise ValueError(f"must be an integer from {least} to {most}, not {text!r}")
    value = int(digits)
    if not least <= value <= most:
        raise ValueError(f"must be an integer from {least} to {most}, not {text!r}")
    return value


def _sequence(text: str) -> int:
    return _integer(text, 1, SEQ_MAX)


def _splits(text: str) -> int:
    return _integer(text, 1, SPLITS_MAX)


def parse_size(text: str) -> int:
    """The bytes in a text such as ``128m``; ValueError if it is not valid."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) << _SIZE_SHIFTS[found[2].lower()] if found else 0
    if not 1 <= size <= SEQ_MAX:
        raise ValueError(f'must be a size in bytes such as "134217728" or "128m", not {text!r}')
    return size


def _retries(text: str) -> int:
    return _integer(text, 0, RETRIES_MAX)


def _timeout_ms(text: str) -> int:
    return _integer(text, 1, TIMEOUT_MS_MAX)


def _time(text: str) -> str:
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit():
        return format_time(_integer(stripped, 0, SEQ_MAX // NS_PER_MS) * NS_PER_MS)
    try:
        return format_time(parse_time(stripped))
    except ValueError:
        raise ValueError(
            "must be milliseconds since 1970, or RFC 3339 with an offset such as "
            f'"2026-01-31T08:00:00Z", from 1970 to 2262, not {text!r}'
        ) from None


def _boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"must be true or false, not {text!r}")
    return value


def _consistency(text: str) -> str:
    value = text.strip().lower()
    if value not in ("leader", "any"):
        raise ValueError(f"must be leader or any, not {text!r}")
    return value


def _position(text: str) -> str:
    value = text.strip().lower()
    if value not in ("earliest", "latest"):
        raise ValueError(f"must be earliest or latest, not {text!r}")
    return value


def _columns(text: str) -> tuple[str, ...]:
    columns = tuple(name.strip() for name in text.split(","))
    if not all(columns):
        raise ValueError('must be a comma-separated list such as "subject,seq"')
    if len(set(columns)) < len(columns):
        raise ValueError("must not name a column twice")
    return columns


def _token(text: str) -> str:
    if not _sendable(text.strip()):
        raise ValueError("must be printable ASCII without spaces")
    return text.strip()


def _sendable(token: str) -> bool:
    return token != "" and all("!" <= char <= "~" for char in token)
