"""Streams with subject keys on a node, and everything that a client is given of them."""

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.contract.consume import PullRequest
from contrail_link.contract.read import (
    LastRequest,
    ManyRequest,
    RangeRequest,
    ReplayRequest,
    pieces_of,
)
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.support.folders import files_with
from tests.unit.storage.erase_rig import secret

Seen = dict[int, tuple[str, dict[str, list[str]], bytes]]


def config(name: str = "S", **rules: Any) -> StreamConfig:
    """A stream on ``<name>.>`` with subject keys."""
    return StreamConfig(name=name, subjects=(f"{name}.>",), erasure="subject_key", **rules)


async def make(link: LocalLink, name: str = "S", **rules: Any) -> None:
    await link.put_stream(config(name, **rules), "create", None, False)


async def fill(link: LocalLink, count: int = 40, stream: str = "S") -> None:
    """Messages 1 to ``count``, one by one, each of a subject of its own."""
    for number in range(1, count + 1):
        await publish(link, stream, [secret(number, stream)])


def expected(numbers: list[int], stream: str = "S") -> Seen:
    """What is seen of the messages :func:`secret` with these sequences."""
    messages = {number: secret(number, stream) for number in numbers}
    return {at: (one.subject, one.headers or {}, one.payload) for at, one in messages.items()}


def content_traces(number: int) -> list[bytes]:
    """What would tell of the content of :func:`secret`; its subject is no secret."""
    parts = ("header-value", "message-id", "payload-text")
    return [f"{part}-{number:04}".encode() for part in parts]


def content_found(data_dir: Path, numbers: list[int]) -> dict[str, list[bytes]]:
    """Files that hold content of messages."""
    return files_with(data_dir, [text for number in numbers for text in content_traces(number)])


def _taken(messages: list[Any]) -> Seen:
    return {one.seq: (one.subject, one.headers or {}, one.payload) for one in messages}


async def _one_by_one(link: LocalLink, stream: str, last_seq: int) -> Seen:
    messages = []
    for seq in range(1, last_seq + 1):
        try:
            messages.append(await link.get_message(stream, seq))
        except ApiError as error:
            if error.spec is not errors.MESSAGE_NOT_FOUND:
                raise
    return _taken(messages)


async def _last(link: LocalLink, stream: str) -> Seen:
    messages: list[Any] = []
    token: str | None = ""
    while token is not None:
        request = LastRequest(stream=stream, limit=7, token=token)
        page, token = await link.last_messages(request)
        messages += page
    return _taken(messages)


async def _literal(link: LocalLink, stream: str, subjects: list[str]) -> Seen:
    messages: list[Any] = []
    for subject in subjects:
        messages += (await link.last_messages(LastRequest(stream=stream, subject=subject)))[0]
    return _taken(messages)


async def _many(link: LocalLink, stream: str, **asked: Any) -> Seen:
    found = await link.get_messages(ManyRequest(stream=stream, **asked))
    return _taken([one for one in found.messages if one is not None])


async def _replayed(link: LocalLink, stream: str, form: Any) -> Seen:
    chunks = await link.replay(ReplayRequest(stream=stream, format=form))
    data = b"".join([bytes(piece) async for chunk in chunks for piece in pieces_of(chunk)])
    if form == "arrow":
        rows = pa.ipc.open_stream(data).read_all().to_pylist()
        return {row["seq"]: (row["subject"], dict(row["headers"]), row["data"]) for row in rows}
    lines = [msgspec.json.decode(line) for line in data.splitlines()]
    records = [line for line in lines if "seq" in line]
    assert lines[-1] == {"end": True, "messages": len(records)}
    return {one["seq"]: (one["subject"], one["headers"], _bytes(one["data"])) for one in records}


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


async def _pulled(link: LocalLink, stream: str, **rules: Any) -> Seen:
    consumer = ConsumerConfig(name="probe", durable=True, **rules)
    await link.put_consumer(stream, consumer, "create", None, False)
    try:
        messages: list[Any] = []
        while True:
            request = PullRequest(stream=stream, consumer="probe", batch=9, no_wait=True)
            deliveries = (await link.pull(request)).deliveries
            if not deliveries:
                return _taken(messages)
            messages += [one.message for one in deliveries]
    finally:
        await link.delete_consumer(stream, "probe")


async def everything(link: LocalLink, stream: str = "S") -> dict[str, Seen]:
    """All live messages in all ways in which they are given out."""
    state = (await link.stream_info(stream)).state
    page = await link.read_range(RangeRequest(stream=stream, limit=1_000))
    subjects = [name for name, _ in (await link.subject_counts(stream, "", 1_000, ""))[0]]
    return {
        "one by one": await _one_by_one(link, stream, state.last_seq),
        "range": _taken(page.messages),
        "last": await _last(link, stream),
        "last of each": await _literal(link, stream, subjects),
        "many": await _many(link, stream, seqs=list(range(1, state.last_seq + 1))),
        "last of many": await _many(link, stream, subjects=subjects) if subjects else {},
        "arrow": await _replayed(link, stream, "arrow"),
        "ndjson": await _replayed(link, stream, "ndjson"),
        "pulled": await _pulled(link, stream),
        "pulled in columns": await _pulled(link, stream, ack_policy="none"),
    }


def other(subject: str, text: str) -> PublishMessage:
    """A message of a subject that has others."""
    return PublishMessage(subject, {"H": [text]}, text.encode())
