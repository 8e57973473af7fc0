"""Answers of two servers, compared without what differs between any two servers.

Times, tokens and ids become placeholders, and everything else stays.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
import pyarrow as pa

TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
VARYING: Final = frozenset(
    {
        "ack_token", "cursor", "event_id", "expires_at", "incarnation",
        "leader", "next_page_token", "node", "request_id", "ticket", "times_ns",
    }
)  # fmt: skip
"""Fields whose values differ between two servers of one form."""
_VARYING_HEADERS: Final = frozenset(
    {"contrail-applied-index", "contrail-cursor", "etag", "x-request-id"}
)
_OF_THE_CONNECTION: Final = frozenset({"connection", "content-length", "date", "transfer-encoding"})
"""Headers that say how an answer travels, which may depend on what has arrived by then."""
_ABOUT_PROCESSES: Final = frozenset({"/metrics", "/v1/cluster"})
"""What these say depends on the processes."""
_OPAQUE: Final = b"CTRLSNAP"
"""The beginning of a snapshot, which has times and numbers of the server's own."""
_ARROW: Final = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class Answer:
    """What came back to the request ``asked``, without what differs between two servers."""

    asked: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: Any


def reduced(
    asked: str, answer: httpx.Response, content: bytes, named: Callable[[str], str]
) -> Answer:
    """Reduce an answer; ``named`` replaces the values in a text that the server has chosen."""
    reduction = _Reduction(named)
    headers, body = reduction.headers(answer), reduction.body(answer, content)
    return Answer(asked, answer.status_code, headers, body)


class _Reduction:
    def __init__(self, named: Callable[[str], str]) -> None:
        self._named = named

    def headers(self, answer: httpx.Response) -> tuple[tuple[str, str], ...]:
        kept = []
        for name, value in answer.headers.multi_items():
            if name in _OF_THE_CONNECTION:
                continue
            if name in _VARYING_HEADERS:
                sent = answer.request.headers.get(name)
                kept.append((name, value if value == sent else f"<{name}>"))
            else:
                kept.append((name, self._text(value)))
        return tuple(sorted(kept))

    def body(self, answer: httpx.Response, content: bytes) -> Any:
        kind = answer.headers.get("content-type", "")
        about_processes = answer.request.url.path in _ABOUT_PROCESSES
        if not content or about_processes or content.startswith(_OPAQUE):
            return bool(content)
        if kind == "application/x-ndjson":
            return [self._value(json.loads(line)) for line in content.splitlines()]
        if kind.endswith("json"):
            return self._value(json.loads(content))
        if kind.startswith("application/vnd.msgpack"):
            return [self._value(one) for one in _unpacked(content)]
        if kind == _ARROW:
            return self._value(_rows(content))
        if kind == "text/event-stream":
            return self._text(content.decode())
        return content

    def _value(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if isinstance(value.get("splits"), list):
                value = {**value, "splits": _per_shard(value["splits"])}
            return {
                key: f"<{key}>" if key in VARYING and value[key] else self._value(value[key])
                for key in value
            }
        if isinstance(value, list | tuple):
            return [self._value(one) for one in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        return TIME.sub("<time>", self._named(text))


def _per_shard(splits: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """The first and the last sequence of each shard, and how many messages there are.

    Where a plan divides a shard depends on the blocks, and these on when they were written.
    """
    shards: dict[int, tuple[int, ...]] = {}
    for one in splits:
        first, _, count = shards.get(one["shard"], (one["from_seq"], 0, 0))
        shards[one["shard"]] = (first, one["to_seq"], count + one["messages"])
    return [(shard, *found) for shard, found in shards.items()]


def _unpacked(content: bytes) -> Iterator[Any]:
    unpacker = msgspec.msgpack.Decoder()
    try:
        yield unpacker.decode(content)
    except msgspec.DecodeError:
        yield TIME.sub("<time>", content.decode("latin-1"))


def _rows(content: bytes) -> list[Any]:
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    rows: list[Any] = [str(table.schema)]
    rows.extend(table.drop_columns([n for n in table.column_names if n == "time"]).to_pylist())
    return rows


def difference(one: Answer, other: Answer) -> str:
    """What differs between two answers to a request, or nothing."""
    parts = [
        f"  {part}:\n    {getattr(one, part)}\n    {getattr(other, part)}"
        for part in ("status", "headers", "body")
        if getattr(one, part) != getattr(other, part)
    ]
    return "\n".join([one.asked, *parts]) if parts else ""


def assert_same(one: Sequence[Answer], other: Sequence[Answer]) -> None:
    """Fail with everything that differs."""
    found = [text for pair in zip(one, other, strict=True) if (text := difference(*pair))]
    assert not found, f"{len(found)} answers differ:\n" + "\n".join(found)
