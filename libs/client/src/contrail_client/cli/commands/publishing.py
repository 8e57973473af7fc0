"""`contrail pub`: one message, many copies of one, or a message for each line."""

import random
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

import typer

from contrail_client.cli import show
from contrail_client.cli.arguments import HeaderTexts, headers_of
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.ending import Misuse
from contrail_client.errors import ContrailError
from contrail_client.live.blocking import Publication, Publisher
from contrail_client.live.outbox import MAX_OUTSTANDING, RETRY_S
from contrail_client.models import Message, PubAck
from contrail_client.times import time_text, to_timedelta
from contrail_client.transport import RECONNECT_S

_PLACEHOLDER: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_RANDOM_MAX: Final = 1_000_000
_FILLERS: Final[Mapping[str, Callable[[int], str]]] = {
    "count": str,
    "time": lambda _: time_text(datetime.now(UTC)),
    "unix_ns": lambda _: str(time.time_ns()),
    "random": lambda _: str(random.randrange(_RANDOM_MAX)),
    "id": lambda _: secrets.token_hex(8),
}
_PLACEHOLDERS: Final = ", ".join(f"{{{{{name}}}}}" for name in _FILLERS)


class Acks(StrEnum):
    """What to wait for."""

    STORED = "stored"
    NONE = "none"


Payload = Annotated[
    str, typer.Argument(help="Payload; - reads it from standard input.", show_default="empty")
]
Count = Annotated[int, typer.Option(min=1, help="Publish the message this many times.")]
Template = Annotated[
    bool,
    typer.Option(
        "--template",
        help=f"Replace {_PLACEHOLDERS} in the subject, payload and headers of each message.",
    ),
]
Sleep = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help='Pause between messages, such as "100ms".'),
]
Lines = Annotated[
    bool, typer.Option("--lines", help="Publish each line of standard input as a message.")
]
MsgId = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Message id: the same id is stored only once within the duplicate window.",
    ),
]
Ttl = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help='Time to live of the messages, such as "90s", or never.'),
]
Ack = Annotated[Acks, typer.Option(help="none: do not wait until messages are stored.")]
Outstanding = Annotated[int, typer.Option(min=1, help="Maximum number of unacknowledged messages.")]

RetryFor = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="With --count or --lines: seconds to keep retrying while the server is unavailable.",
    ),
]

_ID_SHARE: Final = 0.8
"""The share of the duplicate window in which messages are resent. The rest allows for the time
that a message is under way."""

_NEWLINE: Final = b"\r\n"


def register(app: typer.Typer) -> None:
    """Add the command."""
    client_command(app, "pub")(publish)


def publish(
    session: Session,
    subject: Annotated[str, typer.Argument(help="Subject of the messages.")],
    payload: Payload = "",
    headers: HeaderTexts = None,
    msg_id: MsgId = None,
    ttl: Ttl = None,
    count: Count = 1,
    lines: Lines = False,
    ack: Ack = Acks.STORED,
    outstanding: Outstanding = MAX_OUTSTANDING,
    retry_for: RetryFor = RECONNECT_S,
    template: Template = False,
    sleep: Sleep = None,
) -> None:
    """Publish messages.

    With --count or --lines, messages are sent over WebSocket with generated ids, so that each is
    stored exactly once even if the connection breaks or the server restarts.
    """
    many = count > 1 or lines
    if many and msg_id is not None:
        raise ValueError(
            "--msg-id cannot be used with --count or --lines: only one message would be stored"
        )
    if lines and (payload or count > 1):
        raise ValueError(
            "--lines reads payloads from standard input; it cannot be used with a "
            "payload or --count"
        )
    given = headers_of(headers)
    if ttl is not None:
        given["Nats-TTL"] = [ttl]
    fill = _filled if template else _as_given
    messages = _paced(_messages(subject, given, _payloads(payload, count, lines), fill), sleep)
    if ack is Acks.NONE:
        for each in messages:
            session.client.publish_unacked(
                each.subject, each.payload, headers=each.headers, msg_id=msg_id
            )
    elif many:
        # A template may fill in other subjects later. Their stream is taken to be that of the
        # first.
        with _publisher(session, fill(subject, 1), outstanding, retry_for) as publisher:
            _publish_many(session, publisher, messages, count, outstanding)
    else:
        [one] = messages
        ack_ = session.client.publish(one.subject, one.payload, headers=one.headers, msg_id=msg_id)
        _show(session, ack_)


def _filled(text: str, count: int) -> str:
    """`text` with its placeholders filled in for the message number `count`; Misuse."""

    def value_of(found: re.Match[str]) -> str:
        filler = _FILLERS.get(found[1])
        if filler is None:
            raise Misuse(f"unknown placeholder {found[0]}; known are {_PLACEHOLDERS}")
        return filler(count)

    return _PLACEHOLDER.sub(value_of, text)


def _as_given(text: str, _count: int) -> str:
    return text


def _messages(
    subject: str,
    headers: dict[str, list[str]],
    payloads: Iterator[bytes],
    fill: Callable[[str, int], str],
) -> Iterator[Message]:
    """A message for each payload, with the placeholders filled in for its number."""
    for number, payload in enumerate(payloads, 1):
        filled = {name: [fill(value, number) for value in headers[name]] for name in headers}
        # Bytes that are not UTF-8 stay as they are.
        text = fill(payload.decode(errors="surrogateescape"), number)
        yield Message(fill(subject, number), text.encode(errors="surrogateescape"), filled)


def _paced(messages: Iterator[Message], pause: str | None) -> Iterator[Message]:
    """`messages`, with a pause before each but the first."""
    pause_s = 0.0 if pause is None else to_timedelta(pause).total_seconds()
    for number, message in enumerate(messages):
        if number and pause_s:
            time.sleep(pause_s)
        yield message


@contextmanager
def _publisher(
    session: Session, subject: str, outstanding: int, retry_for: float
) -> Iterator[Publisher]:
    """A publisher that continues after a restart of the server, with one deadline for all messages.

    A message that may have been stored is resent only while the stream remembers its id.
    """
    # After that time, the stream may have forgotten the id and would store the message twice.
    retry_s = min(retry_for, _remembered_s(session, subject))
    with (
        session.connect(reconnect_s=retry_for) as client,
        client.publisher(max_outstanding=outstanding, auto_ids=True, retry_s=retry_s) as publisher,
    ):
        yield publisher


def _remembered_s(session: Session, subject: str) -> float:
    """Seconds for which the stream of a subject certainly remembers a message id."""
    try:
        info = next(session.client.list_streams(subject=subject), None)
    except ContrailError:  # the publish will report it
        info = None
    if info is None:
        return RETRY_S
    return to_timedelta(info.config["duplicate_window"]).total_seconds() * _ID_SHARE


def _publish_many(
    session: Session,
    publisher: Publisher,
    messages: Iterator[Message],
    count: int,
    outstanding: int,
) -> None:
    acked = 0
    begun = time.perf_counter()
    under_way: deque[Publication] = deque()
    total = count if count > 1 else None

    def settle(advance: Callable[[int], None]) -> None:
        nonlocal acked
        ack = under_way.popleft().result()
        acked += 1
        advance(acked)
        if session.as_json:
            show.json_line(ack)

    with show.progress("Publishing", total) as bar:

        def advance(done: int) -> None:
            bar.update(bar.task_ids[0], completed=done)

        for each in messages:
            under_way.append(publisher.publish(each.subject, each.payload, headers=each.headers))
            while under_way and (len(under_way) > outstanding or under_way[0].done()):
                settle(advance)
        while under_way:
            settle(advance)
    seconds = time.perf_counter() - begun
    if not session.as_json:
        show.console.print(f"{acked:,} stored in {seconds:.2f} s: {acked / seconds:,.0f}/s")


def _payloads(payload: str, count: int, lines: bool) -> Iterator[bytes]:
    stdin = typer.get_binary_stream("stdin")
    if lines:
        for line in stdin:
            yield line.rstrip(_NEWLINE)
        return
    data = stdin.read() if payload == "-" else payload.encode()
    for _ in range(count):
        yield data


def _show(session: Session, ack: PubAck) -> None:
    if session.as_json:
        show.json_line(ack)
    else:
        known = " (duplicate)" if ack.duplicate else ""
        show.console.print(f"{ack.stream} {ack.seq}{known}", markup=False)
