"""`contrail server check`, `rtt` and `top`: the health and the load of a server.

Checks follow the convention of monitoring plugins: they print one line, and exit with 0 (ok), 1
(warning), 2 (critical) or 3 (unknown).
"""

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import count
from typing import Annotated, Final

import msgspec
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from contrail_client.cli import show, units
from contrail_client.cli.arguments import ConsumerName, StreamName
from contrail_client.cli.commands.bench import percentile
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.tree import group
from contrail_client.errors import ContrailError
from contrail_client.models import StreamInfo
from contrail_client.times import to_timedelta

app = group("Monitor a server.")
checks = group(
    "Checks for monitoring systems. Exit status: 0 ok, 1 warning, 2 critical, 3 unknown."
)
app.add_typer(checks, name="check")

_MS: Final = 1_000.0
_NOBODYS: Final = "-"
"""A prefix that no stream is likely to have, so that listing such streams costs little."""


class Level(IntEnum):
    """The severity of a finding. The value is the exit status."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    what: str
    value: float
    level: Level
    text: str


Warn = Annotated[
    float | None,
    typer.Option(
        "--warn", metavar="NUMBER", help="Warn if the answer takes more than this many seconds."
    ),
]
Critical = Annotated[
    float | None,
    typer.Option(
        "--critical",
        metavar="NUMBER",
        help="Critical if the answer takes more than this many seconds.",
    ),
]
MinMessages = Annotated[int | None, typer.Option(help="Critical if the stream has fewer messages.")]
MaxMessages = Annotated[int | None, typer.Option(help="Critical if the stream has more messages.")]
MaxSilence = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Critical if the newest message is older than this."),
]
MaxPending = Annotated[int | None, typer.Option(help="Critical if more messages are pending.")]
MaxAckPending = Annotated[
    int | None, typer.Option(help="Critical if more messages are unacknowledged.")
]
MaxRedelivered = Annotated[
    int | None, typer.Option(help="Critical if more messages were redelivered.")
]


def register(outer: typer.Typer) -> None:
    """Add the commands that belong to no group."""
    client_command(outer, "rtt")(measure_rtt)
    client_command(outer, "top")(watch)


@client_command(checks, "connection")
def check_connection(session: Session, warn: Warn = 0.5, critical: Critical = 1.0) -> None:
    """Check that the server answers in time and accepts the token."""

    def look() -> list[Finding]:
        next(iter(session.client.list_streams(prefix=_NOBODYS)), None)
        seconds = session.client.rtt()
        text = f"answers in {seconds * _MS:.1f} ms"
        return [_at_most("rtt_seconds", seconds, warn, critical, text)]

    _conclude(session, "connection", look)


@client_command(checks, "stream")
def check_stream(
    session: Session,
    stream: StreamName,
    min_messages: MinMessages = None,
    max_messages: MaxMessages = None,
    max_silence: MaxSilence = None,
) -> None:
    """Check that a stream exists, is undamaged and is within the given bounds."""

    def look() -> list[Finding]:
        info = session.client.get_stream(stream)
        held = info.state.messages
        text = units.counted(held, "message")
        findings = [_damage(info), _at_most("messages", held, None, max_messages, text)]
        if min_messages is not None and held < min_messages:
            fewer = f"{text}, fewer than {units.count(min_messages)}"
            findings.append(Finding("messages", held, Level.CRITICAL, fewer))
        if max_silence is not None:
            findings.append(_silence(info.state.last_ts, max_silence))
        return findings

    _conclude(session, stream, look)


@client_command(checks, "consumer")
def check_consumer(
    session: Session,
    stream: StreamName,
    consumer: ConsumerName,
    max_pending: MaxPending = None,
    max_ack_pending: MaxAckPending = None,
    max_redelivered: MaxRedelivered = None,
    max_silence: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Critical if the last delivery is older than this."),
    ] = None,
) -> None:
    """Check that a consumer exists and keeps up."""

    def look() -> list[Finding]:
        info = session.client.consumer(stream, consumer).info()
        bounds = (
            ("pending", info.num_pending, max_pending),
            ("unacknowledged", info.num_ack_pending, max_ack_pending),
            ("redelivered", info.num_redelivered, max_redelivered),
        )
        findings = [
            _at_most(what, number, None, bound, f"{units.count(number)} {what}")
            for what, number, bound in bounds
        ]
        if max_silence is not None:
            findings.append(_silence(info.delivered.last_active, max_silence))
        return findings

    _conclude(session, f"{stream}/{consumer}", look)


def measure_rtt(
    session: Session,
    number: Annotated[int, typer.Option("--count", min=1, help="Number of requests to send.")] = 10,
) -> None:
    """Measure the round-trip time of a request that does no work on the server."""
    session.client.rtt()  # the first one connects
    found_ms = sorted(session.client.rtt() * _MS for _ in range(number))
    facts = {
        "server": session.context.url,
        "min_ms": round(found_ms[0], 3),
        "p50_ms": percentile(found_ms, 50),
        "p99_ms": percentile(found_ms, 99),
        "max_ms": round(found_ms[-1], 3),
    }
    show.facts(facts, "round trip", as_json=session.as_json)


def watch(
    session: Session,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Refresh interval.")
    ] = 2.0,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this many refreshes. Default: run until Ctrl-C."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of streams to show.")] = 20,
) -> None:
    """Show the busiest streams with messages stored and removed per second."""
    before: dict[str, StreamInfo] = {}
    begun = looked_before = time.monotonic()
    with Live(console=show.console, auto_refresh=False, screen=False) as screen:
        for number in range(rounds) if rounds else count():
            if number:
                time.sleep(max(begun + number * interval - time.monotonic(), 0.0))
            now = {info.name: info for info in session.client.list_streams()}
            looked = time.monotonic()
            # A look may be late or slow, so the interval that was asked for says too little.
            passed_s, looked_before = looked - looked_before, looked
            rates = [_rates(before.get(name), info, passed_s) for name, info in now.items()]
            rates.sort(key=lambda each: (-each.stored, -each.removed, each.stream))
            before = now
            if session.as_json:
                show.json_line({"time": time.time(), "streams": rates[:limit]})
            else:
                screen.update(_drawn(rates[:limit]), refresh=True)


class Rates(msgspec.Struct, frozen=True):
    """A stream's size, and the messages stored and removed per second since the last refresh."""

    stream: str
    messages: int
    bytes: int
    consumers: int
    stored: float
    removed: float


def _rates(before: StreamInfo | None, now: StreamInfo, passed_s: float) -> Rates:
    """The rates between two looks at a stream; 0 if it was not there before, or was re-created."""
    state = now.state
    stored = removed = 0.0
    # A stream that was re-created begins again at 0, which is no negative rate.
    if before is not None and before.created == now.created:
        added = _assigned(now) - _assigned(before)
        stored = added / passed_s
        removed = (before.state.messages + added - state.messages) / passed_s
    return Rates(
        now.name,
        state.messages,
        state.bytes,
        state.consumer_count,
        round(stored, 1),
        round(removed, 1),
    )


def _assigned(info: StreamInfo) -> int:
    """The number of sequences assigned so far; each shard has sequences of its own."""
    return sum(state.last_seq for state in info.shards or (info.state,))


def _drawn(rates: Sequence[Rates]) -> Table:
    drawn = Table("stream")
    for column in ("stored/s", "removed/s", "messages", "size", "consumers"):
        drawn.add_column(column, justify="right")
    for each in rates:
        numbers = (units.count(each.stored), units.count(each.removed), units.count(each.messages))
        row = (*numbers, units.size(each.bytes), units.count(each.consumers))
        drawn.add_row(escape(each.stream), *row)
    return drawn


def _at_most(
    what: str, value: float, warn: float | None, critical: float | None, text: str
) -> Finding:
    if critical is not None and value > critical:
        return Finding(what, value, Level.CRITICAL, f"{text}, more than {units.count(critical)}")
    if warn is not None and value > warn:
        return Finding(what, value, Level.WARNING, f"{text}, more than {units.count(warn)}")
    return Finding(what, value, Level.OK, text)


def _damage(info: StreamInfo) -> Finding:
    lost = bool(info.data_loss)
    text = "messages were lost" if lost else "sound"
    return Finding("data_loss", lost, Level.CRITICAL if lost else Level.OK, text)


def _silence(last: str | None, longest: str) -> Finding:
    bound_s = to_timedelta(longest).total_seconds()
    if last is None:
        return Finding("silence_seconds", -1, Level.CRITICAL, "no message yet")
    age_s = units.since_s(last, time.time_ns())
    text = f"newest {units.span(age_s)} ago"
    level = Level.CRITICAL if age_s > bound_s else Level.OK
    return Finding("silence_seconds", round(age_s, 3), level, text)


def _conclude(session: Session, about: str, look: Callable[[], list[Finding]]) -> None:
    """Print the worst findings on one line, and exit with their level.

    An error of the server or of the connection is CRITICAL.
    """
    try:
        findings = look()
    except ContrailError as error:
        status = getattr(error, "status", 0)
        # A monitoring system needs a line and a status even if the server does not answer.
        findings = [Finding("answer", status, Level.CRITICAL, " ".join(str(error).split()))]
    worst = max((each.level for each in findings), default=Level.UNKNOWN)
    if session.as_json:
        text = [{**msgspec.structs.asdict(each), "level": each.level.name} for each in findings]
        show.json_line({"level": worst.name, "about": about, "findings": text})
    else:
        texts = "; ".join(each.text for each in findings if each.level == worst or not worst)
        show.console.print(f"{worst.name} {about}: {texts}", markup=False, soft_wrap=True)
    raise typer.Exit(worst)
